"""What training needs to know of prepared data, and the key by which finished work is found."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from typing import Any

from data.corpus import Source
from data.identity import Identity
from data.shared_documents import Texts

FORMAT_VERSION = 2  # part of every key: raise it when the same inputs give other files


@dataclass
class TokenFile:
    """One term of a split's blend: the documents of `<prefix>.bin` that belong to `split` (all, train or
    validation)."""

    prefix: str
    weight: float
    num_tokens: int
    split: str = "all"
    validation_fraction: float = 0.0
    # what the files were when samples were first made of them
    opened: Any = field(default=None, compare=False, repr=False)


@dataclass
class PreparedData:
    """What training needs to know of the data. `train` and `valid`: the blends, with weights that sum to 1.

    validation: the token files of each validation corpus, all of whose documents count.
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
    bad_lines_files: list[str] = field(default_factory=list)  # where all of them are listed
    notes: list[str] = field(default_factory=list)  # what else the user should know of the corpus, a sentence each
    texts: list[Texts] = field(default_factory=list)  # of the terms that are no token files
    identity: Identity = field(default_factory=dict)  # what the data are, by content (data/identity.py)

    def add_validation(self, name: str, part: PreparedData) -> None:
        """Take what was prepared of a validation corpus, all of it in its `train`."""
        self.validation[name] = part.train
        self.identity.setdefault("validation", {})[name] = part.identity["sources"]
        self.num_bad_lines += part.num_bad_lines
        self.bad_lines += part.bad_lines
        self.bad_lines_files += part.bad_lines_files
        self.notes += [f"data.validation_corpora.{name}: {note}" for note in part.notes]


def source_identity(
    source: Source,
    num_documents: int,
    train: Any,
    valid: Any,
    files: dict[str, str] | None,
    text: str | None = None,
    rule: str | None = None,
) -> dict[str, Any]:
    """What data/identity.py says of a source."""
    python = platform.python_version() if any(file.format == "stdlib" for file in source.files) else None
    names = {"name": source.given, "weight": source.weight, "documents": num_documents}
    found = {**names, "train": train, "valid": valid, "files": files, "python": python, "text": text}
    return {**found, "documents_in_text": rule}


def cache_key(*items: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *items]).encode()).hexdigest()[:16]
