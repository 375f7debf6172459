"""Memory slots for experts: loaded after routing, evicted by expected next use, prefetched by predicted routing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inference.weights.expert_cache import ExpertUses
from memory.completion import Completion, Users
from memory.copy_stream import PASSES, SAVES

ExpertKey = tuple[int, int]  # layer, expert
# Loads an expert into a slot's memory after the memory's earlier uses, at a priority of the host link.
LoadExpert = Callable[[ExpertKey, torch.Tensor, list[Completion], int], Completion]


@dataclass
class ExpertSlot:
    """A memory slot for one expert. `there`: completion handle of its load. `made`: the callable that applies it."""

    memory: torch.Tensor
    there: Completion = field(default_factory=Completion.already)
    users: Users = field(default_factory=Users)  # writes and reads of the memory
    made: Any = None


@dataclass
class ExpertCounts:
    """Counts of chosen experts in memory (hits), in flight (coming) or only in the files (misses), and of prefetched
    and cancelled loads."""

    hits: int = 0
    coming: int = 0
    misses: int = 0
    fetched_ahead: int = 0
    cancelled: int = 0


class ExpertSlots:
    """A cache of experts of all layers, with one expert per memory slot.

    after_use: returns the completion of the operations started so far, which a slot's next load waits for.
    """

    def __init__(
        self,
        memories: Sequence[torch.Tensor],
        uses: ExpertUses,
        load: LoadExpert,
        wait: Callable[[ExpertKey, Completion], None],
        after_use: Callable[[], Completion],
    ) -> None:
        self._all = [ExpertSlot(memory) for memory in memories]
        self._free = list(self._all)
        self._uses, self._load, self._wait, self._after_use = uses, load, wait, after_use
        self._held: dict[ExpertKey, ExpertSlot] = {}
        self._expected: dict[ExpertKey, Completion] = {}  # prefetched for a layer that has not run yet
        self._pinned: set[ExpertKey] = set()  # of the layer that runs
        self._most_expected = max(1, len(memories) // 2)
        self.counts = ExpertCounts()

    def take(
        self, layer: int, wanted: Mapping[int, int], make: Callable[[ExpertKey, torch.Tensor], Any]
    ) -> Iterator[tuple[int, Any]]:
        """Return an iterator over the chosen experts as (expert, callable), loaded experts first. Loads of missing
        experts that have a slot are already enqueued on return.

        wanted: number of tokens of each expert.
        """
        keys = [(layer, expert) for expert in wanted]
        self._drop_unwanted(layer, set(keys))
        here = [key for key in keys if key in self._held and self._held[key].there.is_issued]
        coming = [key for key in keys if key in self._held and not self._held[key].there.is_issued]
        misses = deque(key for key in keys if key not in self._held)
        self.counts.hits += len(here)
        self.counts.coming += len(coming)
        self.counts.misses += len(misses)
        self._pinned = {*here, *coming}
        self._uses.used(layer, wanted)
        order = deque([*here, *coming])
        self._fetch(misses, order)
        return self._each(order, misses, make)

    def _each(
        self, order: deque[ExpertKey], misses: deque[ExpertKey], make: Callable[[ExpertKey, torch.Tensor], Any]
    ) -> Iterator[tuple[int, Any]]:
        while order:
            key = order.popleft()
            held = self._held[key]
            self._wait(key, held.there)
            if held.made is None:
                held.made = make(key, held.memory)
            yield key[1], held.made
            held.users.add(self._after_use())
            self._pinned.discard(key)
            self._fetch(misses, order)

    def _fetch(self, misses: deque[ExpertKey], order: deque[ExpertKey]) -> None:
        while misses and (free := self._free_slot()) is not None:
            key = misses.popleft()
            self._start(key, free, PASSES)
            self._pinned.add(key)
            order.append(key)

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Prefetch experts that are not loaded, the most probable first, at a lower priority than chosen experts."""
        for key in ((layer, expert) for expert in experts):
            if len(self._expected) >= self._most_expected:
                break
            if key in self._held:
                self._expected.setdefault(key, self._held[key].there)
            elif (free := self._free_slot(self._expected.keys())) is not None:
                self._start(key, free, SAVES)
                self._expected[key] = free.there
                self.counts.fetched_ahead += 1
        self._uses.expect(layer, [expert for of, expert in self._expected if of == layer])

    def stop(self) -> list[Completion]:
        """Cancel loads that have not started; return the completions to wait for before the memory is freed."""
        for each in self._all:
            each.there.cancel()
        return [done for each in self._all for done in each.users.all()]

    def _drop_unwanted(self, layer: int, wanted: set[ExpertKey]) -> None:
        """Cancel prefetches for this layer that were not chosen and have not started."""
        for key in [key for key in self._expected if key[0] == layer]:
            there = self._expected.pop(key)
            if key not in wanted and not there.is_issued and there.cancel():
                self._release(key)
                self.counts.cancelled += 1

    def _start(self, key: ExpertKey, target: ExpertSlot, priority: int) -> None:
        target.there = self._load(key, target.memory, target.users.all(), priority)
        target.users.add(target.there)
        self._held[key] = target
        self._uses.admit(*key)

    def _free_slot(self, protected: Collection[ExpertKey] = ()) -> ExpertSlot | None:
        """Return a free slot, after evicting an expert if necessary; None if all experts are in use or protected."""
        if not self._free:
            found = self._uses.victims(1, {*self._pinned, *protected})
            if not found:
                return None
            (victim,) = found
            self._expected.pop(victim, None)
            self._release(victim)
        return self._free.pop()

    def _release(self, key: ExpertKey) -> None:
        freed = self._held.pop(key)
        freed.made = None
        self._free.append(freed)
        self._uses.drop(*key)
