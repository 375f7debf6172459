"""The interface of all tokenizers, and the names that common ones give to the roles of special tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import ConfigError
from configs.tokenizer_files import JSON, core_file

REPLACEMENT = "\ufffd"  # stands for bytes that are no text
SPACE = "\u2581"  # sentencepiece writes spaces as this character (and reads it back as a space)
PAD, EOD, CLS, SEP, MASK = "<pad>", "</s>", "[CLS]", "[SEP]", "[MASK]"
# Names that common tokenizers give to the same role, most usual first.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "<eod>", "[EOS]", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>")
MASK_NAMES = {"cls": ("[CLS]", "<cls>", "<s>"), "sep": ("[SEP]", "<sep>", "</s>"), "mask": ("[MASK]", "<mask>")}


class Tokenizer(ABC):
    """Text to token ids and back.

    `pad`, `eod` and, for BERT, `cls`, `sep`, `mask` are ids; the latter three raise ConfigError when the tokenizer has
    none. `bos` is the id that the tokenizer itself begins texts with, if it names one: training does not use it, its
    documents follow `eod`. `before_text` is the id that a text is predicted from where none stands before it.
    """

    path: str
    vocab_size: int
    eod: int
    pad: int
    bos: int | None
    named_eod: int | None = None  # eod, where a file beside the tokenizer's names another than the usual one
    said: Sequence[str] = ()  # what a user should know of how its files are read
    end_file: Path  # in which an eos_token counts: it, or another file, need not be there
    # What the files beside the tokenizer's own change about ids; part of the digest.
    rules: dict[str, Any]
    named_roles: dict[str, int]  # cls, sep and mask, where a file beside the tokenizer's names them

    def __init__(self) -> None:
        self.rules, self.named_roles = {}, {}

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 [n]: those of training, prompts and scores. No special token is put around it;
        one that is written out in it is a token only where the tokenizer's files want that, as in transformers."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens are left out."""

    @abstractmethod
    def piece(self, token: int) -> str:
        """The name of a token."""

    @abstractmethod
    def _find(self, names: Iterable[str]) -> int | None:
        """The id of the first of these pieces that exists."""

    @abstractmethod
    def _surfaces(self) -> list[bytes | None]:
        """The bytes that each piece stands for, with its leading space; None for special tokens."""

    @abstractmethod
    def _content(self) -> bytes:
        """What decides the ids of a text, apart from the roles."""

    def rule_texts(self) -> list[str]:
        """Texts that its rules look for: patterns, and what is replaced."""
        return []

    def notes(self) -> list[str]:
        """What a user should know of how it is read."""
        return list(self.said)

    def kept_files(self) -> dict[str, str] | None:
        """The texts that a run keeps of it, by name; None: its files as they are."""
        return None

    def core_bytes(self) -> bytes:
        """The file that decides what this tokenizer does, as a run keeps it."""
        kept = self.kept_files()
        return kept[JSON].encode() if kept is not None else (core_file(Path(self.path)) or Path(self.path)).read_bytes()

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that are the same for tokenizers that do the same, wherever they lie and whatever they
        are called."""
        rules = json.dumps(self.rules, sort_keys=True).encode() if self.rules else b""
        roles = json.dumps([self.eod, self.pad]).encode()
        return hashlib.sha256(roles + self._content() + rules).hexdigest()[:32]

    @property
    def before_text(self) -> int:
        """`bos`, or `eod` of a tokenizer that names none, as in lm-eval."""
        return self.eod if self.bos is None else self.bos

    def encode(self, text: str) -> list[int]:
        """`encode_array` as a list."""
        return self.encode_array(text).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue, with the special tokens that transformers puts around it."""
        return self.encode(text)

    def encode_masked(self, text: str) -> list[int]:
        """`encode` of a text with the mask token in the places of [MASK]. That is asked for: no other text makes a
        special token that `encode` would not make."""
        first, *rest = [self.encode(part) for part in text.split(MASK)]
        return first + [token for part in rest for token in (self.mask, *part)]

    def control_tokens(self) -> dict[int, str]:
        """The special tokens that a text can make by holding their names, but for the one for unknown text: the name
        of each, by id."""
        return {}

    def for_transformers(self, family: str) -> dict[str, str]:
        """Files, by name, without which transformers would not make the same tokens for a model of this family. Raises
        NotConvertible if there can be none."""
        return {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each text; faster than one by one where the texts are short."""
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
        """Ids that stand for no text, ascending."""
        return np.flatnonzero([surface is None for surface in self._surfaces()])

    def line_ends(self) -> np.ndarray:
        """bool [vocab_size]: a line ends with this piece, apart from spaces."""
        return np.array(
            [surface is not None and surface.rstrip(b" \t").endswith(b"\n") for surface in self._surfaces()], dtype=bool
        )

    def word_starts(self) -> np.ndarray:
        """bool [vocab_size]: this piece always begins a word (it starts with a space or a symbol, or is special)."""
        return np.array([surface is None or not _is_letter(surface[:1]) for surface in self._surfaces()], dtype=bool)

    def word_ends(self) -> np.ndarray:
        """bool [vocab_size]: whatever follows this piece begins a word (it ends with a space or a symbol, or is
        special).

        A piece that is one space does not: it is the beginning of a word whose letters got pieces of their own.
        """
        surfaces = self._surfaces()
        return np.array(
            [surface is None or (surface != b" " and not _is_letter(surface[-1:])) for surface in surfaces], dtype=bool
        )


def _is_letter(byte: bytes) -> bool:
    """Whether a byte belongs to the inside of a word: letters, digits, `_`, and every byte of a non-ASCII character."""
    return bool(byte) and (byte[0] >= 0x80 or byte.isalnum() or byte == b"_")
