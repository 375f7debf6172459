"""The order of a copy stream's work, and work that is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from memory.budgets import HOST
from memory.completion import Cancelled, Completion, Users, soonest_free
from memory.copy_stream import PASSES, SAVES, UPDATES
from memory.host_link import HostLink
from tests.waits import LONG


@pytest.fixture
def link() -> Iterator[HostLink]:
    made = HostLink(torch.device("cpu"), timeout=LONG)
    yield made
    assert made.close() == []


def test_what_can_be_done_is_done_first(link: HostLink) -> None:
    found: list[str] = []
    before = Completion()
    waiting = link.up.submit(lambda: found.append("waits"), (before,))
    link.up.submit(lambda: found.append("can be done")).wait(LONG)
    before.finish()
    waiting.wait(LONG)
    assert found == ["can be done", "waits"]


def test_of_two_the_first_is_first(link: HostLink) -> None:
    found: list[int] = []
    go_on = threading.Event()
    link.up.submit(lambda: go_on.wait(LONG))
    dones = [link.up.submit(lambda index=index: found.append(index)) for index in range(5)]  # type: ignore[misc]
    go_on.set()
    dones[-1].wait(LONG)
    assert found == list(range(5))


def test_work_that_is_called_off_takes_what_comes_after_with_it(link: HostLink) -> None:
    found: list[str] = []
    before = Completion()
    first = link.up.submit(lambda: found.append("first"), (before,))
    second = link.update.submit(lambda: found.append("second"), (first, Completion()))
    assert first.cancel() and not first.cancel()
    second.wait(LONG)
    assert isinstance(second.error, Cancelled)
    before.finish()
    link.up.submit(lambda: None).wait(LONG)
    assert found == []


def test_started_work_cannot_be_cancelled(link: HostLink) -> None:
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(LONG)

    done = link.up.submit(work)
    assert started.wait(LONG) and not done.cancel()
    go_on.set()
    done.wait(LONG)
    assert done.error is None


def test_memory_is_not_free_because_a_later_user_was_called_off(link: HostLink) -> None:
    """Its place in the row was after one that is still at it."""
    users, using = Users(), Completion()
    users.add(using)
    never = link.up.submit(lambda: None, free=users.all())
    users.add(never)
    assert never.cancel()
    assert users.all() == [using]
    found: list[bool] = []
    third = link.up.submit(lambda: found.append(using.is_issued), free=users.all())
    using.finish()
    third.wait(LONG)
    assert found == [True]


def test_memory_is_free_whatever_came_of_its_user(link: HostLink) -> None:
    failed = Completion()
    failed.finish(OSError("a fault"))
    done = link.up.submit(lambda: None, free=(failed,))
    done.wait(LONG)
    assert done.error is None
    after = link.up.submit(lambda: None, (failed,))
    after.wait(LONG)
    assert after.error is failed.error


def test_the_memory_that_fewest_wait_for_is_next() -> None:
    both = [Users(), Users()]
    both[0].add(Completion(), 10)
    assert soonest_free(both) == 1
    both[1].add(Completion(), 10)
    assert soonest_free(both) == 0
    both[0].add(Completion(), 1)
    assert soonest_free(both) == 1


def test_of_what_can_be_done_the_highest_priority_is_first(link: HostLink) -> None:
    found: list[int] = []
    go_on = threading.Event()
    link.up.submit(lambda: go_on.wait(LONG))
    dones = [
        link.up.submit(lambda priority=priority: found.append(priority), priority=priority)  # type: ignore[misc]
        for priority in (SAVES, UPDATES, PASSES, UPDATES)
    ]
    go_on.set()
    for done in dones:
        done.wait(LONG)
    assert found == [PASSES, UPDATES, UPDATES, SAVES]


def test_what_is_issued_on_a_cpu_is_done_at_once_and_after_what_it_waits_for(link: HostLink) -> None:
    found: list[str] = []
    before = link.down.submit(lambda: found.append("before"))
    assert link.down.issue(lambda: found.append("issued"), (before,)).is_issued
    assert found == ["before", "issued"]


def test_memory_is_counted_until_nobody_refers_to_it_and_refused_beyond_the_budget(
    link: HostLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HOST, "limit", HOST.total + 100)
    before = HOST.total
    some = link.take(70, "a test's bytes")
    assert some is not None and some.numel() == 70 and HOST.held["a test's bytes"] == 70
    assert link.take(31, "a test's bytes") is None and link.num_allocated == 1
    del some
    assert HOST.total == before
    assert link.take(100, "a test's bytes") is not None
