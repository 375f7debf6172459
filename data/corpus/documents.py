"""A piece of a file, and what reading it gives: documents, and lines that could not be used."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A piece of a file: bytes [start, end) of `path`, or row groups of a Parquet file; `shown` is what messages call
    it."""

    path: str
    shown: str
    name: str
    format: str
    start: int
    end: int
    size: int  # bytes, for the progress bar
    rule: str = ""  # of a text file: where its documents end (data/corpus/text.py)
    by_line: bool = False  # whether each of its lines is a sentence


@dataclass(frozen=True)
class Document:
    """A document, or a piece of a large one: `begins` and `ends` say whether it is the first and the last."""

    name: str
    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class BadLine:
    file: str
    line: int  # from 1; a row of a Parquet file
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def document_hash(name: str) -> int:
    """A stable 64-bit hash of a document's name; it decides the validation split."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
