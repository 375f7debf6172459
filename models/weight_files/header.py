"""Reads the header of a safetensors file without torch: the type, the shape and the location of each tensor.

A file has 8 bytes with the header's length, a JSON object, then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). Old files do not pad the header: a tensor may start at any byte.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import reason_of

MAX_BYTES = 100_000_000  # what safetensors itself accepts
ITEM_BYTES = {
    **dict.fromkeys(["F64", "I64", "U64", "C64"], 8),
    **dict.fromkeys(["F32", "I32", "U32"], 4),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 2),
    **dict.fromkeys(["U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
}


@dataclass(frozen=True)
class TensorSpan:
    """A tensor in a safetensors file: its type as safetensors spells it, its shape and its range of bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # of the file, not of its body
    num_bytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of a safetensors file: its metadata and the location of each tensor."""

    metadata: dict[str, str]
    tensors: dict[str, TensorSpan]
    body: int  # the byte of the file that follows the header


def read_header(path: Path) -> SafetensorsHeader:
    """Return the header of a safetensors file. Raises ValueError with the reason if the file is damaged; or OSError."""
    with open(path, "rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_BYTES + 1
        if length > min(MAX_BYTES, size - 8):
            raise ValueError("it does not start with a safetensors header")
        text = stream.read(length)
    try:
        content = json.loads(text, object_pairs_hook=_unique)
        metadata = content.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("__metadata__ must map names to texts")
        tensors = {name: _span(name, value, 8 + length) for name, value in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is not a valid safetensors header ({reason_of(error)})") from error
    body = at = 8 + length
    for name, span in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        needed = at + math.prod(span.shape) * ITEM_BYTES[span.dtype]
        found = (span.start, span.start + span.num_bytes)
        if found != (at, needed):
            raise ValueError(
                f"its header gives tensor {name} data_offsets {[end - body for end in found]}, but its shape and the "
                f"tensors before it call for {[at - body, needed - body]}"
            )
        at = needed
    if size != at:
        raise ValueError(f"it has {size} bytes, but its header describes {at}")
    return SafetensorsHeader(metadata, tensors, body)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"the key {twice[0]} appears twice")
    return dict(pairs)


def _span(name: str, value: dict[str, Any], body: int) -> TensorSpan:
    dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name} has type {dtype}, which is none of {', '.join(ITEM_BYTES)}")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(
            f"tensor {name} has shape {shape} and bytes {start} to {end}, which must be integers of at least 0"
        )
    return TensorSpan(dtype, tuple(shape), body + start, end - start)
