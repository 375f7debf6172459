"""A ring buffer of weights in one block of memory: units are loaded ahead, in the order of use, while earlier units are
used. SE-MoE (arXiv:2205.10034, section 4) holds K layers in this way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inference.weights.rank_weights import WeightUnit
from memory.completion import Completion

# Loads a unit into a slot of the ring buffer after the completions of the memory's earlier uses.
Load = Callable[[WeightUnit, torch.Tensor, list[Completion]], Completion]


@dataclass
class RingSlot:
    """A byte range of the ring buffer and the unit of weights in it. `there`: completion of the unit's load."""

    unit: WeightUnit
    start: int
    end: int
    memory: torch.Tensor
    there: Completion


class Ring:
    """A ring buffer that loads units of weights before use. `cycle`: all streamed units, in the order of use."""

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
        """Return whether the weights with this key are streamed through the ring buffer."""
        return key in self._index

    def take(self, key: str) -> RingSlot:
        """Return the slot of the unit `key`, which is used next. The caller waits until the unit is loaded."""
        while self._live and self._live[0].unit.key != key:  # an earlier pass was interrupted
            unused = self._live.popleft()
            unused.there.cancel()
            self._before.append((unused.start, unused.end, unused.there))
        if not self._live:
            self._next = self._index[key]
            self._load_ahead()
        return self._live[0]

    def give_back(self, ring_slot: RingSlot, after: Completion) -> None:
        """Free a slot, whose memory is in use until `after` is done, and load the next units."""
        assert self._live[0] is ring_slot, ring_slot.unit.key
        self._live.popleft()
        self._before.append((ring_slot.start, ring_slot.end, after))
        self._load_ahead()

    def stop(self) -> list[Completion]:
        """Cancel loads that have not started; return the completions to wait for before the memory is freed."""
        for each in self._live:
            each.there.cancel()
        return [*(done for _, _, done in self._before), *(each.there for each in self._live)]

    def _load_ahead(self) -> None:
        """Enqueue loads of the next units of weights, as long as the bytes after the newest one are free."""
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
            # Later units in these bytes wait only for the use of this unit.
            self._before = [
                (first, last, done)
                for low, high, done in self._before
                for first, last in ((low, min(high, start)), (max(low, end), high))
                if first < last
            ]
            memory = self._memory[start:end]
            self._live.append(RingSlot(unit, start, end, memory, self._load(unit, memory, free)))
            self._next, self._end = (self._next + 1) % len(self._cycle), end
