"""Kinds of files: the format that a name implies, the files of a folder, and content that contradicts a file's name: a
pointer to a file that was not fetched, a saved error page, or compressed data without the suffix."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from base.errors import ConfigError
from data.read_errors import unreadable

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
TEXT, LINES, WHOLE = "text", "jsonl", "file"
FORMATS = {
    **dict.fromkeys((".txt", ".raw", ".tokens"), TEXT),
    **dict.fromkeys((".jsonl", ".ndjson"), LINES),
    ".json": "json",
    ".parquet": "parquet",
    **dict.fromkeys((".py", ".md", ".rst"), WHOLE),
}
KNOWN = (
    ".txt, .raw, .tokens, .jsonl, .ndjson, .json, .md, .rst, .py (each also .gz, .zst, .xz or .bz2), .parquet, a "
    "folder of those, or Megatron .bin/.idx files"
)
# Modules of Python that unpack archives.
ARCHIVES = {".zip": "zipfile", **dict.fromkeys((".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz"), "tarfile")}
SHOWN_KINDS = 12
# Files that describe a dataset, recognized by their name, or by their name if files of this suffix are next to them.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
DESCRIPTIONS_NEXT_TO = {"state.json": ".arrow", "index.json": ".mds"}
ARROW_COMMAND = (
    "import pathlib, sys, pyarrow as pa, pyarrow.parquet as pq; old, new = map(pathlib.Path, sys.argv[1:]); "
    'new.mkdir(); [pq.write_table(pa.ipc.open_stream(str(file)).read_all(), new / f"{number:05}-{file.stem}.parquet") '
    'for number, file in enumerate(sorted(old.rglob("data-*.arrow")))]'
)
MDS_COMMAND = (
    'import json, sys, streaming; [print(json.dumps({"text": row["text"]})) '
    "for row in streaming.StreamingDataset(local=sys.argv[1], shuffle=False, batch_size=1)]"
)


def uncompressed(name: str) -> str:
    """Return a file's name without the suffix of a compression: `a.txt` for `a.txt.gz`."""
    return next((name[: -len(suffix)] for suffix in COMPRESSED if name.lower().endswith(suffix)), name)


def format_of(name: str) -> str | None:
    """Return the format in which a file of this name is read, or None if such files are not read."""
    base = uncompressed(name)
    kind = FORMATS.get(Path(base).suffix.lower())
    return None if kind == "parquet" and base != name else kind


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name, including that of its compression, such as .txt.gz."""
    base = uncompressed(name)
    return (Path(base).suffix + name[len(base) :]).lower()


@dataclass
class Folder:
    """The files in a folder, sorted into files to read, path prefixes of token files, and files that are left out."""

    files: list[Path] = field(default_factory=list)
    pairs: list[Path] = field(default_factory=list)
    empty: set[Path] = field(default_factory=set)  # those of `files` that are empty
    left_out: dict[str, list[str]] = field(default_factory=dict)  # kind -> names

    def leave_out(self, kind: str, name: str) -> None:
        self.left_out.setdefault(kind, []).append(name)

    def describe(self) -> str:
        """Describe how many files of each kind are read and left out; empty if all files are read and of one kind."""
        read = Counter(suffix_of(path.name) for path in self.files if path not in self.empty)
        if self.pairs:
            read[".bin/.idx pair" + "s" * (len(self.pairs) > 1)] = len(self.pairs)
        if len(read) < 2 and not self.left_out:
            return ""
        taken = ", ".join(f"{count:,} {kind}" for kind, count in sorted(read.items())) or "nothing"
        return f"it reads {taken}" + (f"; left out: {self.missing()}" if self.left_out else "")

    def missing(self) -> str:
        """Describe the files that are left out: their number by kind, with an example each."""
        kinds = sorted(self.left_out.items(), key=lambda item: (item[0].startswith("."), -len(item[1]), item[0]))
        words = [
            f"{len(names):,} {kind} ({min(names)}{', ...' if len(names) > 1 else ''})"
            for kind, names in kinds[:SHOWN_KINDS]
        ]
        others = sum(len(names) for _, names in kinds[SHOWN_KINDS:])
        return ", ".join([*words, *([f"{others:,} of other kinds"] if others else [])])


def scan_folder(root: Path) -> Folder:
    """Sort the files in a folder and its subfolders by kind, in a fixed order. Does not follow links to folders."""
    found = Folder()
    partners: dict[Path, set[str]] = {}
    for path in sorted(_paths(root, found)):
        name = path.relative_to(root).as_posix()
        kind, why = format_of(path.name), _unusable(path)
        if path.name.startswith("."):
            found.leave_out("hidden", name)
        elif why:
            found.leave_out(why, name)
        elif path.suffix in (".bin", ".idx"):
            partners.setdefault(path.with_suffix(""), set()).add(path.suffix)
        elif kind is None:
            found.leave_out(suffix_of(path.name) or "without a suffix", name)
        else:
            found.files.append(path)
            if not path.stat().st_size:
                found.empty.add(path)
                found.leave_out("empty", name)
    for path in list(found.files):
        suffix = DESCRIPTIONS_NEXT_TO.get(path.name)
        if path.name in DESCRIPTIONS or (suffix is not None and any(path.parent.glob(f"*{suffix}*"))):
            found.files.remove(path)
            found.leave_out("description of a dataset", path.relative_to(root).as_posix())
    for prefix, suffixes in sorted(partners.items()):
        name = prefix.relative_to(root).as_posix()
        if len(suffixes) == 1:
            (own,) = suffixes
            found.leave_out(f"{own} without its {'.idx' if own == '.bin' else '.bin'}", f"{name}{own}")
        elif found.files:  # Megatron's tools write them next to their text, which would be read twice
            found.leave_out(".bin/.idx next to text (name it by its path to use it)", f"{name}.bin")
        else:
            found.pairs.append(prefix)
    return found


def dataset_command(names: Iterable[str], folder: str) -> str | None:
    """Return a shell command that converts a saved dataset to a supported format. Recognizes, by the files' names, the
    Arrow streams of `datasets.save_to_disk` and the MDS files of mosaicml-streaming; else returns None."""
    names = list(names)
    if any(name.endswith(".arrow") for name in names):
        return f"python -c {shlex.quote(ARROW_COMMAND)} {shlex.quote(folder)} NEW_FOLDER"
    if any(".mds" in Path(name).suffixes for name in names):
        return f"python -c {shlex.quote(MDS_COMMAND)} {shlex.quote(folder)} > NEW.jsonl"
    return None


def _paths(root: Path, found: Folder) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        found.leave_out("folder that cannot be read", Path(error.filename).relative_to(root).as_posix())

    for path, folders, names in os.walk(root, onerror=unreadable):
        folder = Path(path)
        for name in list(folders):
            shown = (folder / name).relative_to(root).as_posix()
            if (folder / name).is_symlink():
                found.leave_out("link to a folder", shown)
            elif name.startswith("."):
                found.leave_out("hidden folder", shown)
                folders.remove(name)
        yield from (folder / name for name in names)


def _unusable(path: Path) -> str | None:
    """Return why a file cannot be read, such as `broken link`, whatever its name; None if it can be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "not a regular file"
    except OSError:
        return "broken link" if path.is_symlink() else "unreadable"
    return None if os.access(path, os.R_OK) else "unreadable"


HEAD_BYTES = 4096
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # git-lfs, docs/spec.md
ANNEX_POINTER = re.compile(rb"/annex/objects/\S+\s*\Z")  # git-annex, internals: pointer files
PACKED = (
    (b"\x1f\x8b\x08", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"\xfd7zXZ\0", "xz", ".xz"),
    (b"BZh", "bzip2", ".bz2"),
)
OTHER_KINDS = ((b"PAR1", "Parquet", ".parquet"), (b"PK\x03\x04", "a zip archive", ".zip"))
MARKUP = re.compile(rb"\s*<(?:!doctype html|html|\?xml|error)[\s>]", re.IGNORECASE)
TITLE = re.compile(rb"<(?:title|h1|code|message)>\s*([^<]{1,80})", re.IGNORECASE)
OF_AN_ERROR = re.compile(
    r"\b(?:[45]\d\d|not found|forbidden|access ?denied|denied|error|unauthorized|unavailable|too many requests|"
    r"no ?such ?(?:key|bucket)|sign in|log ?in|just a moment)\b",
    re.IGNORECASE,
)
# Answers of servers for a file that is missing or not public.
ERROR_TEXT = re.compile(
    rb"\s*(?:404: Not Found|Not Found|Entry not found|Repository not found|Invalid (?:username or password|credentials)"
    rb"[^\n]*|Access to [^\n]{1,200} is restricted[^\n]*|\{\"error\":\s*\"[^\"\n]{1,500}\"[^\n]*\})\s*\Z"
)


def refuse_pointer(path: str) -> None:
    """Raise ConfigError if a file is a pointer (git-lfs, git-annex) to the actual file, or a server's error page."""
    head, size = _head(path)
    if head.startswith(LFS_POINTER):
        raise ConfigError(
            f"data.corpus: {path} is a git-lfs pointer, not the file itself. Fetch the file in its folder: "
            f"git lfs pull --include={shlex.quote(os.path.basename(path))}"
        )
    if size <= HEAD_BYTES and ANNEX_POINTER.match(head):
        raise ConfigError(
            f"data.corpus: {path} is a git-annex pointer, not the file itself. Fetch the file: "
            f"git annex get {shlex.quote(path)}"
        )
    if size == len(head) and ERROR_TEXT.match(head):
        raise ConfigError(
            f"data.corpus: {path} contains a server's error ({_shown(head)}), not the file. Download the file again."
        )
    title = TITLE.search(head) if MARKUP.match(head) else None
    if title is not None and OF_AN_ERROR.search(_shown(title[1])):
        raise ConfigError(
            f"data.corpus: {path} is a saved error page ({_shown(title[1])}), not the file. Download the file again."
        )


def refuse_another_kind(path: str, shown: str) -> None:
    """Raise ConfigError if the file at `path`, which the user calls `shown`, is compressed or not text."""
    head, _ = _head(path)
    packed = [(mark, f"compressed with {kind}", shown + suffix) for mark, kind, suffix in PACKED]
    others = [(mark, f"{kind}, not text", os.path.splitext(shown)[0] + suffix) for mark, kind, suffix in OTHER_KINDS]
    for mark, kind, name in packed + others:
        if head.startswith(mark) and not _is_text(head):
            raise ConfigError(
                f"data.corpus: {shown} is {kind}. Rename it to have the right suffix: "
                f"mv {shlex.quote(shown)} {shlex.quote(name)}"
            )


def _head(path: str) -> tuple[bytes, int]:
    """Return the first bytes of a file and the file's size."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(path, error) from error


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters. The last character may be cut off."""
    try:
        text = head[:-3].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not re.search(r"[\0-\x08\x0e-\x1a\x1c-\x1f]", text)


def _shown(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split())[:80]
