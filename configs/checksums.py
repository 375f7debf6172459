"""Small files with a checksum of themselves, or one next to them: what is read back and obeyed is what was written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import xxhash

from configs.files import write_text

SUM = "xxh3"  # the key of an object's checksum of itself


def write_summed(path: Path, content: dict[str, Any], *, in_place: bool = False) -> None:
    """Write an object as JSON with a checksum of itself, as `write_text`. Raises WriteError."""
    write_text(path, json.dumps({**content, SUM: own_sum(content)}, indent=1) + "\n", in_place=in_place)


def read_summed(path: Path) -> dict[str, Any]:
    """Read an object that `write_summed` has written, without its checksum; one of an earlier version has none. Raises
    OSError, and ValueError for what is damaged or was changed by hand."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    found = content.pop(SUM, None)
    if found is not None and found != own_sum(content):
        raise ValueError("it was changed: its checksum is another one")
    return content


def write_with_sum(path: Path, text: str) -> None:
    """Write a small file, and its checksum next to it, as `write_text`. Raises WriteError.

    The checksum is written first and leaves that of the file before in place: a kill between the two changes nothing.
    """
    sums = [xxhash.xxh3_128_hexdigest(text.encode())]
    with contextlib.suppress(OSError):
        sums.append(xxhash.xxh3_128_hexdigest(path.read_bytes()))
    write_text(_sum_path(path), "".join(f"{each}\n" for each in sums))
    write_text(path, text)


def read_with_sum(path: Path) -> str:
    """Read what `write_with_sum` has written; a file without a checksum next to it is taken as it is. Raises OSError,
    and ValueError for what is damaged or was changed by hand."""
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
    """The XXH3 checksum (128 bits) of an object, whatever the order of its keys."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
