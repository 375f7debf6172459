"""The sources that `data.corpus` names: files, folders, the standard library, token files, and blends."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from data.corpus import file_kinds
from data.indexed import IndexedTokens
from data.read_errors import unreadable

# Left out of the standard library: packages of others, files that are unreadable on purpose, and generated files.
STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encoded_modules", "lib-dynload"}
STDLIB_SKIPPED_FILES = re.compile(r"bad_coding|badsyntax|bad_source|bad_test|_sysconfigdata")
GENERATED_CODEC = b"generated from"


@dataclass(frozen=True)
class File:
    """A file of a corpus, with its size in bytes and its modification time when the corpus was listed."""

    path: str
    name: str  # relative to the source and without the suffix of a compression, so that it is stable
    format: str  # text | jsonl | json | parquet | file | stdlib | topics
    size: int
    mtime_ns: int

    @property
    def compression(self) -> str | None:
        return next((suffix for suffix in file_kinds.COMPRESSED if self.path.lower().endswith(suffix)), None)


@dataclass(frozen=True)
class Source:
    """A source of a blend: files that are concatenated, or the path prefix `megatron` of existing token files."""

    name: str
    weight: float | None  # None: proportional to size
    given: str  # as in data.corpus
    files: tuple[File, ...] = ()
    megatron: str | None = None
    notes: tuple[str, ...] = ()  # for the user

    @property
    def has_text_files(self) -> bool:
        """True if the source has text files, which data.documents_in_text divides into documents."""
        return any(file.format == file_kinds.TEXT for file in self.files)

    @property
    def is_stdlib(self) -> bool:
        """True if the source is Python's standard library."""
        return bool(self.files) and all(file.format in ("stdlib", "topics") for file in self.files)

    def identity(self) -> list[Any]:
        """Return path, size and modification time of each file of the source, which identify its content."""
        return [self.megatron, [[file.path, file.name, file.format, file.size, file.mtime_ns] for file in self.files]]


def parse_corpus(corpus: Any) -> list[Source]:
    """Return the sources of a `data.corpus`: "stdlib", a path, a list of these, or a list of {path, weight}.

    A list without weights is one source, in which each item has a share according to its size. Raises ConfigError.
    """
    items = list(corpus) if isinstance(corpus, Sequence) and not isinstance(corpus, str) else [corpus]
    if not items:
        raise ConfigError("data.corpus=[] must name at least one source, for example data.corpus=stdlib")
    entries = [_parse_item(item) for item in items]
    with_weight = [weight is not None for _, weight in entries]
    if any(with_weight) and not all(with_weight):
        raise ConfigError(
            f"data.corpus={corpus} gives a weight to some sources only. Give a weight to every source, or to none (the "
            "weights are then the sizes)"
        )
    sources = [source for path, weight in entries for source in _open_source(path, weight)]
    if any(with_weight):
        return sources
    texts = [source for source in sources if source.files]
    files = tuple(file for source in texts for file in source.files)
    notes = tuple(note for source in texts for note in source.notes)
    given = " + ".join(source.given for source in texts)
    merged = [Source("+".join(s.name for s in texts)[:80], None, given, files, notes=notes)] if files else []
    return merged + [source for source in sources if source.megatron]


def parse_validation(corpora: dict[str, Any]) -> dict[str, list[Source]]:
    """Return the sources of each corpus in `data.validation_corpora`, by the corpus's name. Raises ConfigError."""
    found = {}
    for name, corpus in corpora.items():
        with naming_validation(name):
            found[name] = parse_corpus(corpus)
    return found


@contextlib.contextmanager
def naming_validation(name: str) -> Iterator[None]:
    """Within this context, replace `data.corpus` in a ConfigError by the key of the validation corpus `name`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"data\.corpus\b", f"data.validation_corpora.{name}", str(error))) from error


def _parse_item(item: Any) -> tuple[str, float | None]:
    if isinstance(item, (str, os.PathLike)):
        return str(item), None
    if hasattr(item, "keys") and "path" in item and set(item.keys()) <= {"path", "weight"}:
        weight = item["weight"] if "weight" in item else None
        if weight is not None and not (isinstance(weight, (int, float)) and 0 < weight < float("inf")):
            raise ConfigError(
                f"data.corpus: the weight of {item['path']} ({weight!r}) must be a number above 0, for example 0.5"
            )
        return str(item["path"]), weight
    raise ConfigError(f"data.corpus: {item!r} is not a source. Give stdlib, a path, or {{path: PATH, weight: 0.5}}")


def _open_source(path: str, weight: float | None) -> list[Source]:
    if path == "stdlib":
        return [Source("stdlib", weight, path, tuple(_stdlib_files()))]
    full = Path(path).expanduser().absolute()
    prefix = str(full.with_suffix("")) if full.suffix in (".bin", ".idx") else str(full)
    if not full.is_dir() and os.path.isfile(f"{prefix}.bin") and os.path.isfile(f"{prefix}.idx"):
        return [Source(Path(prefix).name, weight, path, megatron=prefix)]
    if not full.exists():
        raise ConfigError(
            f"data.corpus={path}: {full} does not exist. Give an existing file or folder, or data.corpus=stdlib"
        )
    if full.is_dir():
        # The text of a folder is one source. Each pair of token files in a folder is a source, whose share of the
        # folder's weight is proportional to its size.
        found = file_kinds.scan_folder(full)
        note = found.describe()
        notes = (f"data.corpus={path}: {note}",) if note else ()
        if found.files:
            files = tuple(_file(file, file.relative_to(full).as_posix()) for file in found.files)
            return [Source(full.name, weight, path, files, notes=notes)]
        if not found.pairs:
            holds = f"; it contains {found.missing()}" if found.left_out else ""
            command = file_kinds.dataset_command((name for names in found.left_out.values() for name in names), path)
            advice = "" if command is None else f". Convert the dataset, for example with: {command}"
            raise ConfigError(
                f"data.corpus={path}: the folder contains no file that can be read{holds}. Give a folder with "
                f"{file_kinds.KNOWN}{advice}"
            )
        sizes = [1] * len(found.pairs) if weight is None else [len(IndexedTokens(pair).tokens) for pair in found.pairs]
        if not sum(sizes):
            raise ConfigError(
                f"data.corpus={path}: all token files in the folder are empty. Give token files with tokens"
            )
        return [
            Source(
                pair.relative_to(full).as_posix(),
                None if weight is None else weight * size / sum(sizes),
                f"{path}/{pair.relative_to(full).as_posix()}",
                megatron=str(pair),
                notes=notes if pair == found.pairs[0] else (),
            )
            for pair, size in zip(found.pairs, sizes, strict=True)
            if size
        ]
    if full.suffix in (".bin", ".idx"):
        raise ConfigError(
            f"data.corpus={path}: token files come in pairs, but {prefix}.bin or {prefix}.idx is missing. Restore "
            "the missing file"
        )
    if not file_kinds.format_of(full.name):
        module = file_kinds.ARCHIVES.get(file_kinds.suffix_of(path))
        advice = "" if module is None else f". Unpack it, for example with: python -m {module} -e {path} FOLDER"
        raise ConfigError(
            f"data.corpus={path}: files of this kind cannot be read. Give one of {file_kinds.KNOWN}{advice}"
        )
    return [Source(full.name, weight, path, (_file(full, full.name),))]


def _file(path: Path, name: str, kind: str | None = None) -> File:
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    kind = kind or str(file_kinds.format_of(path.name))
    return File(str(path), file_kinds.uncompressed(name), kind, stat.st_size, stat.st_mtime_ns)


def _stdlib_files() -> Iterator[File]:
    """Yield the source files of Python's standard library in a fixed order: 30 MB, half of them tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED_FOLDERS]
        names = [name for name in names if name.endswith(".py") and not STDLIB_SKIPPED_FILES.search(name)]
        found += [Path(folder, name) for name in names]
    if not found:
        raise ConfigError(f"data.corpus=stdlib: {root} contains no Python source files. Give a text: data.corpus=PATH")
    for path in sorted(found):
        name = path.relative_to(root).as_posix()
        if name.startswith("encodings/") and GENERATED_CODEC in path.open("rb").read(300):
            continue
        yield _file(path, f"stdlib/{name}", "topics" if name == "pydoc_data/topics.py" else "stdlib")
