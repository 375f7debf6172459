"""Slots for experts in one piece of memory: fetched when a router has chosen them, kept by expected next use, and
fetched ahead where a router says which ones will probably be chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inference.weights.expert_cache import ExpertUses
from memory.completion import Completion, Users
from memory.copy_stream import PASSES, SAVES

Place = tuple[int, int]  # layer, expert
# Loads an expert to a slot's memory once all who had it are over, at a priority of the host link.
LoadExpert = Callable[[Place, torch.Tensor, list[Completion], int], Completion]


@dataclass
class ExpertSlot:
    """Memory of one expert. `made`: what applies it, once it was asked for."""

    memory: torch.Tensor
    there: Completion = field(default_factory=Completion.already)
    users: Users = field(default_factory=Users)  # who wrote to it and read it
    made: Any = None


@dataclass
class ExpertCounts:
    """Experts that were wanted, by where they were then: in their slot, on their way, or in the files; and those that
    were fetched ahead, and of them those that were not wanted."""

    hits: int = 0
    coming: int = 0
    misses: int = 0
    fetched_ahead: int = 0
    cancelled: int = 0


class ExpertSlots:
    """`num_slots` experts of all layers. `after_use` gives what ends the use of a slot."""

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        uses: ExpertUses,
        load: LoadExpert,
        wait: Callable[[Place, Completion], None],
        after_use: Callable[[], Completion],
    ) -> None:
        self._all = [ExpertSlot(memory) for memory in slots]
        self._free = list(self._all)
        self._uses, self._load, self._wait, self._after_use = uses, load, wait, after_use
        self._held: dict[Place, ExpertSlot] = {}
        self._expected: dict[Place, Completion] = {}  # fetched ahead, and their layer has not come yet
        self._pinned: set[Place] = set()  # of the layer that runs
        self._most_expected = max(1, len(slots) // 2)
        self.counts = ExpertCounts()

    def take(
        self, layer: int, wanted: Mapping[int, int], make: Callable[[Place, torch.Tensor], Any]
    ) -> Iterator[tuple[int, Any]]:
        """The wanted experts, each with the number of its tokens; those first that are there. All that have room are on
        their way when this returns."""
        places = [(layer, expert) for expert in wanted]
        self._drop_wrong(layer, set(places))
        here = [place for place in places if place in self._held and self._held[place].there.is_issued]
        coming = [place for place in places if place in self._held and not self._held[place].there.is_issued]
        misses = deque(place for place in places if place not in self._held)
        self.counts.hits += len(here)
        self.counts.coming += len(coming)
        self.counts.misses += len(misses)
        self._pinned = {*here, *coming}
        self._uses.used(layer, wanted)
        order = deque([*here, *coming])
        self._fetch(misses, order)
        return self._each(order, misses, make)

    def _each(
        self, order: deque[Place], misses: deque[Place], make: Callable[[Place, torch.Tensor], Any]
    ) -> Iterator[tuple[int, Any]]:
        while order:
            place = order.popleft()
            slot = self._held[place]
            self._wait(place, slot.there)
            if slot.made is None:
                slot.made = make(place, slot.memory)
            yield place[1], slot.made
            slot.users.add(self._after_use())
            self._pinned.discard(place)
            self._fetch(misses, order)

    def _fetch(self, misses: deque[Place], order: deque[Place]) -> None:
        while misses and (slot := self._room()) is not None:
            place = misses.popleft()
            self._begin(place, slot, PASSES)
            self._pinned.add(place)
            order.append(place)

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Fetch those of these experts ahead that are not here, the surest first, behind all that is waited for."""
        for place in ((layer, expert) for expert in experts):
            if len(self._expected) >= self._most_expected:
                break
            if place in self._held:
                self._expected.setdefault(place, self._held[place].there)
            elif (slot := self._room(self._expected.keys())) is not None:
                self._begin(place, slot, SAVES)
                self._expected[place] = slot.there
                self.counts.fetched_ahead += 1
        self._uses.expect(layer, [expert for of, expert in self._expected if of == layer])

    def stop(self) -> list[Completion]:
        """Leave out what nobody has begun with; all that must be over before the memory may go."""
        for slot in self._all:
            slot.there.cancel()
        return [done for slot in self._all for done in slot.users.all()]

    def _drop_wrong(self, layer: int, wanted: set[Place]) -> None:
        """What was expected of this layer and is not wanted stays if it is here, and is left out if nobody has begun
        with it."""
        for place in [place for place in self._expected if place[0] == layer]:
            there = self._expected.pop(place)
            if place not in wanted and not there.is_issued and there.cancel():
                self._release(place)
                self.counts.cancelled += 1

    def _begin(self, place: Place, slot: ExpertSlot, priority: int) -> None:
        slot.there = self._load(place, slot.memory, slot.users.all(), priority)
        slot.users.add(slot.there)
        self._held[place] = slot
        self._uses.admit(*place)

    def _room(self, protected: Collection[Place] = ()) -> ExpertSlot | None:
        """A slot whose expert goes; None where all are wanted or protected."""
        if not self._free:
            found = self._uses.victims(1, {*self._pinned, *protected})
            if not found:
                return None
            (victim,) = found
            self._expected.pop(victim, None)
            self._release(victim)
        return self._free.pop()

    def _release(self, place: Place) -> None:
        slot = self._held.pop(place)
        slot.made = None
        self._free.append(slot)
        self._uses.drop(*place)
