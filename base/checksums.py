"""Checksums of files, stored inside them, next to them or for a whole folder, so that damage and edits are noticed."""

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

from base.files import write_text

SUM = "xxh3"  # the key under which an object holds its own checksum
FOLDER_SUMS = "checksums.json"  # checksums of the other files of its folder
CHUNK_BYTES = 8 * 1024**2
MAX_THREADS = 8


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a file."""

    size: int
    xxh3: str  # of its bytes, 32 hexadecimal digits


def new_buffer() -> memoryview:
    """Return a buffer of CHUNK_BYTES to read files into, mapped by itself: memory that threads allocate from the heap
    would stay with the process, once per arena of the allocator."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def sum_of(path: Path, buffer: memoryview | None = None) -> FileSum:
    """Return size and checksum of a file as it is on disk now, read into `buffer` or a new one. Raises OSError."""
    digest, size, view = xxhash.xxh3_128(), 0, new_buffer() if buffer is None else buffer
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(view):
            digest.update(view[:count])
            size += count
    return FileSum(size, digest.hexdigest())


def size_problem(path: Path, entry: FileSum) -> str | None:
    """Return one line about a file that is missing or whose size differs from its entry, else None; nothing is read."""
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        return f"its file {path.name} cannot be read ({error.strerror})"
    if size is None:
        return f"its file {path.name} is missing"
    return None if size == entry.size else f"its file {path.name} has {size} bytes, not {entry.size}"


def wrong_files(folder: Path, files: Mapping[str, FileSum], names: Iterable[str]) -> list[str]:
    """Return one line for each of the named files whose checksum differs from its entry. Reads several at a time."""

    def check(name: str) -> str | None:
        try:
            return (
                None
                if sum_of(folder / name) == files[name]
                else f"its file {name} was changed: its checksum is another one"
            )
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return [problem for problem in pool.map(check, names) if problem]


def write_folder_sums(folder: Path) -> None:
    """Write the checksums of every file of a finished folder to FOLDER_SUMS. Raises WriteError, and OSError if a file
    cannot be read back."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    write_summed(folder / FOLDER_SUMS, {"files": {str(path.relative_to(folder)): vars(sum_of(path)) for path in paths}})


def read_folder_sums(folder: Path) -> dict[str, FileSum]:
    """The files that a folder was written with; of one that was written without FOLDER_SUMS nothing is known. Raises
    OSError, and ValueError for sums that are damaged."""
    if not (folder / FOLDER_SUMS).exists():
        return {}
    try:
        return {name: FileSum(**entry) for name, entry in read_summed(folder / FOLDER_SUMS)["files"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it contains no valid checksums: {error}") from None


def write_summed(path: Path, content: dict[str, Any], *, in_place: bool = False) -> None:
    """Write an object as JSON with a checksum of itself, as `write_text`. Raises WriteError."""
    write_text(path, json.dumps({**content, SUM: own_sum(content)}, indent=1) + "\n", in_place=in_place)


def read_summed(path: Path) -> dict[str, Any]:
    """Read an object written by `write_summed`, without its checksum. Raises OSError, and ValueError if the file is
    damaged or was edited."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    if SUM not in content:
        raise ValueError("it holds no checksum")
    if content.pop(SUM) != own_sum(content):
        raise ValueError("it was changed: its checksum is another one")
    return content


def write_with_sum(path: Path, text: str) -> None:
    """Write a small file, and its checksum next to it, as `write_text`. Raises WriteError.

    The checksum is written first, next to that of the previous content: a kill between the two writes does no harm.
    """
    sums = [xxhash.xxh3_128_hexdigest(text.encode())]
    with contextlib.suppress(OSError):
        sums.append(xxhash.xxh3_128_hexdigest(path.read_bytes()))
    write_text(_sum_path(path), "".join(f"{each}\n" for each in sums))
    write_text(path, text)


def read_with_sum(path: Path) -> str:
    """Read a text written by `write_with_sum`; a file without a checksum next to it is accepted unchecked. Raises
    OSError, and ValueError if the file is damaged or was edited."""
    content = path.read_bytes()
    try:
        sums = _sum_path(path).read_text(errors="replace").split()
    except FileNotFoundError:
        return content.decode()
    if xxhash.xxh3_128_hexdigest(content) not in sums:
        raise ValueError(f"it was changed: its checksum is none of those in {_sum_path(path).name}")
    return content.decode()


def _sum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.{SUM}")


def own_sum(content: dict[str, Any]) -> str:
    """Return the XXH3 checksum (128 bits) of an object, independent of the order of its keys."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
