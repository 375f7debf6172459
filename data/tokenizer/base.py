"""The interface that all tokenizers implement, and the names that common tokenizers give to special tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import ConfigError
from configs.tokenizer_files import JSON, core_file

OTHER = "Give another tokenizer, or data.tokenizer=sentencepiece to train one"  # the way out of many errors
REPLACEMENT = "\ufffd"  # stands for bytes that are not text
SPACE = "\u2581"  # sentencepiece writes spaces as this character (and reads it back as a space)
PAD, EOD, CLS, SEP, MASK = "<pad>", "</s>", "[CLS]", "[SEP]", "[MASK]"
# Names that common tokenizers use for the same role, the most common first.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "<eod>", "[EOS]", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>")
MASK_NAMES = {"cls": ("[CLS]", "<cls>", "<s>"), "sep": ("[SEP]", "<sep>", "</s>"), "mask": ("[MASK]", "<mask>")}


class Tokenizer(ABC):
    """Conversion of text to token ids and back.

    `pad`, `eod` and, for BERT, `cls`, `sep` and `mask` are token ids; the last three raise ConfigError if the tokenizer
    has no such token. `bos` is the id of the token with which the tokenizer begins texts, if it names one; training
    does not use `bos`, because each document follows `eod`.
    """

    path: str
    vocab_size: int
    eod: int
    pad: int
    bos: int | None
    named_eod: int | None = None  # eod, if a settings file names an unusual token for it
    reading_notes: Sequence[str] = ()  # for the user, on how its files are read
    end_file: Path  # the settings file whose eos_token counts; it need not exist
    rules: dict[str, Any]  # changes of the ids by settings files; part of the digest
    named_roles: dict[str, int]  # cls, sep and mask, if a settings file names them

    def __init__(self) -> None:
        self.rules, self.named_roles = {}, {}

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int32 [n], without added special tokens. The name of a special token in the
        text becomes this token only if the tokenizer's files request that, as in transformers."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, leaving out special tokens."""

    @abstractmethod
    def token_piece(self, token: int) -> str:
        """Return the text of a token id in the vocabulary."""

    @abstractmethod
    def _find(self, names: Iterable[str]) -> int | None:
        """Return the id of the first name that is in the vocabulary, or None."""

    @abstractmethod
    def _surfaces(self) -> list[bytes | None]:
        """Return the bytes of text that each token represents, including a leading space; None for special tokens."""

    @abstractmethod
    def _content(self) -> bytes:
        """Return bytes that determine the token ids of every text, but not the roles of special tokens."""

    def rule_texts(self) -> list[str]:
        """Return the patterns and strings that the tokenizer searches for in a text."""
        return []

    def notes(self) -> list[str]:
        """Return notes for the user about how the tokenizer's files are interpreted."""
        return list(self.reading_notes)

    def kept_files(self) -> dict[str, str] | None:
        """Return the texts of the files with which a run stores the tokenizer, by name; None if the run copies the
        tokenizer's own files."""
        return None

    def core_bytes(self) -> bytes:
        """Return the bytes of the tokenizer's main file, which determines the tokens, in the form that a run stores."""
        kept = self.kept_files()
        return kept[JSON].encode() if kept is not None else (core_file(Path(self.path)) or Path(self.path)).read_bytes()

    @cached_property
    def digest(self) -> str:
        """A digest (32 hexadecimal digits), equal for tokenizers that give equal tokens, whatever their path."""
        rules = json.dumps(self.rules, sort_keys=True).encode() if self.rules else b""
        roles = json.dumps([self.eod, self.pad]).encode()
        return hashlib.sha256(roles + self._content() + rules).hexdigest()[:32]

    @property
    def before_text(self) -> int:
        """The id of the token that precedes a text, and from which its first token is predicted: `bos` if set, else
        `eod`, as in lm-eval."""
        return self.eod if self.bos is None else self.bos

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text as a list, without added special tokens."""
        return self.encode_array(text).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt for generation, with the special tokens that transformers adds."""
        return self.encode(text)

    def encode_masked(self, text: str) -> list[int]:
        """Return the token ids of a text, in which [MASK] becomes the mask token, without other special tokens."""
        first, *rest = [self.encode(span) for span in text.split(MASK)]
        return first + [token for ids in rest for token in (self.mask, *ids)]

    def control_tokens(self) -> dict[int, str]:
        """Return the names that become special tokens wherever a text contains them, by token id; the unknown token's
        name is left out."""
        return {}

    def for_transformers(self, family: str) -> dict[str, str]:
        """Return the texts of the files, by name, from which transformers loads an equal tokenizer for a model of this
        family. Raises NotConvertible if there are no such files."""
        return {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of several texts, faster than by single calls if the texts are short."""
        return [self.encode(text) for text in texts]

    def _role(self, role: str) -> int:
        found = self.named_roles.get(role, self._find(MASK_NAMES[role]))
        if found is None:
            raise ConfigError(
                f"data.tokenizer={self.path}: the tokenizer has no {role} token (one of "
                f"{', '.join(MASK_NAMES[role])}), which BERT needs. {OTHER}"
            )
        return found

    @cached_property
    def cls(self) -> int:
        return self._role("cls")

    @cached_property
    def sep(self) -> int:
        return self._role("sep")

    @cached_property
    def mask(self) -> int:
        return self._role("mask")

    def special_ids(self) -> np.ndarray:
        """Return the ids of the tokens that represent no text, in ascending order."""
        return np.flatnonzero([surface is None for surface in self._surfaces()])

    def line_ends(self) -> np.ndarray:
        """Return whether each token ends a line, ignoring spaces after the line's end: bool [vocab_size]."""
        ends = (text is not None and text.rstrip(b" \t").endswith(b"\n") for text in self._surfaces())
        return np.array(list(ends), dtype=bool)

    def word_starts(self) -> np.ndarray:
        """Return whether each token begins a word (starts with a space or symbol, or is special): bool [vocab_size]."""
        return np.array([surface is None or not _is_letter(surface[:1]) for surface in self._surfaces()], dtype=bool)

    def word_ends(self) -> np.ndarray:
        """Return whether each token ends a word (ends with a space or symbol, or is special): bool [vocab_size]. The
        token of a single space does not count, since it begins a word whose letters are separate tokens."""
        ends = (text is None or (text != b" " and not _is_letter(text[-1:])) for text in self._surfaces())
        return np.array(list(ends), dtype=bool)


def _is_letter(byte: bytes) -> bool:
    """Return whether a byte can be inside a word: a letter, a digit, `_`, or a byte of a non-ASCII character."""
    return bool(byte) and (byte[0] >= 0x80 or byte.isalnum() or byte == b"_")
