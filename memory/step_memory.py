"""Host memory for what leaves the device within a step and comes back in it.

All of it is there when a step begins: as much as was expected at the start, and more between two steps where some has
found no room, up to what the host's budget leaves. Within a step nothing is allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

ALIGNMENT = 512  # bytes


class StepMemory:
    """Segments of memory, of which whoever comes first gets the first free range that is large enough."""

    def __init__(self, allocate: Callable[[int], torch.Tensor | None], room: Callable[[], float]):
        """allocate: memory of so many bytes, uint8; None where there is none. room: how many bytes it has left."""
        self._allocate, self._room = allocate, room
        self.size = 0  # bytes
        self.stayed = 0  # bytes of this step that found no room
        self._free: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []  # segments, and their free ranges in order
        self._missed = self._most_missed = 0  # bytes without room that are in use, now and at most in this step

    def begin(self, expected: int = 0) -> None:
        """A step begins: grow by what the last one lacked, and to `expected` bytes, as far as there is room."""
        lacking = max(expected - self.size, self._most_missed)
        self.stayed, self._most_missed = 0, self._missed
        self.grow(int(min(_rounded(lacking), self._room() // ALIGNMENT * ALIGNMENT)))

    def grow(self, num_bytes: int) -> None:
        """Have so many bytes more, if they can be had."""
        if num_bytes > 0 and (memory := self._allocate(num_bytes)) is not None:
            self._free.append((memory, [(0, num_bytes)]))
            self.size += num_bytes

    def take(self, num_bytes: int) -> Space:
        """Room for so many bytes until it is freed, or nobody refers to it; `memory` is None where there is none."""
        size = _rounded(num_bytes)
        for memory, ranges in self._free:
            for index, (start, end) in enumerate(ranges):
                if end - start >= size:
                    ranges[index : index + 1] = [(start + size, end)] if end - start > size else []
                    return Space(memory[start : start + num_bytes], partial(_put_back, ranges, start, start + size))
        self.stayed += num_bytes
        self._missed += size
        self._most_missed = max(self._most_missed, self._missed)
        return Space(None, partial(self._found, size))

    def close(self) -> None:
        """Let go of all memory."""
        self._free, self.size = [], 0

    def _found(self, size: int) -> None:
        self._missed -= size


class Space:
    """Room on the host that its owner gives back."""

    def __init__(self, memory: torch.Tensor | None, give: Callable[[], None]):
        self.memory = memory  # uint8
        self.free = weakref.finalize(self, give)
        self.free.atexit = False


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _put_back(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a range to free ones, which stay in order and apart."""
    ranges.append((start, end))
    ranges.sort()
    for index in reversed(range(1, len(ranges))):
        if ranges[index - 1][1] == ranges[index][0]:
            ranges[index - 1 : index + 1] = [(ranges[index - 1][0], ranges[index][1])]
