"""A span of a file, and the results of reading it: documents, and lines that cannot be used."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A span of the corpus file `path`: bytes [start, end), or row groups [start, end) of a Parquet file."""

    path: str
    shown: str  # the file's name in messages
    name: str
    format: str
    start: int
    end: int
    size: int  # bytes, for the progress bar
    rule: str = ""  # data.documents_in_text, for text files (data/corpus/text.py)
    by_line: bool = False  # whether each line is a sentence


@dataclass(frozen=True)
class Document:
    """A document, or a segment of a large document."""

    name: str
    text: str
    begins: bool = True  # whether it is the first segment
    ends: bool = True  # whether it is the last segment


@dataclass(frozen=True)
class BadLine:
    """A line of a file that contains no usable text, and the reason."""

    file: str
    line: int  # counted from 1; the row in a Parquet file
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def document_hash(name: str) -> int:
    """Return a stable 64-bit hash of a document's name, which decides whether the document is for validation."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
