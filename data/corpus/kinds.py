"""Which files are read and as what, and what a folder holds."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
ARCHIVES = {".zip": "zipfile", **dict.fromkeys((".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz"), "tarfile")}
SHOWN_KINDS = 12
# Descriptions of a dataset next to its data: by their name alone, or next to files of these suffixes.
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
    return next((name[: -len(suffix)] for suffix in COMPRESSED if name.lower().endswith(suffix)), name)


def format_of(name: str) -> str | None:
    """The format that a file of this name is read as; None: it is not read."""
    base = uncompressed(name)
    kind = FORMATS.get(Path(base).suffix.lower())
    return None if kind == "parquet" and base != name else kind


def suffix_of(name: str) -> str:
    """What a message calls the kind of a file: its suffix, and that of its compression."""
    base = uncompressed(name)
    return (Path(base).suffix + name[len(base) :]).lower()


def archive_command(name: str) -> str | None:
    """The command that unpacks an archive to a folder; None for what is none."""
    module = ARCHIVES.get(suffix_of(name))
    return None if module is None else f"python -m {module} -e {name} FOLDER"


@dataclass
class Folder:
    """The files of a folder that are read, the prefixes of its token files, and what it holds besides."""

    files: list[Path] = field(default_factory=list)
    pairs: list[Path] = field(default_factory=list)
    empty: set[Path] = field(default_factory=set)  # of the files
    left_out: dict[str, list[str]] = field(default_factory=dict)  # kind -> names

    def leave_out(self, kind: str, name: str) -> None:
        self.left_out.setdefault(kind, []).append(name)

    def in_words(self) -> str:
        """What is read and what is left out, by kind; empty where one kind of files is all there is."""
        read: dict[str, list[str]] = {}
        for path in self.files:
            if path in self.empty:
                continue
            read.setdefault(suffix_of(path.name), []).append(path.name)
        if self.pairs:
            read[".bin/.idx pair" + "s" * (len(self.pairs) > 1)] = [path.name for path in self.pairs]
        if len(read) < 2 and not self.left_out:
            return ""
        taken = ", ".join(f"{len(names):,} {kind}" for kind, names in sorted(read.items())) or "nothing"
        return f"it reads {taken}" + (f"; left out: {self.missing()}" if self.left_out else "")

    def missing(self) -> str:
        """What is left out, by kind, each with a name: first what has a name to be read, then other names."""
        kinds = sorted(self.left_out.items(), key=lambda item: (item[0].startswith("."), -len(item[1]), item[0]))
        words = [f"{len(names):,} {kind} ({_first(names)})" for kind, names in kinds[:SHOWN_KINDS]]
        others = sum(len(names) for _, names in kinds[SHOWN_KINDS:])
        return ", ".join([*words, *([f"{others:,} of other kinds"] if others else [])])


def _first(names: list[str]) -> str:
    return min(names) + (", ..." if len(names) > 1 else "")


def look_into(place: Path) -> Folder:
    """What a folder and those in it hold, in a fixed order. Links to folders are not followed."""
    found = Folder()
    partners: dict[Path, set[str]] = {}
    for path in sorted(_paths(place, found)):
        name = path.relative_to(place).as_posix()
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
    for path in [path for path in found.files if _describes_a_dataset(path)]:
        found.files.remove(path)
        found.leave_out("description of a dataset", path.relative_to(place).as_posix())
    for prefix, suffixes in sorted(partners.items()):
        name = prefix.relative_to(place).as_posix()
        if len(suffixes) == 1:
            (own,) = suffixes
            found.leave_out(f"{own} without its {'.idx' if own == '.bin' else '.bin'}", f"{name}{own}")
        elif found.files:  # Megatron's tools write them beside their text: both would be the same text twice
            found.leave_out(".bin/.idx beside text, to be named by path", f"{name}.bin")
        else:
            found.pairs.append(prefix)
    return found


def _describes_a_dataset(path: Path) -> bool:
    if path.name in DESCRIPTIONS:
        return True
    suffix = DESCRIPTIONS_NEXT_TO.get(path.name)
    return suffix is not None and any(path.parent.glob(f"*{suffix}*"))


def dataset_command(names: Iterable[str], folder: str) -> str | None:
    """The command that writes a saved dataset as files that are read, by the names of the files in its folder: for
    `save_to_disk` of datasets, which writes Arrow's streams, and for MDS of mosaicml-streaming. None for others."""
    names = list(names)
    if any(name.endswith(".arrow") for name in names):
        return f"python -c {shlex.quote(ARROW_COMMAND)} {shlex.quote(folder)} NEW_FOLDER"
    if any(".mds" in Path(name).suffixes for name in names):
        return f"python -c {shlex.quote(MDS_COMMAND)} {shlex.quote(folder)} > NEW.jsonl"
    return None


def _paths(place: Path, found: Folder) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        found.leave_out("folder that cannot be read", Path(error.filename).relative_to(place).as_posix())

    for root, folders, names in os.walk(place, onerror=unreadable):
        folder = Path(root)
        for name in list(folders):
            shown = (folder / name).relative_to(place).as_posix()
            if (folder / name).is_symlink():
                found.leave_out("link to a folder", shown)
            elif name.startswith("."):
                found.leave_out("hidden folder", shown)
                folders.remove(name)
        yield from (folder / name for name in names)


def _unusable(path: Path) -> str | None:
    """Why a file cannot be read, whatever its name is."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "no regular file"
    except OSError:
        return "broken link" if path.is_symlink() else "unreadable"
    return None if os.access(path, os.R_OK) else "unreadable"
