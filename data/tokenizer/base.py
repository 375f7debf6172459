"""The interface of all tokenizers, and the names of special tokens in common ones."""

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

REPLACEMENT = "\ufffd"  # stands for bytes that are no text
SPACE = "\u2581"  # sentencepiece writes spaces as this character (and reads it back as a space)
PAD, EOD, CLS, SEP, MASK = "<pad>", "</s>", "[CLS]", "[SEP]", "[MASK]"
# Names that common tokenizers give to the same role, the most usual first.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "<eod>", "[EOS]", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>")
MASK_NAMES = {"cls": ("[CLS]", "<cls>", "<s>"), "sep": ("[SEP]", "<sep>", "</s>"), "mask": ("[MASK]", "<mask>")}


class Tokenizer(ABC):
    """Text to token ids and back.

    `pad`, `eod` and, for BERT, `cls`, `sep`, `mask` are ids; the latter three raise ConfigError if the tokenizer has
    none. `bos` is the id that the tokenizer itself begins texts with, if it names one; training does not use it, since
    each document follows `eod`. `before_text` is the id that the first token of a text is predicted from.
    """

    path: str
    vocab_size: int
    eod: int
    pad: int
    bos: int | None
    named_eod: int | None = None  # eod, if a settings file names another token than the usual one
    reading_notes: Sequence[str] = ()  # for the user, on how its files are read
    end_file: Path  # the settings file whose eos_token counts; it need not exist
    rules: dict[str, Any]  # what settings files change about ids; part of the digest
    named_roles: dict[str, int]  # cls, sep and mask, if a settings file names them

    def __init__(self) -> None:
        self.rules, self.named_roles = {}, {}

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, int32 [n], for training, prompts and scores.

        No special token is added. The name of a special token in the text becomes that token only if the tokenizer's
        files ask for it, as in transformers.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""

    @abstractmethod
    def token_piece(self, token: int) -> str:
        """Return the vocabulary's entry for a token."""

    @abstractmethod
    def _find(self, names: Iterable[str]) -> int | None:
        """Return the id of the first of these names that is in the vocabulary."""

    @abstractmethod
    def _surfaces(self) -> list[bytes | None]:
        """Return the bytes that each token stands for, with its leading space; None for special tokens."""

    @abstractmethod
    def _content(self) -> bytes:
        """Return the bytes that decide the ids of a text, except for the roles of special tokens."""

    def rule_texts(self) -> list[str]:
        """Return the texts that its rules look for: patterns, and replaced strings."""
        return []

    def notes(self) -> list[str]:
        """Return notes for the user on how its files are read."""
        return list(self.reading_notes)

    def kept_files(self) -> dict[str, str] | None:
        """Return the texts of the files that a run keeps of it, by name; None to keep its files as they are."""
        return None

    def core_bytes(self) -> bytes:
        """Return the content of the file that decides its tokens, as a run keeps it."""
        kept = self.kept_files()
        return kept[JSON].encode() if kept is not None else (core_file(Path(self.path)) or Path(self.path)).read_bytes()

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits, equal for tokenizers that give equal tokens, whatever their path and name."""
        rules = json.dumps(self.rules, sort_keys=True).encode() if self.rules else b""
        roles = json.dumps([self.eod, self.pad]).encode()
        return hashlib.sha256(roles + self._content() + rules).hexdigest()[:32]

    @property
    def before_text(self) -> int:
        """`bos`, or `eod` if the tokenizer names no `bos`, as in lm-eval."""
        return self.eod if self.bos is None else self.bos

    def encode(self, text: str) -> list[int]:
        """`encode_array` as a list."""
        return self.encode_array(text).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text to continue, with the special tokens that transformers adds."""
        return self.encode(text)

    def encode_masked(self, text: str) -> list[int]:
        """Encode like `encode`, with the mask token for each [MASK]; adds no other special token."""
        first, *rest = [self.encode(span) for span in text.split(MASK)]
        return first + [token for ids in rest for token in (self.mask, *ids)]

    def control_tokens(self) -> dict[int, str]:
        """Return, by id, the names that make special tokens in a text; not that of the token for unknown text."""
        return {}

    def for_transformers(self, family: str) -> dict[str, str]:
        """Return the files, by name, that transformers needs to give the same tokens for a model of this family.

        Raises NotConvertible if no files do.
        """
        return {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode several texts; faster than one by one if they are short."""
        return [self.encode(text) for text in texts]

    def _role(self, role: str) -> int:
        found = self.named_roles.get(role, self._find(MASK_NAMES[role]))
        if found is None:
            raise ConfigError(
                f"data.tokenizer={self.path}: it has no {role} token (one of {', '.join(MASK_NAMES[role])}), which "
                "BERT needs; data.tokenizer=sentencepiece trains one that has it"
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
        """Return the ids that stand for no text, ascending."""
        return np.flatnonzero([surface is None for surface in self._surfaces()])

    def line_ends(self) -> np.ndarray:
        """Return whether a line ends with each token, spaces aside: bool [vocab_size]."""
        return np.array(
            [surface is not None and surface.rstrip(b" \t").endswith(b"\n") for surface in self._surfaces()], dtype=bool
        )

    def word_starts(self) -> np.ndarray:
        """Return whether each token begins a word (starts with a space or symbol, or is special): bool [vocab_size]."""
        return np.array([surface is None or not _is_letter(surface[:1]) for surface in self._surfaces()], dtype=bool)

    def word_ends(self) -> np.ndarray:
        """Return whether any token after each one begins a word (it ends with a space or symbol, or is special): bool
        [vocab_size].

        A token of one space does not count: it begins a word whose letters have tokens of their own.
        """
        surfaces = self._surfaces()
        return np.array(
            [surface is None or (surface != b" " and not _is_letter(surface[-1:])) for surface in surfaces], dtype=bool
        )


def _is_letter(byte: bytes) -> bool:
    """Whether a byte is inside a word: letters, digits, `_`, and every byte of a non-ASCII character."""
    return bool(byte) and (byte[0] >= 0x80 or byte.isalnum() or byte == b"_")
