"""Records of bytes (such as the optimizer state of a bucket) in host memory or on the disk. A record is checked out,
changed and put back; a record on the disk is read before that and written after it.

Only the main thread makes calls, and no call blocks: jobs depend on each other through completion handles. Pending
reads, writes and snapshots belong to a record's location, so two records can swap locations without a copy.
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
    """Location of a record: `memory` on the host or, if that is None, the bytes of the file from `offset` on."""

    memory: torch.Tensor | None
    offset: int = 0
    written: Completion = field(default_factory=Completion.already)  # the last write; reads wait for it
    released: Completion = field(default_factory=Completion.already)  # by the last snapshot; writes wait for it


@dataclass
class _Stage:
    """A host buffer through which records of the disk are read and written."""

    memory: torch.Tensor
    priority: int  # of writes to the disk
    users: Users = field(default_factory=Users)
    is_checked_out: bool = False  # until `put` or `release`


@dataclass(frozen=True)
class Checkout:
    """A checked-out record: read `source` once `there` is done; write `target` once `change_after` and `free` are done.

    `source` and `target` are the same memory, unless the record will be put to another location in host memory.
    """

    source: torch.Tensor
    target: torch.Tensor
    there: Completion
    change_after: tuple[Completion, ...]
    to: _Location
    stage: _Stage | None
    free: tuple[Completion, ...] = ()  # earlier users of the target's memory; their failure does not matter


class Store:
    """Stores records of the given sizes in bytes, on the host or on the disk, for jobs that read and change them."""

    def __init__(
        self,
        link: HostLink,
        sizes: Sequence[int],
        host: Sequence[torch.Tensor | None],
        stages: Sequence[torch.Tensor],
        disk: Disk | None,
        offsets: Sequence[int],
        for_passes: int = 0,
    ):
        """Create the store without reading or writing records.

        host: memory of each record, or None for a record on the disk, which then starts at its entry of `offsets`.
        stages: host buffers that are as large as the largest record on the disk; the first `for_passes` of them serve
        reads that forward and backward passes wait for, the others serve updates.
        """
        self.link, self.sizes = link, sizes
        self._locations = [_Location(memory, offset) for memory, offset in zip(host, offsets, strict=True)]
        made = [_Stage(memory, LAYERS if i < for_passes else UPDATES) for i, memory in enumerate(stages)]
        self._stages, self._pass_stages = made[for_passes:], made[:for_passes]
        self._disk = disk
        self.bytes_read = self.bytes_written = 0  # of the disk, without cancelled jobs
        self._counting = threading.Lock()  # the thread of a copy stream may cancel a job
        self.waits_for_save = 0  # changes that had to wait until a save had read the record

    def fetch(
        self, index: int, to: int | None = None, priority: int = UPDATES, after: Sequence[Completion] = ()
    ) -> Checkout:
        """Check out record `index` to change it, until `put` stores it or `release` ends the checkout unchanged.

        to: the record that `put` stores it as, by default the same. priority: of a read from the disk. after: jobs that
        a read from the disk waits for.
        """
        location, target = self._locations[index], self._locations[index if to is None else to]
        if location.memory is not None:
            assert target.memory is not None
            return Checkout(location.memory, target.memory, location.written, self._unreleased(target), target, None)
        stage = self._check_out(priority)
        disk, memory = self._disk, stage.memory[: padded(self.sizes[index])]
        assert disk is not None and target.memory is None
        there = self.link.read.submit(
            lambda: disk.read_into(location.offset, memory),
            (location.written, *after),
            memory.numel(),
            free=stage.users.all(),
            priority=priority,
        )
        self._count(there, read=memory.numel())
        stage.users.add(there, self.sizes[index])
        record = stage.memory[: self.sizes[index]]
        return Checkout(record, record, there, (), target, stage)

    def overwrite(self, index: int, priority: int = UPDATES) -> Checkout:
        """Check out record `index` to write new contents, without reading the old ones. `put` ends the checkout.

        priority: of the write to the disk.
        """
        location = self._locations[index]
        if location.memory is not None:
            memory, after = location.memory, (*self._unreleased(location), location.written)
            return Checkout(memory, memory, Completion.already(), after, location, None)
        stage = self._check_out(priority)
        record = stage.memory[: self.sizes[index]]
        return Checkout(record, record, Completion.already(), (), location, stage, tuple(stage.users.all()))

    def _check_out(self, priority: int) -> _Stage:
        may = self._pass_stages if priority < UPDATES and self._pass_stages else self._stages
        stages = [stage for stage in may if not stage.is_checked_out] or may
        stage = stages[soonest_free([stage.users for stage in stages])]
        stage.is_checked_out = True
        return stage

    def put(self, checkout: Checkout, after: Completion) -> Completion:
        """Store the new contents of a checked-out record once the job `after` is done; this ends the checkout.

        Returns the completion of the write.
        """
        if checkout.stage is None:
            checkout.to.written = after
            return after
        disk, memory = self._disk, checkout.stage.memory[: padded(checkout.target.numel())]
        assert disk is not None
        location = checkout.to
        written = self.link.write.submit(
            lambda: disk.write_from(location.offset, memory),
            (after, *self._unreleased(location)),
            memory.numel(),
            priority=checkout.stage.priority,
        )
        self._count(written, written=memory.numel())
        location.written = written
        checkout.stage.users.add(written, checkout.target.numel())
        checkout.stage.is_checked_out = False
        return written

    def release(self, checkout: Checkout, after: Completion) -> None:
        """End the checkout of a record that was not changed. Its memory is in use until the job `after` is done."""
        if checkout.stage is not None:
            checkout.stage.users.add(after, checkout.target.numel())
            checkout.stage.is_checked_out = False

    def swap(self, one: int, other: int) -> None:
        """Exchange the contents of two records of the same size, without a copy."""
        assert self.sizes[one] == self.sizes[other]
        self._locations[one], self._locations[other] = self._locations[other], self._locations[one]

    def last_write(self, index: int) -> Completion:
        """Return the completion of the last write to record `index`."""
        return self._locations[index].written

    def snapshot(self, indices: Sequence[int], buffer: torch.Tensor | None) -> Snapshot:
        """Return a snapshot of records for a save. The records cannot change until the save releases them.

        buffer: host memory into which records on the disk are read.
        """
        locations = [self._locations[index] for index in indices]
        for location in locations:
            assert location.released.is_issued, "an earlier save has not released this record"
            location.released = Completion()
        return Snapshot(locations, [self.sizes[index] for index in indices], self._disk, buffer)

    def _count(self, done: Completion, read: int = 0, written: int = 0) -> None:
        def add(sign: int) -> None:
            with self._counting:
                self.bytes_read += sign * read
                self.bytes_written += sign * written

        add(1)
        done.when_issued(lambda: add(-1) if isinstance(done.error, Cancelled) else None)

    def _unreleased(self, location: _Location) -> tuple[Completion, ...]:
        if location.released.is_issued:
            return ()
        self.waits_for_save += 1
        return (location.released,)


class Snapshot:
    """The contents of records at one moment, for one thread that saves them. Released records may change again."""

    def __init__(
        self, locations: Sequence[_Location], sizes: Sequence[int], disk: Disk | None, buffer: torch.Tensor | None
    ):
        self._locations, self._sizes, self._disk, self._buffer = locations, sizes, disk, buffer
        # The current completions: a later snapshot replaces those of the locations.
        self.released = [location.released for location in locations]
        self._written = [location.written for location in locations]

    def read(self, index: int) -> torch.Tensor:
        """Return the bytes of a record for the save, valid until the next `read` or the record's `release`.

        Raises the error of the record's last write.
        """
        location, size, written = self._locations[index], self._sizes[index], self._written[index]
        written.result()
        if location.memory is not None:
            return location.memory
        assert self._disk is not None and self._buffer is not None
        self._disk.read_into(location.offset, self._buffer[: padded(size)])
        return self._buffer[:size]

    def release(self, index: int) -> None:
        """Allow record `index` of the snapshot to change again, because the save has read it."""
        self.released[index].finish()

    def close(self) -> None:
        """Allow all records of the snapshot to change again."""
        for released in self.released:
            released.finish()
