"""Traces of routing: files of a run's routing counts per step, MoE layer, micro-batch, rank and expert.

The first line is a JSON header. Then each step is one frame: its length and its checksum (4 bytes each) and a
compressed payload, which has the step and the shape (8 and 4 x 2 bytes), the number of bytes of a count, and all counts
as byte planes. If the writer was killed, the file is read up to its last complete frame, and a resumed run continues
after the step that it resumed from. Damaged bytes are skipped up to the next frame, and reported.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from base.errors import ConfigError
from base.files import SideLog, missing
from moe.placement_map import Integers

FORMAT = "mixtrain routing counts 1"
_FRAME = struct.Struct("<II")
_STEP = struct.Struct("<Q5H")
_COMPRESSED = zlib.compress(b"", 9)[:2]  # first bytes of each payload
_OUR_HEADER = json.dumps({"format": FORMAT})[:-1].encode()
_HEADER_BYTES = 1 << 16  # at most
_START_BYTES = 1 << 12  # of a payload, which contain the step


@dataclass(frozen=True)
class TraceHeader:
    """The header of a trace of routing counts: the model and the layout."""

    name: str
    num_experts: int
    top_k: int
    num_ranks: int  # of the expert parallel group at the first start of the run; a frame may have another number


@dataclass(frozen=True)
class _Frame:
    start: int
    end: int
    step: int
    payload: bytes


@dataclass(frozen=True)
class _Damage:
    """A damaged section of a trace: bytes [start, end), from which no frame can be read."""

    start: int
    end: int
    kept: int  # number of readable steps before the section
    last: int  # the last of these steps; 0: none
    next: int | None  # the first step after the section; None: it is at the end of the file

    def text(self, path: Path, first: int) -> str:
        """Return a message about the damage and the lost steps; `first`: the first step that is not lost."""
        if self.last + 1 == first:
            lost = "no step is lost"
        elif self.last + 2 == first:
            lost = f"step {first - 1} is lost"
        else:
            lost = f"{first - 1 - self.last} steps, {self.last + 1} to {first - 1}, are lost"
        kept = f"and the {self.kept} steps before them are kept"
        return f"{path}: bytes {self.start} to {self.end - 1} are damaged: {lost}, {kept}"


class TraceWriter:
    """Writer of a trace of routing counts, which appends to the file or creates it.

    `after`: the last finished step of the run. Later steps, and an incomplete frame at the end of the file, are cut
    off. Disk errors are reported and do not end the run. Raises ConfigError if the file is not a trace, or has a
    different num_experts or top_k.
    """

    def __init__(self, path: Path, header: TraceHeader, after: int = 0) -> None:
        self.missing: list[str] = []  # messages about steps that the file lacks
        self._header = header
        self._log = SideLog(path, lambda: self._open(path, after))

    def _open(self, path: Path, after: int) -> None:
        is_new = not path.exists()
        if is_new or _is_cut_header(path):
            path.write_text(json.dumps({"format": FORMAT, **asdict(self._header)}) + "\n", encoding="utf-8")
            if not is_new and after > 0:
                self.missing.append(str(missing(path, 0, after)))
            return
        with path.open("r+b") as file:
            found = _read_header(file, path)
            for field in ("num_experts", "top_k"):
                here, now = getattr(found, field), getattr(self._header, field)
                if here != now:
                    raise ConfigError(
                        f"{path} was written with {field}={here}, and this run has {now}. Move the file away."
                    )
            end, last = file.tell(), 0
            for section in _sections(file):
                if isinstance(section, _Damage):
                    first = min(section.next or after + 1, after + 1)
                    if first > section.last + 1:  # else the run repeats all damaged steps
                        self.missing.append(section.text(path, first))
                        last = first - 1
                elif section.step > after:
                    break
                else:
                    end, last = section.end, section.step
            if (line := missing(path, last, after)) is not None:
                self.missing.append(line)
            file.truncate(end)

    def append(self, step: int, counts: Integers) -> None:
        """Append a step's numbers of assignments [L, M, R, E], by MoE layer, micro-batch, source rank and expert."""
        assert counts.ndim == 4 and counts.shape[3] == self._header.num_experts and counts.min(initial=0) >= 0
        small = np.ascontiguousarray(counts, dtype=np.min_scalar_type(int(counts.max(initial=0))))
        size = small.dtype.itemsize
        planes = small.reshape(-1, 1).view(np.uint8).reshape(-1, size).T  # high bytes are mostly 0
        payload = zlib.compress(_STEP.pack(step, *counts.shape, size) + planes.tobytes(), 9)
        self._log.append(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)

    def close(self) -> None:
        self._log.close()


def read_header(path: Path) -> TraceHeader:
    """Return the header of a trace of routing counts. Raises ConfigError if the file is not a trace."""
    with path.open("rb") as file:
        return _read_header(file, path)


def read(path: Path, log: Callable[[str], None] | None = None) -> Iterator[tuple[int, Integers]]:
    """Yield (step, counts [L, M, R, E]) for each step of a trace. Raises ConfigError if the file is not a trace.

    `log` gets messages about damaged bytes; with None they are printed on standard error.
    """
    log = log or partial(print, file=sys.stderr, flush=True)
    with path.open("rb") as file:
        header = _read_header(file, path)
        for section in _sections(file):
            if isinstance(section, _Frame):
                yield section.step, _counts(section, header, path)
            elif section.next is not None:
                log(section.text(path, section.next))
            else:
                log(
                    f"{path}: bytes {section.start} to {section.end - 1} at the end are not a complete step: all "
                    f"steps after {section.last} are lost, and {section.kept} steps are kept"
                )


def _is_cut_header(path: Path) -> bool:
    """Return whether a file has only the beginning of a trace's header line, because its writer was killed."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    return b"\n" not in start and (start.startswith(_OUR_HEADER) or _OUR_HEADER.startswith(start))


def _read_header(file: BinaryIO, path: Path) -> TraceHeader:
    try:
        fields = json.loads(file.readline(_HEADER_BYTES))
        if fields.pop("format") == FORMAT:
            header = TraceHeader(**fields)
            sizes = header.num_experts, header.top_k, header.num_ranks
            if all(type(size) is int and size > 0 for size in sizes) and header.top_k <= header.num_experts:
                return header
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass
    raise ConfigError(
        f"{path} is not a trace of routing counts, which moe.placement.record=true writes. Use another file, or move "
        "this one out of the run's folder."
    )


def _sections(file: BinaryIO) -> Iterator[_Frame | _Damage]:
    """Yield the frames and damaged sections of a trace in file order; the steps of the frames ascend."""
    position, last, kept, bad = file.tell(), 0, 0, None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while position < len(data):
            frame = _frame_at(data, position, last)
            if frame is None:
                bad = position if bad is None else bad
                # Search for the first bytes of a payload.
                found = data.find(_COMPRESSED, position + 1 + _FRAME.size)
                position = len(data) if found < 0 else found - _FRAME.size
                continue
            if bad is not None:
                yield _Damage(bad, frame.start, kept, last, frame.step)
                bad = None
            yield frame
            position, last, kept = frame.end, frame.step, kept + 1
        if bad is not None:
            yield _Damage(bad, len(data), kept, last, None)


def _frame_at(data: mmap.mmap, start: int, last: int) -> _Frame | None:
    """Return the frame at byte `start`; None if it is damaged, or its step is not after `last`."""
    begin = start + _FRAME.size
    try:
        length, checksum = _FRAME.unpack_from(data, start)
        if begin + length > len(data) or zlib.crc32(payload := data[begin : begin + length]) != checksum:
            return None
        step = _STEP.unpack_from(zlib.decompressobj().decompress(payload[:_START_BYTES], _STEP.size))[0]
    except (zlib.error, struct.error):
        return None
    return _Frame(start, begin + length, step, payload) if step > last else None


def _counts(frame: _Frame, header: TraceHeader, path: Path) -> Integers:
    """Return the counts [L, M, R, E] of a frame. Raises ConfigError if they cannot be read."""
    try:
        data = zlib.decompress(frame.payload)
        _, *shape, size = _STEP.unpack_from(data)
        if shape[3] != header.num_experts:
            raise ValueError(f"it has {shape[3]} experts, but the file's header says {header.num_experts}")
        planes = np.frombuffer(data, np.uint8, offset=_STEP.size).reshape(size, -1)
        return np.ascontiguousarray(planes.T).view(f"<u{size}").reshape(shape).astype(np.int64)
    except (zlib.error, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: step {frame.step}, at byte {frame.start}, cannot be read: {error}. Restore the file, or "
            "record the trace again with moe.placement.record=true."
        ) from None
