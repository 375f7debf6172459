"""Memory of the host for what a step offloads: ranges that come and go, and what is grown by between two steps."""

from __future__ import annotations

import random

import pytest
import torch

from memory.host_link import ALIGNMENT, Space, StepMemory


class Host:
    """A host that has so many bytes."""

    def __init__(self, headroom: int) -> None:
        self.left = headroom
        self.allocated: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        if num_bytes > self.left:
            return None
        self.left -= num_bytes
        self.allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def memory(self) -> StepMemory:
        return StepMemory(self.allocate, lambda: self.left)


def test_ranges_are_disjoint_and_merged_when_freed() -> None:
    host, draw = Host(64 * ALIGNMENT), random.Random(0)
    memory = host.memory()
    memory.begin(64 * ALIGNMENT)
    spaces: list[tuple[Space, int]] = []
    for number in range(2000):
        if spaces and draw.random() < 0.5:
            space, value = spaces.pop(draw.randrange(len(spaces)))
            assert space.memory is not None and space.memory.eq(value).all()
            space.free()
        else:
            space = memory.take(draw.randint(1, 9 * ALIGNMENT))
            if space.memory is not None:
                spaces.append((space, number % 256))
                space.memory.fill_(number % 256)
    spaces.clear()
    del space
    assert memory.take(64 * ALIGNMENT).memory is not None
    assert host.allocated == [64 * ALIGNMENT]


def test_what_does_not_fit_is_counted_and_fits_in_the_next_step() -> None:
    host = Host(100 * ALIGNMENT)
    memory = host.memory()
    memory.begin()
    first = [memory.take(ALIGNMENT) for _ in range(3)]
    assert all(space.memory is None for space in first) and memory.stayed == 3 * ALIGNMENT and not host.allocated
    first[0].free()
    assert memory.take(5).memory is None and memory.stayed == 3 * ALIGNMENT + 5
    del first
    memory.begin()
    assert memory.stayed == 0 and host.allocated == [3 * ALIGNMENT]  # as much as was in use at once
    again = [memory.take(ALIGNMENT) for _ in range(3)]
    assert all(space.memory is not None for space in again) and memory.stayed == 0
    memory.begin()
    assert host.allocated == [3 * ALIGNMENT]


@pytest.mark.parametrize(("headroom", "size"), [(10, 10), (2, 2), (0, 0)])
def test_it_grows_within_the_headroom(headroom: int, size: int) -> None:
    host = Host(headroom * ALIGNMENT + 7)
    memory = host.memory()
    memory.begin(10 * ALIGNMENT)
    assert memory.size == size * ALIGNMENT
    memory.begin(10 * ALIGNMENT)
    assert memory.size == size * ALIGNMENT and len(host.allocated) == (size > 0)


def test_what_nobody_refers_to_is_free() -> None:
    memory = Host(ALIGNMENT).memory()
    memory.begin(ALIGNMENT)
    space = memory.take(1)
    assert memory.take(1).memory is None
    del space
    assert memory.take(1).memory is not None
