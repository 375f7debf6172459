"""Completions of work that other threads and streams do while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_USERS = 16  # of one memory that are remembered before finished ones are forgotten
TIMEOUT = 600.0  # seconds within which work must be done


class Cancelled(Exception):
    """Error of work that was cancelled because its result is no longer needed."""


class Completion:
    """The completion of a piece of work. `error`: its error, or that of work that it waited for."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._issued = threading.Event()
        self._event: Any = None  # a CUDA event, where a stream does the work
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._started = threading.Lock()  # its owner does the work, or cancels it

    @classmethod
    def already(cls) -> Completion:
        """Return a completion of no work."""
        done = cls()
        done.finish()
        return done

    @classmethod
    def so_far(cls, device: torch.device) -> Completion:
        """Return the completion of all work submitted to this thread's current stream."""
        done = cls()
        done.finish(event=record_event(torch.cuda.current_stream(device)) if device.type == "cuda" else None)
        return done

    def finish(self, error: BaseException | None = None, event: Any = None) -> None:
        """Mark the work as done or failed; on a stream as issued, and done at the event."""
        self.error, self._event = error, event
        with self._lock:
            self._issued.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def begin(self) -> bool:
        """Start the work, unless it was started or cancelled; whether it was. Started work cannot be cancelled."""
        return self._started.acquire(blocking=False)

    def cancel(self) -> bool:
        """Cancel the work, and all work that waits for it, unless it has started; whether it was cancelled."""
        if not self.begin():
            return False
        self.finish(Cancelled())
        return True

    def when_issued(self, call: Callable[[], None]) -> None:
        """Call a function once the host's part is done, in the thread that finishes it; at once, if it is done."""
        with self._lock:
            if not self._issued.is_set():
                self._then.append(call)
                return
        call()

    @property
    def is_issued(self) -> bool:
        """Whether the host's part is done; a stream may still be working."""
        return self._issued.is_set()

    def wait(self, timeout: float = TIMEOUT) -> None:
        """Have the host wait until the work is done. Raises TimeoutError."""
        self._wait_issued(timeout)
        if (event := self._event) is not None:
            event.synchronize()
            self._event = None  # no one needs to wait again

    def order(self, timeout: float = TIMEOUT) -> None:
        """Have this thread's current stream wait for the work. Raises TimeoutError."""
        self._wait_issued(timeout)
        if (event := self._event) is not None:
            torch.cuda.current_stream().wait_event(event)

    def result(self) -> None:
        """Have the host wait until the work is done, and raise the error of failed work. Raises TimeoutError."""
        self.wait()
        if self.error is not None:
            raise self.error

    def follow(self) -> None:
        """Have this thread's current stream wait for the work, and raise its error. Raises TimeoutError."""
        self.order()
        if self.error is not None:
            raise self.error

    def _wait_issued(self, timeout: float) -> None:
        if not self._issued.wait(timeout):
            raise TimeoutError(f"a copy or an update beside the training was not done within {timeout:g} s")


class Users:
    """The users of a memory, one after the other: the next one waits for them, even where they failed."""

    def __init__(self, *dones: Completion) -> None:
        self._given: list[tuple[Completion, int]] = [(done, 0) for done in dones]
        self.last = 0.0  # time of the last `add`

    def add(self, done: Completion, size: int = 0) -> None:
        """Add a user: work whose completion is `done`."""
        self._given.append((done, size))
        if len(self._given) > MOST_USERS:
            self.all()
        self.last = time.perf_counter()

    def all(self) -> list[Completion]:
        """Return the completions that the next user must wait for."""
        self._given = [item for item in self._given if not isinstance(item[0].error, Cancelled)]
        while len(self._given) > 1 and self._given[0][0].is_issued and self._given[1][0].is_issued:
            del self._given[0]  # on a stream the later one runs after it
        return [done for done, _ in self._given]

    @property
    def waiting(self) -> int:
        """Sum of the sizes of users that are not done."""
        return sum(size for done, size in self._given if not done.is_issued)


def soonest_free(users: Sequence[Users]) -> int:
    """Return the index of the memory that is expected to be free first."""
    return min(range(len(users)), key=lambda index: (users[index].waiting, users[index].last))


def when_all_issued(dones: Sequence[Completion], call: Callable[[], None]) -> None:
    """Call a function once the host's part of all completions is done."""
    left, lock = len(dones) + 1, threading.Lock()

    def one() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            call()

    for done in dones:
        done.when_issued(one)
    one()


def record_event(stream: Any) -> Any:
    """Record an event on a stream; threads that wait for it sleep."""
    return stream.record_event(torch.cuda.Event(blocking=True))
