"""The header of a checkpoint's tensor files: for each stored tensor its box of a global tensor and its bytes. Without
torch.

The files are safetensors (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, a JSON header,
then the bytes of the tensors. The offset of each tensor in its global tensor, for which safetensors has no field, is
stored in the metadata under `boxes`. So every rank writes its tensors without asking the others, any safetensors reader
opens the files, and nothing in them can be code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import reason_of
from models.weight_files.header import SafetensorsHeader, TensorSpan, read_header

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Entry:
    """A stored tensor: the box of the global tensor `key` at `offset`. Leading dimensions that `shape` lacks have size
    1 in the box. The bytes of the tensor are [start, end), counted from the end of the header."""

    key: str
    dtype: str  # in safetensors' names
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    start: int
    end: int

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The shape of the stored box, with as many dimensions as the global tensor: leading dimensions that `shape`
        lacks are 1."""
        return (1,) * (len(self.global_shape) - len(self.shape)) + self.shape


def encode(entries: Iterable[Entry]) -> bytes:
    """Return the header of a tensor file, preceded by its length, and padded to a multiple of 8 bytes."""
    content: dict[str, Any] = {}
    boxes = {}
    for i, entry in enumerate(entries):
        name = f"{i:06d}.{entry.key}"
        content[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.end]}
        boxes[name] = [entry.key, entry.global_shape, entry.offset]
    text = json.dumps(
        {"__metadata__": {"format": "pt", "boxes": json.dumps(boxes)}, **content}, separators=(",", ":")
    ).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read(path: Path) -> dict[str, Entry]:
    """Return the entries of a checkpoint's tensor file, by name. Raises OSError, and ValueError for other files."""
    return read_all(path)[1]


def read_folder(folder: Path, names: Iterable[str]) -> list[Entry]:
    """Return the entries of all tensor files among the named files of a folder. Raises OSError and ValueError."""
    return [entry for name in names if name.endswith(SUFFIX) for entry in read(folder / name).values()]


def read_all(path: Path) -> tuple[SafetensorsHeader, dict[str, Entry]]:
    """Return the header of a checkpoint's tensor file, and its entries by name. Raises OSError, and ValueError for
    other files."""
    header = read_header(path)
    try:
        boxes = json.loads(header.metadata["boxes"])
        return header, {name: _entry(span, header.body, *boxes[name]) for name, span in header.tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is not that of a checkpoint file ({reason_of(error)})") from error


def _entry(span: TensorSpan, body: int, key: str, global_shape: list[int], offset: list[int]) -> Entry:
    start = span.start - body
    whole, first = tuple(map(int, global_shape)), tuple(map(int, offset))
    entry = Entry(key, span.dtype, span.shape, whole, first, start, start + span.num_bytes)
    inside = len(first) == len(entry.box_shape) == len(whole)
    if not inside or not all(0 <= o and 0 <= n and o + n <= g for o, n, g in zip(first, entry.box_shape, whole)):
        raise ValueError(f"{key}: the box {list(entry.box_shape)} at {list(first)} is outside its tensor {list(whole)}")
    return entry


def incomplete(entries: Iterable[Entry]) -> str | None:
    """Return a line about the first global tensor whose elements are not all stored exactly once in the files together;
    None if there is no such tensor."""
    held: dict[str, list[Entry]] = {}
    for entry in entries:
        of_key = held.setdefault(entry.key, [])
        if of_key and of_key[0].global_shape != entry.global_shape:
            shapes = f"{list(of_key[0].global_shape)} and {list(entry.global_shape)}"
            return f"its files give {entry.key} different shapes, {shapes}"
        of_key.append(entry)
    for key, found in held.items():
        count, whole = sum(math.prod(entry.shape) for entry in found), math.prod(found[0].global_shape)
        if count != whole:
            return f"its files hold {count} of the {whole} elements of {key}"
        if _overlap(found):
            return f"its files hold some elements of {key} twice, and lack others"
    return None


def _overlap(entries: list[Entry]) -> bool:
    """Return whether two boxes of a global tensor share an element."""
    if len(entries) < 2:
        return False
    boxes = []
    for entry in entries:
        if all(entry.shape):
            boxes.append([(first, first + count) for first, count in zip(entry.offset, entry.box_shape)])
    active: list[list[tuple[int, int]]] = []
    for box in sorted(boxes):  # by the first row
        active = [other for other in active if other[0][1] > box[0][0]]
        if any(all(one[0] < two[1] and two[0] < one[1] for one, two in zip(box, other)) for other in active):
            return True
        active.append(box)
    return False
