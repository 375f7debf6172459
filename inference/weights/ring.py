"""A ring of slots in one block of memory: units are loaded in the order of use, each behind the last one, while earlier
units are used. SE-MoE (arXiv:2205.10034, section 4) keeps K layers so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inference.weights.rank_weights import WeightUnit
from memory.completion import Completion

# Loads a unit to a slot of the ring once all completions of its earlier users are over.
Load = Callable[[WeightUnit, torch.Tensor, list[Completion]], Completion]


@dataclass
class RingSlot:
    """A byte range of the ring and the unit that is loaded into it; `there` is over when the unit is loaded."""

    unit: WeightUnit
    start: int
    end: int
    memory: torch.Tensor
    there: Completion


class Ring:
    """The ring's memory and its slots in use. `cycle`: the units in the order in which every pass uses them."""

    def __init__(
        self, memory: torch.Tensor, cycle: Sequence[WeightUnit], num_bytes: Callable[[WeightUnit], int], load: Load
    ) -> None:
        self._memory, self._cycle, self._num_bytes, self._load = memory, list(cycle), num_bytes, load
        self._index = {unit.key: index for index, unit in enumerate(self._cycle)}
        self._next = 0  # index in the cycle of the unit that is loaded next
        self._end = 0  # end of the newest slot
        self._live: deque[RingSlot] = deque()  # loaded or in flight, in the order of use
        self._before: list[tuple[int, int, Completion]] = []  # earlier byte ranges, and when their use ends

    def holds(self, key: str) -> bool:
        """Whether the unit streams through this ring."""
        return key in self._index

    def take(self, key: str) -> RingSlot:
        """Return the slot of the unit that is used next; the caller waits until it is loaded."""
        while self._live and self._live[0].unit.key != key:  # a pass that was broken off
            unused = self._live.popleft()
            unused.there.cancel()
            self._before.append((unused.start, unused.end, unused.there))
        if not self._live:
            self._next = self._index[key]
            self._load_ahead()
        return self._live[0]

    def give_back(self, ring_slot: RingSlot, after: Completion) -> None:
        """Free a slot, whose use ends when `after` is over, and load the next units."""
        assert self._live[0] is ring_slot, ring_slot.unit.key
        self._live.popleft()
        self._before.append((ring_slot.start, ring_slot.end, after))
        self._load_ahead()

    def stop(self) -> list[Completion]:
        """Cancel loads that have not started; return all completions that must be over before the memory is freed."""
        for each in self._live:
            each.there.cancel()
        return [*(done for _, _, done in self._before), *(each.there for each in self._live)]

    def _load_ahead(self) -> None:
        """Load units as long as their bytes are free behind the newest slot."""
        while len(self._live) < len(self._cycle):
            unit = self._cycle[self._next]
            size = self._num_bytes(unit)
            start = self._end if self._live else 0
            if start + size > self._memory.numel():
                start = 0
            end = start + size
            if any(each.start < end and start < each.end for each in self._live):
                return
            free = [done for low, high, done in self._before if low < end and start < high]
            # The next unit in these bytes waits for this one alone.
            self._before = [
                (first, last, done)
                for low, high, done in self._before
                for first, last in ((low, min(high, start)), (max(low, end), high))
                if first < last
            ]
            memory = self._memory[start:end]
            self._live.append(RingSlot(unit, start, end, memory, self._load(unit, memory, free)))
            self._next, self._end = (self._next + 1) % len(self._cycle), end
