"""A file of routing counts, as a run of an MoE model made them: by step, MoE layer, micro-batch, rank and expert.

The first line is a JSON header. Then each step is one frame: its length and its checksum (4 bytes each), and
compressed, the step and the shape (8 and 4 x 2 bytes), the bytes of a count, and all counts, byte by byte of each. So a
file whose writer was killed reads up to its last whole frame, and a resumed run goes on behind the step that it resumed
from.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moe.placement.map import Integers

FORMAT = "mixtrain routing counts 1"
_FRAME = struct.Struct("<II")
_STEP = struct.Struct("<Q5H")


@dataclass(frozen=True)
class Header:
    """What a trace is of."""

    name: str
    num_experts: int
    top_k: int
    num_ranks: int  # of the expert parallel group when the run began; a frame may have another number


class Writer:
    """Appends to a trace, which it begins where there is none.

    `after` is the last step that the run has: what the file says of later ones is cut off, as is a frame that is not
    whole. Raises ValueError where the file is of other experts.
    """

    def __init__(self, path: Path, header: Header, after: int = 0) -> None:
        self._header = header
        if not path.exists() or path.stat().st_size == 0:
            path.write_text(json.dumps({"format": FORMAT, **asdict(header)}) + "\n", encoding="utf-8")
        with path.open("r+b") as file:
            found = _read_header(file, path)
            for field in ("num_experts", "top_k"):
                here, now = getattr(found, field), getattr(header, field)
                if here != now:
                    raise ValueError(f"{path} has {field}={here}, and the run {now}; move the file away")
            end = file.tell()
            for step, _ in _frames(file):
                if step > after:
                    break
                end = file.tell()
            file.truncate(end)
        self._file = path.open("ab")

    def append(self, step: int, counts: Integers) -> None:
        """The counts of a step's assignments [L, M, R, E]: MoE layers, micro-batches, ranks whose tokens they are,
        experts."""
        assert counts.ndim == 4 and counts.shape[3] == self._header.num_experts and counts.min(initial=0) >= 0
        small = np.ascontiguousarray(counts, dtype=np.min_scalar_type(int(counts.max(initial=0))))
        size = small.dtype.itemsize
        planes = small.reshape(-1, 1).view(np.uint8).reshape(-1, size).T  # high bytes are mostly 0
        payload = zlib.compress(_STEP.pack(step, *counts.shape, size) + planes.tobytes(), 9)
        self._file.write(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_header(path: Path) -> Header:
    """Raises ValueError where the file is no trace."""
    with path.open("rb") as file:
        return _read_header(file, path)


def read(path: Path) -> Iterator[tuple[int, Integers]]:
    """The steps and their counts [L, M, R, E], up to the last whole one. Raises ValueError where the file is no
    trace."""
    with path.open("rb") as file:
        _read_header(file, path)
        yield from _frames(file)


def _read_header(file: BinaryIO, path: Path) -> Header:
    try:
        fields = json.loads(file.readline(1 << 16))
        if fields.pop("format") == FORMAT:
            return Header(**fields)
    except (ValueError, TypeError, AttributeError, KeyError):
        pass
    raise ValueError(f"{path} is no trace of routing counts; `moe.placement.record` writes them")


def _frames(file: BinaryIO) -> Iterator[tuple[int, Integers]]:
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(head)
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        data = zlib.decompress(payload)
        step, *shape, size = _STEP.unpack_from(data)
        planes = np.frombuffer(data, np.uint8, offset=_STEP.size).reshape(size, -1)
        yield step, np.ascontiguousarray(planes.T).view(f"<u{size}").reshape(shape).astype(np.int64)
