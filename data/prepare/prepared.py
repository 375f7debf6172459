"""Prepared data in the form that training gets, and the key by which finished work is found."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from typing import Any

from data.corpus import Source
from data.identity import Identity
from data.overlap import Texts

FORMAT_VERSION = 2  # part of every key: raise it if the same inputs give different files


@dataclass
class TokenFile:
    """One term of a blend: the documents of `<prefix>.bin` that are in `split` (all, train or validation)."""

    prefix: str
    weight: float
    num_tokens: int
    split: str = "all"
    validation_fraction: float = 0.0
    # fingerprints of the files when this run opened them first
    opened: Any = field(default=None, compare=False, repr=False)


@dataclass
class PreparedData:
    """The data of a run: its token files, and the facts about them that training and the user need.

    train, valid: the terms of the blends, whose weights sum to 1. validation: the token files of each validation
    corpus, which contain all of its documents.
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
    texts: list[Texts] = field(default_factory=list)  # one for each term that is made from text
    identity: Identity = field(default_factory=dict)  # of the content (data/identity.py)

    def add_validation(self, name: str, corpus: PreparedData) -> None:
        """Add a validation corpus, which was prepared as if all of its documents were for training."""
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
    """Return the entry of a source in a run's identity (data/identity.py)."""
    python = platform.python_version() if any(file.format == "stdlib" for file in source.files) else None
    names = {"name": source.given, "weight": source.weight, "documents": num_documents}
    found = {**names, "train": train, "valid": valid, "files": files, "python": python, "text": text}
    return {**found, "documents_in_text": rule}


def cache_key(*items: Any) -> str:
    """Return the key under which finished work for these inputs is stored: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *items]).encode()).hexdigest()[:16]
