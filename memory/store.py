"""Records that lie on the host or on the disk, and come to where they are changed and go back: reads ahead, writes
behind.

All calls are the main thread's and none blocks: what is to be waited for is handed on. A record's location is what is
read, written and held for a save; the records of two locations can be swapped without a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memory.completion import Cancelled, Completion, Users, soonest_free
from memory.copy_stream import LAYERS, UPDATES
from memory.disk import Disk
from memory.host_link import HostLink
from memory.host_memory import padded


@dataclass
class _Location:
    """Where a record lies: in memory of its own, or on the disk from `offset` on."""

    memory: torch.Tensor | None
    offset: int = 0
    written: Completion = field(default_factory=Completion.already)  # the last change, which a reader waits for
    held: Completion = field(default_factory=Completion.already)  # a save has read it


@dataclass
class _Slot:
    memory: torch.Tensor
    priority: int  # of writes
    users: Users = field(default_factory=Users)
    is_lent: bool = False  # and nobody has said until when


@dataclass(frozen=True)
class Checkout:
    """A record on its way: read from `source` once `there` is over, changed in `target` once all of `change_after`
    is, and `free`, whatever came of that. Both are the same bytes, unless the record is put to another location of the
    host."""

    source: torch.Tensor
    target: torch.Tensor
    there: Completion
    change_after: tuple[Completion, ...]
    to: _Location
    slot: _Slot | None
    free: tuple[Completion, ...] = ()  # who had the target's memory before


class Store:
    """`len(sizes)` records of so many bytes each; `on_disk` says which of them are on the disk."""

    def __init__(
        self,
        link: HostLink,
        sizes: Sequence[int],
        host: Sequence[torch.Tensor | None],
        slots: Sequence[torch.Tensor],
        disk: Disk | None,
        offsets: Sequence[int],
        for_passes: int = 0,
    ):
        """host: memory of each record, None for those of the disk, which begin at `offsets`. slots: host memory for the
        largest of these; the first `for_passes` serve what passes wait for, and no update holds them."""
        self.link, self.sizes = link, sizes
        self._locations = [_Location(memory, offset) for memory, offset in zip(host, offsets, strict=True)]
        made = [_Slot(memory, LAYERS if i < for_passes else UPDATES) for i, memory in enumerate(slots)]
        self._slots, self._slots_of_passes = made[for_passes:], made[:for_passes]
        self._disk = disk
        self.bytes_read = self.bytes_written = 0  # of the disk, without what was cancelled
        self._counting = threading.Lock()  # a stream may cancel
        self.waits_for_save = 0  # changes that had to wait until a save had read the record

    def fetch(
        self, index: int, to: int | None = None, priority: int = UPDATES, after: Sequence[Completion] = ()
    ) -> Checkout:
        """Have record `index` come to the host, to be changed and put to record `to` (itself, unless it is given).
        `put` or `release` gives the checkout back. `priority`: of the read, see memory/copy_stream.py;
        `after`: what a read of the disk waits for."""
        location, target = self._locations[index], self._locations[index if to is None else to]
        if location.memory is not None:
            assert target.memory is not None
            return Checkout(location.memory, target.memory, location.written, self._unheld(target), target, None)
        slot = self._lend(priority)
        disk, memory = self._disk, slot.memory[: padded(self.sizes[index])]
        assert disk is not None and target.memory is None
        there = self.link.read.submit(
            lambda: disk.read_into(location.offset, memory),
            (location.written, *after),
            memory.numel(),
            free=slot.users.all(),
            priority=priority,
        )
        self._count(there, read=memory.numel())
        slot.users.add(there, self.sizes[index])
        record = slot.memory[: self.sizes[index]]
        return Checkout(record, record, there, (), target, slot)

    def overwrite(self, index: int, priority: int = UPDATES) -> Checkout:
        """Memory of the host for what record `index` shall hold, whatever it holds now. `put` gives it back.
        `priority`: of what comes to it."""
        location = self._locations[index]
        if location.memory is not None:
            memory, after = location.memory, (*self._unheld(location), location.written)
            return Checkout(memory, memory, Completion.already(), after, location, None)
        slot = self._lend(priority)
        record = slot.memory[: self.sizes[index]]
        return Checkout(record, record, Completion.already(), (), location, slot, tuple(slot.users.all()))

    def _lend(self, priority: int) -> _Slot:
        may = self._slots_of_passes if priority < UPDATES and self._slots_of_passes else self._slots
        slots = [slot for slot in may if not slot.is_lent] or may
        slot = slots[soonest_free([slot.users for slot in slots])]
        slot.is_lent = True
        return slot

    def put(self, checkout: Checkout, after: Completion) -> Completion:
        """The checkout's target is what its record holds from now on, once `after` is over. Returns when the record is
        there."""
        if checkout.slot is None:
            checkout.to.written = after
            return after
        disk, memory = self._disk, checkout.slot.memory[: padded(checkout.target.numel())]
        assert disk is not None
        location = checkout.to
        written = self.link.write.submit(
            lambda: disk.write_from(location.offset, memory),
            (after, *self._unheld(location)),
            memory.numel(),
            priority=checkout.slot.priority,
        )
        self._count(written, written=memory.numel())
        location.written = written
        checkout.slot.users.add(written, checkout.target.numel())
        checkout.slot.is_lent = False
        return written

    def release(self, checkout: Checkout, after: Completion) -> None:
        """Nothing was changed; the checkout is over with `after`."""
        if checkout.slot is not None:
            checkout.slot.users.add(after, checkout.target.numel())
            checkout.slot.is_lent = False

    def swap(self, one: int, other: int) -> None:
        """Exchange two records of the same size, without a copy."""
        assert self.sizes[one] == self.sizes[other]
        self._locations[one], self._locations[other] = self._locations[other], self._locations[one]

    def last_write(self, index: int) -> Completion:
        """When the record is as it was last put."""
        return self._locations[index].written

    def hold(self, indices: Sequence[int], buffer: torch.Tensor | None) -> Snapshot:
        """Keep these records as they are now, for a save, until it has read them. `buffer`: host memory for the largest
        one of the disk."""
        locations = [self._locations[index] for index in indices]
        for location in locations:
            assert location.held.is_issued, "one save at a time"
            location.held = Completion()
        return Snapshot(locations, [self.sizes[index] for index in indices], self._disk, buffer)

    def _count(self, done: Completion, read: int = 0, written: int = 0) -> None:
        def add(sign: int) -> None:
            with self._counting:
                self.bytes_read += sign * read
                self.bytes_written += sign * written

        add(1)
        done.when_issued(lambda: add(-1) if isinstance(done.error, Cancelled) else None)

    def _unheld(self, location: _Location) -> tuple[Completion, ...]:
        if location.held.is_issued:
            return ()
        self.waits_for_save += 1
        return (location.held,)


class Snapshot:
    """Records as they were at one moment. Any one thread may read and release; a change of a record waits for that."""

    def __init__(
        self, locations: Sequence[_Location], sizes: Sequence[int], disk: Disk | None, buffer: torch.Tensor | None
    ):
        self._locations, self._sizes, self._disk, self._buffer = locations, sizes, disk, buffer
        # As they are now: later changes wait for this hold, and a later hold has others.
        self.held, self._written = (
            [location.held for location in locations],
            [location.written for location in locations],
        )

    def read(self, index: int) -> torch.Tensor:
        """The record's bytes, until the next `read` or its `release`. Raises what its last change raised."""
        location, size, written = self._locations[index], self._sizes[index], self._written[index]
        written.wait()
        if written.error is not None:
            raise written.error
        if location.memory is not None:
            return location.memory
        assert self._disk is not None and self._buffer is not None
        self._disk.read_into(location.offset, self._buffer[: padded(size)])
        return self._buffer[:size]

    def release(self, index: int) -> None:
        """It may be changed again."""
        self.held[index].finish()

    def close(self) -> None:
        """All of them may."""
        for index in range(len(self._locations)):
            self.release(index)
