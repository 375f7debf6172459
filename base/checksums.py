"""Checksums that reveal damaged or edited files: inside a JSON file, in a file next to it, or in one file per
folder."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from base.errors import reason_of
from base.files import write_text

SUM = "xxh3"  # the key under which an object holds its own checksum
FOLDER_SUMS = "checksums.json"  # checksums of the other files in the same folder
CHUNK_BYTES = 8 * 1024**2
MAX_THREADS = 8


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and XXH3 checksum of a file, as recorded when the file was written."""

    size: int
    xxh3: str  # of its bytes, 32 hexadecimal digits


def new_buffer() -> memoryview:
    """Return a memory-mapped buffer of CHUNK_BYTES for reading files. The system gets its memory back when the buffer
    is freed; memory that threads allocate from the heap would stay with the process."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def sum_of(path: Path, buffer: memoryview | None = None) -> FileSum:
    """Return the size and the checksum of a file's current content. `buffer`: memory for reading the file; None
    allocates a new buffer. Raises OSError."""
    digest, size, view = xxhash.xxh3_128(), 0, new_buffer() if buffer is None else buffer
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(view):
            digest.update(view[:count])
            size += count
    return FileSum(size, digest.hexdigest())


def size_problem(path: Path, entry: FileSum) -> str | None:
    """Return an error text if a file is missing or its size differs from the recorded size, else None."""
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        return f"its file {path.name} cannot be read ({error.strerror})"
    if size is None:
        return f"its file {path.name} is missing"
    return None if size == entry.size else f"its file {path.name} has {size} bytes, not {entry.size}"


def wrong_files(folder: Path, files: Mapping[str, FileSum], names: Iterable[str]) -> list[str]:
    """Return an error text for each of the named files whose checksum differs from the recorded checksum."""

    def check(name: str) -> str | None:
        try:
            is_right = sum_of(folder / name) == files[name]
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"
        return None if is_right else f"its file {name} was changed: its checksum is not the recorded one"

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return [problem for problem in pool.map(check, names) if problem]


def write_folder_sums(folder: Path) -> None:
    """Write the checksums of all files in a finished folder to its checksums.json. Raises WriteError, OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    write_summed(folder / FOLDER_SUMS, {"files": {str(path.relative_to(folder)): vars(sum_of(path)) for path in paths}})


def read_folder_sums(folder: Path) -> dict[str, FileSum]:
    """Return the recorded size and checksum of each file of a folder; {} if the folder has no checksums.json. Raises
    OSError, and ValueError if checksums.json is damaged."""
    if not (folder / FOLDER_SUMS).exists():
        return {}
    try:
        return {name: FileSum(**entry) for name, entry in read_summed(folder / FOLDER_SUMS)["files"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it must list the size and checksum of each file ({reason_of(error)})") from None


def write_summed(path: Path, content: dict[str, Any], *, in_place: bool = False) -> None:
    """Write a dict atomically as a JSON file that contains its own checksum. `in_place`: on a full disk, overwrite the
    existing file. Raises WriteError."""
    write_text(path, json.dumps({**content, SUM: own_sum(content)}, indent=1) + "\n", in_place=in_place)


def read_summed(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains its own checksum, and return its dict without the checksum. Raises OSError, and
    ValueError if the file is damaged or was edited."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("it does not contain a JSON object")
    if SUM not in content:
        raise ValueError("it contains no checksum")
    if content.pop(SUM) != own_sum(content):
        raise ValueError("it was changed: its checksum is not the recorded one")
    return content


def write_with_sum(path: Path, text: str) -> None:
    """Write a small text file atomically, with its checksum in a second file next to it. Raises WriteError.

    The checksum file is written first and also lists the checksum of the previous content, so that both files still
    match after a kill between the two writes.
    """
    sums = [xxhash.xxh3_128_hexdigest(text.encode())]
    with contextlib.suppress(OSError):
        sums.append(xxhash.xxh3_128_hexdigest(path.read_bytes()))
    write_text(_sum_path(path), "".join(f"{each}\n" for each in sums))
    write_text(path, text)


def read_with_sum(path: Path) -> str:
    """Read a text file whose checksum is in a second file next to it; without that file, the text is not checked.
    Raises OSError, and ValueError if the text is damaged or was edited."""
    content = path.read_bytes()
    try:
        sums = _sum_path(path).read_text(errors="replace").split()
    except FileNotFoundError:
        return content.decode()
    if xxhash.xxh3_128_hexdigest(content) not in sums:
        raise ValueError(f"it was changed: its checksum must be one of those in {_sum_path(path).name}")
    return content.decode()


def _sum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.{SUM}")


def own_sum(content: dict[str, Any]) -> str:
    """Return the XXH3 checksum (128 bits) of a JSON-compatible dict, independent of the order of its keys."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
