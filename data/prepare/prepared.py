"""Prepared data as training receives it, and the key by which finished work is found."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import DataConfig
from data.corpus import Source
from data.identity import Identity
from data.overlap import Texts
from data.tokenizer import Tokenizer

FORMAT_VERSION = 2  # part of every key: raise it if the same inputs give different files


@dataclass
class TokenFile:
    """The documents of `<prefix>.bin` in a split (all, train or validation), with their weight in the blend."""

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

    train, valid: token files of the two blends, whose weights sum to 1. validation: token files with all documents of
    each validation corpus.
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
        """Add a validation corpus, all of whose documents were prepared as training documents."""
        self.validation[name] = corpus.train
        self.identity.setdefault("validation", {})[name] = corpus.identity["sources"]
        self.num_bad_lines += corpus.num_bad_lines
        self.bad_lines += corpus.bad_lines
        self.bad_lines_files += corpus.bad_lines_files
        self.notes += [f"data.validation_corpora.{name}: {note}" for note in corpus.notes]

    def add_identity(self, source: Source, documents: int, splits: dict[str, Any], **facts: Any) -> None:
        """Add the description of a source to `identity`. splits: entries `train` and `valid`. facts: other entries."""
        python = platform.python_version() if any(file.format == "stdlib" for file in source.files) else None
        names = {"name": source.given, "weight": source.weight, "documents": documents}
        others = {"files": None, "python": python, "text": None, "documents_in_text": None, **facts}
        self.identity["sources"].append({**names, **splits, **others})


@dataclass(frozen=True)
class Preparation:
    """The settings for preparing sources. rebuild_damaged: create damaged token files again."""

    config: DataConfig
    family: str
    tokenizer: Tokenizer
    cache: Path
    documents_in_text: str
    show_progress: bool = False
    rebuild_damaged: bool = False


def cache_key(*items: Any) -> str:
    """Return the cache key (16 hexadecimal digits) of a result that is computed from these JSON-compatible inputs."""
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *items]).encode()).hexdigest()[:16]
