"""Prepared data as training gets it, and the key by which finished work is found."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from typing import Any

from data.corpus import Source
from data.identity import Identity
from data.overlap import Texts

FORMAT_VERSION = 2  # in every key: raise it when the same inputs give other files


@dataclass
class TokenFile:
    """One term of a split's blend: the documents of `<prefix>.bin` in `split` (all, train or validation)."""

    prefix: str
    weight: float
    num_tokens: int
    split: str = "all"
    validation_fraction: float = 0.0
    # fingerprints of the files when samples were first made of them
    opened: Any = field(default=None, compare=False, repr=False)


@dataclass
class PreparedData:
    """The data of a run: its token files, and what training and the user need to know of them.

    train, valid: the blends, with weights that sum to 1. validation: the token files of each validation corpus, with
    all of their documents.
    """

    tokenizer_path: str
    vocab_size: int
    family: str
    train: list[TokenFile] = field(default_factory=list)
    valid: list[TokenFile] = field(default_factory=list)
    validation: dict[str, list[TokenFile]] = field(default_factory=dict)
    num_documents: int = 0
    num_bytes: int = 0  # of text
    num_bad_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)  # the first few, as file:line: reason
    bad_lines_files: list[str] = field(default_factory=list)  # the files that list all of them
    notes: list[str] = field(default_factory=list)  # for the user, a sentence each
    texts: list[Texts] = field(default_factory=list)  # of the terms of text
    identity: Identity = field(default_factory=dict)  # of the content (data/identity.py)

    def add_validation(self, name: str, corpus: PreparedData) -> None:
        """Add a validation corpus, whose documents are all in its `train`."""
        self.validation[name] = corpus.train
        self.identity.setdefault("validation", {})[name] = corpus.identity["sources"]
        self.num_bad_lines += corpus.num_bad_lines
        self.bad_lines += corpus.bad_lines
        self.bad_lines_files += corpus.bad_lines_files
        self.notes += [f"data.validation_corpora.{name}: {note}" for note in corpus.notes]


def source_identity(
    source: Source,
    num_documents: int,
    train: Any,
    valid: Any,
    files: dict[str, str] | None,
    text: str | None = None,
    rule: str | None = None,
) -> dict[str, Any]:
    """Return a source's entry in a run's identity (data/identity.py)."""
    python = platform.python_version() if any(file.format == "stdlib" for file in source.files) else None
    names = {"name": source.given, "weight": source.weight, "documents": num_documents}
    found = {**names, "train": train, "valid": valid, "files": files, "python": python, "text": text}
    return {**found, "documents_in_text": rule}


def cache_key(*items: Any) -> str:
    """Return the key of finished work for these inputs: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *items]).encode()).hexdigest()[:16]
