"""Tokenizers in Hugging Face's `tokenizer.json` format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import ConfigError
from configs.tokenizer_files import JSON, SETTINGS, tokenizer_files
from data.tokenizer.base import EOD_NAMES, MASK, MASK_NAMES, OTHER, PAD_NAMES, SPACE, Tokenizer
from data.tokenizer.formats.spec import byte_level_alphabet
from data.tokenizer.probes import MOST_RUNS
from data.tokenizer.settings import CONFIG, FLAGS, Settings, first_line, read_settings, refuse_unknown_end, token_name
from data.tokenizer.transformers_classes import AS_IT_IS, class_of, differing_text
from data.tokenizer.word_encoder import WordEncoder, word_encoder


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that is stored as a Hugging Face `tokenizer.json`."""

    def __init__(self, path: str | Path):
        import tokenizers

        super().__init__()
        self.path = str(path)
        file, text, self._settings = self._read(path)
        try:
            self._model = tokenizers.Tokenizer.from_str(text)
            self._spec: dict[str, Any] = json.loads(text)
            self._dropout = self._spec["model"].get("dropout")
            if self._dropout:  # it would give a text different tokens each time
                self._spec["model"]["dropout"] = None
                self._model = tokenizers.Tokenizer.from_str(json.dumps(self._spec, ensure_ascii=False))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"data.tokenizer={path}: {file} is not a Hugging Face tokenizer.json: {first_line(error)}. {OTHER}"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self.end_file = self._settings.end_file(file.parent)
        self._take_settings(file)
        ids = self._model.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ConfigError(f"data.tokenizer={path}: {file} has no tokens. Give a tokenizer with a vocabulary")
        self.vocab_size = max(ids) + 1
        named, usual = self._named("eos_token"), self._find(EOD_NAMES)
        eod = usual if named is None else named
        if eod is None:
            raise ConfigError(
                f"data.tokenizer={path}: the tokenizer has no end-of-document token. It needs one of "
                f"{', '.join(EOD_NAMES)}, or an eos_token in tokenizer_config.json"
            )
        pads = (self._named("pad_token"), self._find(PAD_NAMES), eod)
        self.eod, self.pad = eod, next(pad for pad in pads if pad is not None)
        self.named_eod = eod if eod != usual else None
        self.bos = self._named("bos_token")
        for role, names in MASK_NAMES.items():
            found = self._named(f"{role}_token")
            if found is not None:
                self.named_roles[role] = found
                if found != self._find(names):
                    self.rules[role] = found

    def _named(self, role: str) -> int | None:
        """Return the id of the token that the settings files name for a role, or None."""
        return self._find([token_name(self._settings.values.get(role))])

    def _take_settings(self, file: Path) -> None:
        """Apply the settings files next to tokenizer.json to the tokenizer, as transformers does: they add tokens, make
        tokens special, and determine whether a text can contain special tokens. Raises ConfigError."""
        import tokenizers

        def token(value: Any, **flags: bool) -> Any:
            own = {flag: bool(value[flag]) for flag in FLAGS if flag in value} if isinstance(value, dict) else {}
            return tokenizers.AddedToken(token_name(value), **{**own, **flags})

        settings, spec = self._settings, self._spec.get("added_tokens", [])
        added = {number: token(value) for number, value in settings.added.items()}
        if not settings.by_config:
            added |= {value["id"]: token(value) for value in spec}
        known = {one.content: one for one in added.values()}
        tokens = [one for _, one in sorted(added.items())]
        have = {value["content"] for value in spec} | set(known)
        named = list(settings.named().values())
        for value in [*named, *settings.unnamed()]:
            name = token_name(value)
            if name and name not in have:
                have.add(name)
                tokens.append(known.get(name, token(value, special=True)))
        names = {token_name(value) for value in named}
        for one in tokens:
            one.special = one.special or one.content in names
        if not {token_name(settings.values.get("eos_token"))} & known.keys():
            refuse_unknown_end(self.path, settings, file.name, self._named("eos_token") is not None)
        before = self._added_tokens()
        self._model.add_tokens(tokens)
        after = self._added_tokens()
        if after != before:
            self.rules["added_tokens"] = after
        # With split_special_tokens, "<s>" in a text is three characters.
        if settings.values.get("split_special_tokens") and any(value["special"] for value in after):
            self._model.encode_special_tokens = self.rules["split_special_tokens"] = True

    def _added_tokens(self) -> list[dict[str, Any]]:
        """Return the added tokens in the format of tokenizer.json, without serializing the entire model."""
        return [
            {"id": i, "content": token.content, **{flag: getattr(token, flag) for flag in FLAGS}}
            for i, token in sorted(self._model.get_added_tokens_decoder().items())
        ]

    def _read(self, path: str | Path) -> tuple[Path, str, Settings]:
        """Return the tokenizer's file, its text as a tokenizer.json, and its settings. Raises ConfigError."""
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            return file, file.read_text(encoding="utf-8"), read_settings(file.parent)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.tokenizer={path}: {file} is not a Hugging Face tokenizer.json: {first_line(error)}. {OTHER}"
            ) from error

    def encode_array(self, text: str) -> np.ndarray:
        with self._named_errors(text):
            ids = None if self._words is None else self._words.encode(text)
            if ids is not None:
                return ids
            return np.array(self._model.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        with self._named_errors(text):
            return list(self._model.encode(text, add_special_tokens=True).ids)

    def encode_masked(self, text: str) -> list[int]:
        """Return the token ids of `text` with the mask token for each [MASK] and for each name of the mask token."""
        text = text.replace(MASK, self.token_piece(self.mask))
        with self._named_errors(text):
            return list(self._with_mask.encode(text, add_special_tokens=False).ids)

    @contextlib.contextmanager
    def _named_errors(self, text: str) -> Iterator[None]:
        """Turn an error of the library in the `with` block, such as a pattern that takes too long, into a ConfigError
        with the tokenizer and the text. (The library's PanicException is not an Exception.)"""
        try:
            yield
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError, ConfigError)):
                raise
            raise ConfigError(
                f"data.tokenizer={self.path}: the tokenizers library cannot encode the text {text[:40]!r} "
                f"({len(text)} characters): {first_line(error)}. {OTHER}"
            ) from error

    @cached_property
    def _with_mask(self) -> Any:
        """A copy of the library's tokenizer that also recognizes the name of the mask token in a text."""
        import tokenizers

        spec = json.loads(self._model.to_str())
        for token in spec["added_tokens"]:
            token["special"] = token["special"] and token["id"] != self.mask
        model = tokenizers.Tokenizer.from_str(json.dumps(spec))
        model.encode_special_tokens = self._model.encode_special_tokens
        if all(token["id"] != self.mask for token in spec["added_tokens"]):  # an ordinary token
            model.add_tokens([tokenizers.AddedToken(self.token_piece(self.mask), normalized=False)])
        return model

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._words is not None:
            return super().encode_batch(texts)
        with self._named_errors(max(texts, key=len, default="")):
            return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def token_piece(self, token: int) -> str:
        return self._model.id_to_token(token) or ""

    def rule_texts(self) -> list[str]:
        texts: list[str] = []
        pending = [self._spec.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
        while pending:
            item = pending.pop()
            if isinstance(item, str) and len(texts) < MOST_RUNS:
                texts.append(item)
            elif isinstance(item, (dict, list)):
                pending.extend(item.values() if isinstance(item, dict) else item)
        return texts

    def control_tokens(self) -> dict[int, str]:
        unigram, unknown = self._spec["model"].get("unk_id"), self._spec["model"].get("unk_token")
        added = self._model.get_added_tokens_decoder()
        found = {i: one.content for i, one in added.items() if one.special}
        no_control = {unigram, self._find([unknown or ""])} - {self.eod, self.pad}
        return {i: content for i, content in found.items() if i not in no_control}

    def _content(self) -> bytes:
        # The ids depend neither on order and layout of the JSON nor on truncation and padding, which are off here.
        spec = {key: value for key, value in self._spec.items() if key not in ("truncation", "padding")}
        return json.dumps(spec, sort_keys=True).encode()

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._model.decode([int(i) for i in ids], skip_special_tokens=True))

    def kept_files(self) -> dict[str, str] | None:
        if not self._dropout:
            return None
        files = tokenizer_files(Path(self.path)).items()
        settings = {name: file.read_text(encoding="utf-8") for name, file in files if name in SETTINGS}
        return {**settings, **self._without_dropout()}

    def _without_dropout(self) -> dict[str, str]:
        return {JSON: json.dumps(self._spec, ensure_ascii=False)} if self._dropout else {}

    def for_transformers(self, family: str) -> dict[str, str]:
        # Without a class in the settings, transformers would use the class of the model's family. Either class may
        # split texts in its own way.
        values = self._settings.values
        name = str(values.get("tokenizer_class", "")).removesuffix("Fast")
        if name and differing_text(self._spec, values, name) is None:
            return self._without_dropout()
        roles = {"eos_token": self._model.id_to_token(self.eod), "pad_token": self._model.id_to_token(self.pad)}
        settings = {**(values or roles), "tokenizer_class": AS_IT_IS}
        return {**self._without_dropout(), CONFIG: json.dumps(settings, indent=2) + "\n"}

    def notes(self) -> list[str]:
        folder = Path(self.path) if Path(self.path).is_dir() else Path(self.path).parent
        name = class_of(self._settings.values, folder)
        text = differing_text(self._spec, self._settings.values, name)
        notes = super().notes()
        if self._dropout:
            notes.append(f"{self.path} has dropout {self._dropout}, which would make tokens random; it is ignored")
        if text is not None:
            notes.append(
                f"{self.path} is read as its tokenizer.json says, but transformers 5 reads it as {name}, with other "
                f"tokens for {text[:20]!r}"
            )
        return notes

    @cached_property
    def _words(self) -> WordEncoder | None:
        return word_encoder(self._model, {**self._spec, "added_tokens": self._added_tokens()})

    def _find(self, names: Iterable[str]) -> int | None:
        return next((i for i in map(self._model.token_to_id, names) if i is not None), None)

    def _surfaces(self) -> list[bytes | None]:
        special = {i for i, token in self._model.get_added_tokens_decoder().items() if token.special}
        byte_level = _names_type([self._spec.get("pre_tokenizer"), self._spec.get("decoder")], "ByteLevel")
        alphabet = byte_level_alphabet() if byte_level else {}
        surfaces: list[bytes | None] = []
        for i in range(self.vocab_size):
            name = None if i in special else self._model.id_to_token(i)
            if name is None:
                surfaces.append(None)
            elif byte_level:
                surfaces.append(b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in name))
            elif len(name) == 6 and name.startswith("<0x"):
                surfaces.append(bytes([int(name[3:5], 16)]))
            else:
                surfaces.append(name.replace(SPACE, " ").encode())
        return surfaces

    def word_starts(self) -> np.ndarray:
        if self._spec["model"].get("type") != "WordPiece":
            return super().word_starts()
        prefix = self._spec["model"].get("continuing_subword_prefix", "##")
        names = [self._model.id_to_token(i) for i in range(self.vocab_size)]
        return np.array([name is None or not name.startswith(prefix) for name in names], dtype=bool)

    def word_ends(self) -> np.ndarray:
        if self._spec["model"].get("type") != "WordPiece":
            return super().word_ends()
        return np.zeros(self.vocab_size, dtype=bool)  # the "##" mark alone decides where words begin


def _names_type(spec: Any, kind: str) -> bool:
    """Return whether a section of a tokenizer.json contains an object whose `type` is `kind`."""
    if isinstance(spec, dict):
        return spec.get("type") == kind or any(_names_type(value, kind) for value in spec.values())
    return isinstance(spec, list) and any(_names_type(value, kind) for value in spec)
