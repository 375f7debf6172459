"""The order of a lane's work, and work that is called off."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from memory.lanes import CalledOff, Done, Lanes, Users, soonest_free
from tests.waits import LONG


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(torch.device("cpu"), timeout=LONG)
    yield made
    assert made.close() == []


def test_what_can_be_done_is_done_first(lanes: Lanes) -> None:
    found: list[str] = []
    before = Done()
    waiting = lanes.up.submit(lambda: found.append("waits"), (before,))
    lanes.up.submit(lambda: found.append("can be done")).wait(LONG)
    before.finish()
    waiting.wait(LONG)
    assert found == ["can be done", "waits"]


def test_of_two_the_first_is_first(lanes: Lanes) -> None:
    found: list[int] = []
    go_on = threading.Event()
    lanes.up.submit(lambda: go_on.wait(LONG))
    dones = [lanes.up.submit(lambda index=index: found.append(index)) for index in range(5)]  # type: ignore[misc]
    go_on.set()
    dones[-1].wait(LONG)
    assert found == list(range(5))


def test_work_that_is_called_off_takes_what_comes_after_with_it(lanes: Lanes) -> None:
    found: list[str] = []
    before = Done()
    first = lanes.up.submit(lambda: found.append("first"), (before,))
    second = lanes.update.submit(lambda: found.append("second"), (first, Done()))
    assert first.call_off() and not first.call_off()
    second.wait(LONG)
    assert isinstance(second.error, CalledOff)
    before.finish()
    lanes.up.submit(lambda: None).wait(LONG)
    assert found == []


def test_work_that_has_begun_cannot_be_called_off(lanes: Lanes) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(LONG)

    done = lanes.up.submit(work)
    assert begun.wait(LONG) and not done.call_off()
    go_on.set()
    done.wait(LONG)
    assert done.error is None


def test_memory_is_not_free_because_a_later_user_was_called_off(lanes: Lanes) -> None:
    """Its place in the row was after one that is still at it."""
    users, using = Users(), Done()
    users.add(using)
    never = lanes.up.submit(lambda: None, free=users.all())
    users.add(never)
    assert never.call_off()
    assert users.all() == [using]
    found: list[bool] = []
    third = lanes.up.submit(lambda: found.append(using.is_issued), free=users.all())
    using.finish()
    third.wait(LONG)
    assert found == [True]


def test_memory_is_free_whatever_came_of_its_user(lanes: Lanes) -> None:
    failed = Done()
    failed.finish(OSError("a fault"))
    done = lanes.up.submit(lambda: None, free=(failed,))
    done.wait(LONG)
    assert done.error is None
    after = lanes.up.submit(lambda: None, (failed,))
    after.wait(LONG)
    assert after.error is failed.error


def test_the_memory_that_fewest_wait_for_is_next() -> None:
    both = [Users(), Users()]
    both[0].add(Done(), 10)
    assert soonest_free(both) == 1
    both[1].add(Done(), 10)
    assert soonest_free(both) == 0
    both[0].add(Done(), 1)
    assert soonest_free(both) == 1
