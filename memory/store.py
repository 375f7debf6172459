"""Records that lie on the host or on the disk, and come to where they are changed and go back: reads ahead, writes
behind.

All calls are the main thread's and none blocks: what is to be waited for is handed on. A record's place is what is
read, written and held for a save; the records of two places can be swapped without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memory.arrange import padded
from memory.disk import Disk
from memory.lanes import Done, Lanes, Users, soonest_free


@dataclass
class _Place:
    """Where a record lies: in memory of its own, or on the disk from `offset` on."""

    memory: torch.Tensor | None
    offset: int = 0
    written: Done = field(default_factory=Done.already)  # the last change, which a reader waits for
    held: Done = field(default_factory=Done.already)  # a save has read it


@dataclass
class _Slot:
    memory: torch.Tensor
    users: Users = field(default_factory=Users)
    is_lent: bool = False  # and nobody has said until when


@dataclass(frozen=True)
class Loan:
    """A record on its way: read from `source` once `there` is over, changed in `target` once all of `change_after`
    is. Both are the same bytes, unless the record is put to another place of the host."""

    source: torch.Tensor
    target: torch.Tensor
    there: Done
    change_after: tuple[Done, ...]
    to: _Place
    slot: _Slot | None


class Store:
    """`len(sizes)` records of so many bytes each; `on_disk` says which of them are on the disk."""

    def __init__(
        self,
        lanes: Lanes,
        sizes: Sequence[int],
        host: Sequence[torch.Tensor | None],
        slots: Sequence[torch.Tensor],
        disk: Disk | None,
        offsets: Sequence[int],
    ):
        """host: memory of each record, None for those of the disk, which begin at `offsets`. slots: host memory for the
        largest of these."""
        self.lanes, self.sizes = lanes, sizes
        self._places = [_Place(memory, offset) for memory, offset in zip(host, offsets, strict=True)]
        self._slots = [_Slot(memory) for memory in slots]
        self._disk = disk
        self.waits_for_save = 0  # changes that had to wait until a save had read the record

    def fetch(self, index: int, to: int | None = None) -> Loan:
        """Have record `index` come to the host, to be changed and put to record `to` (itself, unless it is given).
        `put` or `release` gives the loan back."""
        place, target = self._places[index], self._places[index if to is None else to]
        if place.memory is not None:
            assert target.memory is not None
            return Loan(place.memory, target.memory, place.written, self._unheld(target), target, None)
        slots = [slot for slot in self._slots if not slot.is_lent] or self._slots
        slot = slots[soonest_free([slot.users for slot in slots])]
        slot.is_lent = True
        disk, memory = self._disk, slot.memory[: padded(self.sizes[index])]
        assert disk is not None and target.memory is None
        there = self.lanes.read.submit(
            lambda: disk.read_into(place.offset, memory), (place.written,), memory.numel(), free=slot.users.all()
        )
        slot.users.add(there, self.sizes[index])
        record = slot.memory[: self.sizes[index]]
        return Loan(record, record, there, (), target, slot)

    def put(self, loan: Loan, after: Done) -> Done:
        """The loan's target is what its record holds from now on, once `after` is over; when the record is there."""
        if loan.slot is None:
            loan.to.written = after
            return after
        disk, memory = self._disk, loan.slot.memory[: padded(loan.target.numel())]
        assert disk is not None
        place = loan.to
        written = self.lanes.write.submit(
            lambda: disk.write_from(place.offset, memory), (after, *self._unheld(place)), memory.numel()
        )
        place.written = written
        loan.slot.users.add(written, loan.target.numel())
        loan.slot.is_lent = False
        return written

    def release(self, loan: Loan, after: Done) -> None:
        """Nothing was changed; the loan is over with `after`."""
        if loan.slot is not None:
            loan.slot.users.add(after, loan.target.numel())
            loan.slot.is_lent = False

    def swap(self, one: int, other: int) -> None:
        """Exchange two records of the same size, without a copy."""
        assert self.sizes[one] == self.sizes[other]
        self._places[one], self._places[other] = self._places[other], self._places[one]

    def last_write(self, index: int) -> Done:
        """When the record is as it was last put."""
        return self._places[index].written

    def hold(self, indices: Sequence[int], buffer: torch.Tensor | None) -> Hold:
        """Keep these records as they are now, for a save, until it has read them. `buffer`: host memory for the largest
        one of the disk."""
        places = [self._places[index] for index in indices]
        for place in places:
            assert place.held.is_issued, "one save at a time"
            place.held = Done()
        return Hold(places, [self.sizes[index] for index in indices], self._disk, buffer)

    def _unheld(self, place: _Place) -> tuple[Done, ...]:
        if place.held.is_issued:
            return ()
        self.waits_for_save += 1
        return (place.held,)


class Hold:
    """Records as they were at one moment. Any one thread may read and release; a change of a record waits for that."""

    def __init__(self, places: Sequence[_Place], sizes: Sequence[int], disk: Disk | None, buffer: torch.Tensor | None):
        self._places, self._sizes, self._disk, self._buffer = places, sizes, disk, buffer
        # As they are now: later changes wait for this hold, and a later hold has others.
        self.held, self._written = [place.held for place in places], [place.written for place in places]

    def read(self, index: int) -> torch.Tensor:
        """The record's bytes, until the next `read` or its `release`. Raises what its last change raised."""
        place, size, written = self._places[index], self._sizes[index], self._written[index]
        written.wait()
        if written.error is not None:
            raise written.error
        if place.memory is not None:
            return place.memory
        assert self._disk is not None and self._buffer is not None
        self._disk.read_into(place.offset, self._buffer[: padded(size)])
        return self._buffer[:size]

    def release(self, index: int) -> None:
        """It may be changed again."""
        self.held[index].finish()

    def close(self) -> None:
        """All of them may."""
        for index in range(len(self._places)):
            self.release(index)
