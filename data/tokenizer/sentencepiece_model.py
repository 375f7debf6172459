"""Tokenizers in sentencepiece's `.model` format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import ConfigError
from configs.tokenizer_files import JSON
from data.tokenizer.base import CLS, EOD_NAMES, MASK, OTHER, PAD, PAD_NAMES, REPLACEMENT, SEP, SPACE, Tokenizer
from data.tokenizer.formats.spec import around
from data.tokenizer.sentencepiece_json import NotConvertible, keeps_text, read_model, tokenizer_json
from data.tokenizer.settings import CONFIG, first_line, read_settings, refuse_unknown_end, token_name
from data.tokenizer.transformers_classes import AS_IT_IS


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a sentencepiece `.model` file."""

    def __init__(self, path: str | Path):
        import sentencepiece

        super().__init__()
        self.path = str(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=self.path)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"data.tokenizer={self.path} is not a sentencepiece model: {first_line(error)}. {OTHER}"
            ) from error
        self.vocab_size = self._model.vocab_size()
        settings = read_settings(Path(path).parent)
        named = {role: self._find([token_name(settings.values.get(role))]) for role in ("eos_token", "pad_token")}
        self.end_file = settings.end_file(Path(path).parent)
        refuse_unknown_end(self.path, settings, Path(path).name, named["eos_token"] is not None)
        eod = self._model.eos_id()
        usual = eod if eod >= 0 else self._find(EOD_NAMES)
        found = usual if named["eos_token"] is None else named["eos_token"]
        if found is None:
            raise ConfigError(
                f"data.tokenizer={self.path}: the tokenizer has no end-of-document token. It needs one of "
                f"{', '.join(EOD_NAMES)}. {OTHER}"
            )
        self.eod, self.named_eod = found, None if found == usual else found
        pads = (named["pad_token"], self._model.pad_id(), self._find(PAD_NAMES), self.eod)
        self.pad = next(pad for pad in pads if pad is not None and pad >= 0)
        bos = self._find([token_name(settings.values.get("bos_token"))])
        self.bos = bos if bos is not None else self._model.bos_id() if self._model.bos_id() >= 0 else None
        self._before = [self.bos] if settings.values.get("add_bos_token") and self.bos is not None else []
        self._after = [self.eod] if settings.values.get("add_eos_token") else []
        self._space_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    @cached_property
    def _lossless(self) -> bool:
        """True if U+2581 in a text is encoded as its three bytes, and so decoded to itself, as in the models that
        Mixtrain trains. With other models, sentencepiece decodes the character to a space."""
        return all(map(self._model.is_byte, self._space_ids)) and keeps_text(read_model(Path(self.path)))

    def encode_array(self, text: str) -> np.ndarray:
        if SPACE not in text or not self._lossless:
            return self._model.encode_as_numpy(text)
        escaped = np.array(self._space_ids, dtype=np.int32)
        first, *rest = [self._model.encode_as_numpy(span) for span in text.split(SPACE)]
        return np.concatenate([first, *(array for ids in rest for array in (escaped, ids))])

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._lossless and any(SPACE in text for text in texts):
            return super().encode_batch(texts)
        return self._model.encode(texts, num_threads=1)

    def _content(self) -> bytes:
        return Path(self.path).read_bytes()

    def encode_prompt(self, text: str) -> list[int]:
        # Of two equally likely splits of a word, sentencepiece may return either. Use that of transformers if possible.
        ids = self.encode(text) if self._of_transformers is None else self._of_transformers.encode(text).ids
        return [*self._before, *ids, *self._after]

    @cached_property
    def _of_transformers(self) -> Any:
        import tokenizers

        try:
            model = tokenizers.Tokenizer.from_str(tokenizer_json(Path(self.path))[JSON])
        except NotConvertible:
            return None
        model.encode_special_tokens = True  # "</s>" in a text is four characters
        return model

    def for_transformers(self, family: str) -> dict[str, str]:
        files = tokenizer_json(Path(self.path), family)
        named = read_settings(Path(self.path).parent).values
        if not named:
            return files
        # The folder is from Hugging Face: transformers would use the class that its settings name, with other rules.
        spec, settings = (json.loads(files[name]) for name in (JSON, CONFIG))
        before, after = ([(self._model.id_to_piece(i), i) for i in ids] for ids in (self._before, self._after))
        spec["post_processor"] = around(before, after) or spec["post_processor"]
        left_out = ("added_tokens_decoder", "add_bos_token", "add_eos_token", "auto_map")
        kept = {key: value for key, value in named.items() if key not in left_out}
        settings = {**settings, **kept, "tokenizer_class": AS_IT_IS}
        return {JSON: json.dumps(spec, ensure_ascii=False), CONFIG: json.dumps(settings, indent=2) + "\n"}

    def decode(self, ids: Iterable[int]) -> str:
        model = self._model
        # A language model may have more token ids than its tokenizer.
        known = (i for i in map(int, ids) if 0 <= i < self.vocab_size)
        kept = [i for i in known if not (model.is_control(i) or model.is_unknown(i))]
        text = model.decode(kept)
        if REPLACEMENT not in text:
            return str(text)
        # As Hugging Face's tokenizers do, write a replacement character for each byte of a run that is not UTF-8.
        replaced: list[int] = []
        for is_byte, group in itertools.groupby(kept, model.is_byte):
            run = list(group)
            if is_byte:
                try:
                    bytes(int(model.id_to_piece(i)[3:5], 16) for i in run).decode()
                except UnicodeDecodeError:
                    run = [model.piece_to_id(f"<0x{byte:02X}>") for byte in REPLACEMENT.encode()] * len(run)
            replaced += run
        return str(model.decode(replaced))

    def token_piece(self, token: int) -> str:
        return str(self._model.id_to_piece(token))

    def _find(self, names: Iterable[str]) -> int | None:
        known = ((self._model.piece_to_id(name), name) for name in names)  # an unknown name gives the id of <unk>
        return next((i for i, name in known if self._model.id_to_piece(i) == name), None)

    def _surfaces(self) -> list[bytes | None]:
        model = self._model
        surfaces: list[bytes | None] = []
        for i in range(self.vocab_size):
            name = model.id_to_piece(i)
            if model.is_byte(i):
                surfaces.append(bytes([int(name[3:5], 16)]))
            elif model.is_control(i) or model.is_unknown(i) or name in (CLS, SEP, MASK, PAD):
                surfaces.append(None)
            else:
                surfaces.append(name.replace(SPACE, " ").encode())
        return surfaces
