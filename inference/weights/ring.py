"""A ring of slots in one piece of memory: units come to it in the order of use, each to the place behind the last one,
while those before are used. SE-MoE (arXiv:2205.10034, section 4) keeps K layers so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inference.weights.parts import WeightUnit
from memory.completion import Completion

# Loads a unit to a piece of the ring once all who had it are over.
Load = Callable[[WeightUnit, torch.Tensor, list[Completion]], Completion]


@dataclass
class RingSlot:
    """A piece of the ring and the unit that comes to it; `there` is over when it has."""

    unit: WeightUnit
    start: int
    end: int
    memory: torch.Tensor
    there: Completion


class Ring:
    """`cycle`: the units in the order in which they are used, again and again."""

    def __init__(
        self, memory: torch.Tensor, cycle: Sequence[WeightUnit], num_bytes: Callable[[WeightUnit], int], load: Load
    ) -> None:
        self._memory, self._cycle, self._num_bytes, self._load = memory, list(cycle), num_bytes, load
        self._places = {unit.key: index for index, unit in enumerate(self._cycle)}
        self._next = 0  # of the cycle: what is loaded next
        self._end = 0  # of the last slot
        self._live: deque[RingSlot] = deque()  # loaded or on their way, in the order of use
        self._before: list[tuple[int, int, Completion]] = []  # who had pieces of the memory, and until when

    def holds(self, key: str) -> bool:
        """Whether the unit comes through this ring."""
        return key in self._places

    def take(self, key: str) -> RingSlot:
        """The slot of the unit that is used next; the caller waits until it is there."""
        while self._live and self._live[0].unit.key != key:  # a pass that was broken off
            slot = self._live.popleft()
            slot.there.cancel()
            self._before.append((slot.start, slot.end, slot.there))
        if not self._live:
            self._next = self._places[key]
            self._ahead()
        return self._live[0]

    def give_back(self, slot: RingSlot, after: Completion) -> None:
        """The slot's unit is not used any more once `after` is over; what comes next is loaded."""
        assert self._live[0] is slot, slot.unit.key
        self._live.popleft()
        self._before.append((slot.start, slot.end, after))
        self._ahead()

    def stop(self) -> list[Completion]:
        """Leave out what nobody has begun with; all that must be over before the memory may go."""
        for slot in self._live:
            slot.there.cancel()
        return [*(done for _, _, done in self._before), *(slot.there for slot in self._live)]

    def _ahead(self) -> None:
        """Load units as long as there is room behind the last one."""
        while len(self._live) < len(self._cycle):
            unit = self._cycle[self._next]
            size = self._num_bytes(unit)
            start = self._end if self._live else 0
            if start + size > self._memory.numel():
                start = 0
            end = start + size
            if any(slot.start < end and start < slot.end for slot in self._live):
                return
            free = [done for low, high, done in self._before if low < end and start < high]
            # Who comes to these bytes after this unit waits for it alone.
            self._before = [
                (first, last, done)
                for low, high, done in self._before
                for first, last in ((low, min(high, start)), (max(low, end), high))
                if first < last
            ]
            memory = self._memory[start:end]
            slot = RingSlot(unit, start, end, memory, self._load(unit, memory, free))
            self._live.append(slot)
            self._next, self._end = (self._next + 1) % len(self._cycle), end
