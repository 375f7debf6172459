"""Hugging Face's `tokenizer.json` files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import ConfigError
from data.tokenizer.base import EOD_NAMES, PAD_NAMES, SPACE, Tokenizer
from data.tokenizer.settings import first_line, read_settings, token_name
from data.tokenizer.words import WordEncoder, word_encoder


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, or a folder that holds one."""

    def __init__(self, path: str | Path):
        import tokenizers

        self.path = str(path)
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            self._model = tokenizers.Tokenizer.from_file(str(file))
            self._spec: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"data.tokenizer={path}: {file} is no Hugging Face tokenizer.json: {first_line(error)}"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        settings = read_settings(file.parent)
        self._says_class = "tokenizer_class" in settings
        named = {
            role: [token_name(settings[role])]
            for role in ("bos_token", "eos_token", "pad_token")
            if token_name(settings.get(role))
        }
        eod = self._find([*named.get("eos_token", ()), *EOD_NAMES])
        if eod is None:
            raise ConfigError(
                f"data.tokenizer={path}: it has no end-of-document token: none of {', '.join(EOD_NAMES)}, "
                "and no eos_token in tokenizer_config.json"
            )
        self.eod = eod
        self.named_eod = eod if eod != self._find(EOD_NAMES) else None
        pad = self._find([*named.get("pad_token", ()), *PAD_NAMES])
        self.pad = eod if pad is None else pad
        self.bos = self._find(named.get("bos_token", ()))
        roles = {"eos_token": self._model.id_to_token(self.eod), "pad_token": self._model.id_to_token(self.pad)}
        self._settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(settings or roles)}

    def encode_array(self, text: str) -> np.ndarray:
        ids = None if self._words is None else self._words.encode(text)
        if ids is not None:
            return ids
        return np.array(self._model.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        return list(self._of_transformers.encode(text, add_special_tokens=True).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._words is not None:
            return super().encode_batch(texts)
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def _content(self) -> bytes:
        # Neither the order and layout of the JSON nor what is switched off above changes an id.
        spec = {key: value for key, value in self._spec.items() if key not in ("truncation", "padding")}
        return json.dumps(spec, sort_keys=True).encode()

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._of_transformers.decode([int(i) for i in ids], skip_special_tokens=True))

    def for_transformers(self, family: str) -> dict[str, str]:
        # Without a class in its settings, transformers would take that of the model's family, which may split texts by
        # rules of its own.
        return {} if self._says_class else {"tokenizer_config.json": json.dumps(self._settings, indent=2) + "\n"}

    @cached_property
    def _words(self) -> WordEncoder | None:
        return word_encoder(self._model, self._spec)

    @cached_property
    def _of_transformers(self) -> Any:
        """The tokenizer as transformers takes it: what the files beside tokenizer.json name as special tokens are so,
        too. Training's encoding does not know of them."""
        import tokenizers

        model = tokenizers.Tokenizer.from_str(self._model.to_str())
        names = {token_name(value) for key, value in self._settings.items() if key.endswith("_token")}
        extra = self._settings.get("additional_special_tokens") or self._settings.get("extra_special_tokens") or []
        names |= {token_name(value) for value in (extra.values() if isinstance(extra, dict) else extra)}
        names |= {
            token_name(value)
            for value in self._settings.get("added_tokens_decoder", {}).values()
            if value.get("special")
        }
        known = sorted(name for name in names if name and model.token_to_id(name) is not None)
        have = {token.content for token in model.get_added_tokens_decoder().values() if token.special}
        model.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in known if name not in have])
        # whether "<s>" in a text is three characters
        model.encode_special_tokens = bool(self._settings.get("split_special_tokens"))
        return model

    def _find(self, names: Iterable[str]) -> int | None:
        return next((i for i in map(self._model.token_to_id, names) if i is not None), None)

    def _kinds(self) -> set[str]:
        """Every `type` that the pre-tokenizer and the decoder name."""
        kinds: set[str] = set()
        pending = [self._spec.get("pre_tokenizer"), self._spec.get("decoder")]
        while pending:
            item = pending.pop()
            if isinstance(item, dict):
                kinds.add(str(item.get("type")))
                pending.extend(value for value in item.values() if isinstance(value, (dict, list)))
            elif isinstance(item, list):
                pending.extend(item)
        return kinds

    def _surfaces(self) -> list[bytes | None]:
        special = {token["id"] for token in self._spec.get("added_tokens", []) if token.get("special")}
        byte_level = "ByteLevel" in self._kinds()
        alphabet = _byte_level_alphabet() if byte_level else {}
        surfaces: list[bytes | None] = []
        for i in range(self.vocab_size):
            piece = None if i in special else self._model.id_to_token(i)
            if piece is None:
                surfaces.append(None)
            elif byte_level:
                surfaces.append(b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece))
            elif len(piece) == 6 and piece.startswith("<0x"):
                surfaces.append(bytes([int(piece[3:5], 16)]))
            else:
                surfaces.append(piece.replace(SPACE, " ").encode())
        return surfaces

    def _is_word_piece(self) -> bool:
        return self._spec["model"].get("type") == "WordPiece"

    def word_starts(self) -> np.ndarray:
        if not self._is_word_piece():
            return super().word_starts()
        prefix = self._spec["model"].get("continuing_subword_prefix", "##")
        pieces = [self._model.id_to_token(i) for i in range(self.vocab_size)]
        return np.array([piece is None or not piece.startswith(prefix) for piece in pieces], dtype=bool)

    def word_ends(self) -> np.ndarray:
        # The "##" mark alone says where words begin.
        return np.zeros(self.vocab_size, dtype=bool) if self._is_word_piece() else super().word_ends()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: character -> byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
