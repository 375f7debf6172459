"""The store: records come and go with their bytes, wait for a save, change places, and fail as the disk does."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memory.completion import Completion
from memory.disk import Disk, aligned, offsets
from memory.host_link import HostLink
from memory.host_memory import BLOCK
from memory.store import Store
from optim.arrangement.buckets import NUM_STAGES
from tests.waits import LONG

pytestmark = pytest.mark.fast

SIZES = [5000, 8192, 1, 8192, 12288]
TIERS = ["host", "disk", "disk", "disk", "host"]


def fill(value: int) -> Callable[[torch.Tensor], Any]:
    return lambda record: record.fill_(value)


def add(value: int | torch.Tensor) -> Callable[[torch.Tensor], Any]:
    return lambda record: record.add_(value)


class Rig:
    """A store with its link and its file; `change` adds to a record's bytes, in the host's stream."""

    def __init__(self, folder: Path) -> None:
        self.link = HostLink(torch.device("cpu"), timeout=LONG)
        on_disk = [size if tier == "disk" else 0 for size, tier in zip(SIZES, TIERS, strict=True)]
        *starts, total = offsets(on_disk)
        self.disk = Disk(str(folder), total)
        host = [
            aligned(size, False)[:size].zero_() if tier == "host" else None
            for size, tier in zip(SIZES, TIERS, strict=True)
        ]
        stages = [aligned(max(on_disk), False) for _ in range(NUM_STAGES)]
        self.store = Store(self.link, SIZES, host, stages, self.disk, starts)
        self.buffer = aligned(max(SIZES), False)
        for index in range(len(SIZES)):
            self.change(index, fill(index)).wait(LONG)

    def change(self, index: int, work: Callable[[torch.Tensor], Any]) -> Completion:
        checkout = self.store.fetch(index)
        changed = self.link.host.submit(lambda: work(checkout.target), (checkout.there, *checkout.change_after))
        return self.store.put(checkout, changed)

    def record(self, index: int) -> torch.Tensor:
        checkout, found = self.store.fetch(index), []
        done = self.link.host.submit(lambda: found.append(checkout.source.clone()), (checkout.there,))
        self.store.release(checkout, done)
        done.wait(LONG)
        if done.error is not None:
            raise done.error
        return found[0]

    def values(self) -> list[int]:
        records = [self.record(index) for index in range(len(SIZES))]
        assert [record.numel() for record in records] == SIZES
        assert all((record == record[0]).all() for record in records)
        return [int(record[0]) for record in records]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    assert made.link.close() == []
    made.disk.close()


def test_records_come_and_go_with_their_bytes(rig: Rig) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = [torch.full((size,), index, dtype=torch.uint8) for index, size in enumerate(SIZES)]
    for _ in range(5):
        for index in torch.randperm(len(SIZES), generator=generator).tolist():
            added = torch.randint(256, (SIZES[index],), dtype=torch.uint8, generator=generator)
            rig.change(index, add(added))
            expected[index] += added
    for index, record in enumerate(expected):
        assert torch.equal(rig.record(index), record)
    disk = [-(-size // BLOCK) * BLOCK for size, tier in zip(SIZES, TIERS, strict=True) if tier == "disk"]
    # Each change reads and writes a record once: the first of all, five rounds, and a look.
    assert (rig.disk.num_written, rig.disk.num_read) == (6 * sum(disk), 7 * sum(disk))
    assert rig.store.waits_for_save == 0


def test_a_record_may_be_put_to_another_place(rig: Rig) -> None:
    """As a shadow that becomes the state: host to host, and disk to disk."""
    first = rig.store.fetch(1, to=3)
    copied = rig.link.host.submit(lambda: first.target.add_(70), (first.there,))
    rig.store.put(first, copied)
    assert rig.values() == [0, 1, 2, 71, 4]


def test_two_records_change_places_without_a_copy(rig: Rig) -> None:
    written = rig.disk.num_written
    rig.change(3, fill(9))  # on its way when it moves
    rig.store.swap(1, 3)
    assert rig.values() == [0, 9, 2, 1, 4]
    rig.change(1, fill(8))
    assert rig.values() == [0, 8, 2, 1, 4]
    rig.store.swap(1, 3)
    assert rig.values() == [0, 1, 2, 8, 4]
    assert rig.disk.num_written - written == 2 * SIZES[1]  # the changes


def test_a_change_waits_until_a_save_has_read_the_record(rig: Rig) -> None:
    hold = rig.store.snapshot(range(len(SIZES)), rig.buffer)
    changes = [rig.change(index, add(100)) for index in (0, 1, 4)]
    assert rig.store.waits_for_save == 3
    assert not any(change.is_issued for change in changes)
    found: list[int] = []

    def save() -> None:
        for index in range(len(SIZES)):
            record = hold.read(index)
            assert record.numel() == SIZES[index] and (record == record[0]).all()
            found.append(int(record[0]))
            hold.release(index)

    saver = threading.Thread(target=save)
    saver.start()
    saver.join(LONG)
    assert found == [0, 1, 2, 3, 4]
    hold.close()
    hold.close()
    assert rig.values() == [100, 101, 2, 3, 104]
    rig.store.snapshot(range(len(SIZES)), rig.buffer).close()  # the next save


def test_a_hold_that_is_closed_lets_all_go(rig: Rig) -> None:
    hold = rig.store.snapshot([0, 1], rig.buffer)
    changes = [rig.change(index, add(50)) for index in (0, 1)]
    rig.store.swap(1, 3)
    hold.close()
    for change in changes:
        change.wait(LONG)
        assert change.error is None
    assert rig.values() == [50, 3, 2, 51, 4]


def test_a_slot_is_not_read_into_before_its_last_user_is_done(rig: Rig) -> None:
    """More loans than slots, the first of them slow."""
    may_go_on = threading.Event()
    slow = rig.store.fetch(1)
    found: list[int] = []

    def look() -> None:
        assert may_go_on.wait(LONG)
        found.append(int(slow.source[0]))

    done = rig.link.host.submit(look, (slow.there,))
    rig.store.release(slow, done)
    second, third = rig.store.fetch(2), rig.store.fetch(3)
    second.there.wait(LONG)
    assert third.source.data_ptr() == slow.source.data_ptr() and not third.there.is_issued
    rig.store.release(second, second.there)
    rig.store.release(third, third.there)
    may_go_on.set()
    third.there.wait(LONG)
    assert found == [1] and int(third.source[0]) == 3


@pytest.mark.parametrize("function", ["pwrite", "preadv"])
def test_a_disk_that_fails_is_heard_of(rig: Rig, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.values()  # all is written

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, function, fail)
    on_host, on_disk = rig.change(0, add(1)), rig.change(1, add(1))
    for done in (on_host, on_disk):
        done.wait(LONG)
    assert on_host.error is None
    assert isinstance(on_disk.error, OSError) and str(on_disk.error).startswith(f"memory.disk_dir ({rig.disk.folder})")
    with pytest.raises(OSError, match="memory.disk_dir"):
        rig.store.snapshot([1], rig.buffer).read(0)


def test_who_had_a_slot_and_is_cancelled_takes_nobody_along(rig: Rig) -> None:
    """Nor is what it would have read or written counted."""
    store, gate = rig.store, Completion()
    before, waiting = (store.bytes_read, store.bytes_written), list[Completion]()
    for index in (1, 2):  # of two slots
        checkout = store.fetch(index, after=(gate,))
        changed = rig.link.host.submit(lambda: None, (checkout.there, *checkout.change_after))
        store.put(checkout, changed)
        waiting.append(checkout.there)
    next_one = store.overwrite(3)
    filled = rig.link.host.submit(lambda: fill(9)(next_one.target), next_one.change_after, free=next_one.free)
    store.put(next_one, filled)
    assert [each.cancel() for each in waiting] == [True, True]
    gate.finish()
    assert (rig.record(3) == 9).all()
    written = next_one.target.numel()
    assert (store.bytes_read, store.bytes_written) == (before[0] + written, before[1] + written)
