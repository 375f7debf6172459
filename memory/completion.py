"""Work that goes on beside the training, and when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_USERS = 16  # of a piece of memory that are remembered before those that are over are forgotten
TIMEOUT = 600.0  # seconds that may pass until a piece of work is done


class Cancelled(Exception):
    """Work that was left out because nobody wants it any more."""


class Completion:
    """A piece of work that will be over. `error` is what it raised, or what it waited for did."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._issued = threading.Event()
        self._event: Any = None  # of CUDA, where a stream does the work
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._begun = threading.Lock()  # whoever has it does the work, or cancels it

    @classmethod
    def already(cls) -> Completion:
        """Nothing to wait for."""
        done = cls()
        done.finish()
        return done

    @classmethod
    def so_far(cls, device: torch.device) -> Completion:
        """All that this thread's current stream has been given."""
        done = cls()
        done.finish(event=record_event(torch.cuda.current_stream(device)) if device.type == "cuda" else None)
        return done

    def finish(self, error: BaseException | None = None, event: Any = None) -> None:
        """The work is over, or failed; on a stream it is issued, and over at the event."""
        self.error, self._event = error, event
        with self._lock:
            self._issued.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def begin(self) -> bool:
        """Whether the work is still to be done; from now on it cannot be cancelled."""
        return self._begun.acquire(blocking=False)

    def cancel(self) -> bool:
        """Leave the work out, and what comes after it, unless it has begun; whether it was left out."""
        if not self.begin():
            return False
        self.finish(Cancelled())
        return True

    def when_issued(self, call: Callable[[], None]) -> None:
        """Have it called once nothing is left to the host, by whoever finishes the work; now, if nothing is."""
        with self._lock:
            if not self._issued.is_set():
                self._then.append(call)
                return
        call()

    @property
    def is_issued(self) -> bool:
        """Whether nothing is left to the host; a stream may still be at it."""
        return self._issued.is_set()

    def wait(self, timeout: float = TIMEOUT) -> None:
        """The host waits until it is over. Raises TimeoutError."""
        self._wait_issued(timeout)
        if (event := self._event) is not None:
            event.synchronize()
            self._event = None  # nobody need wait again

    def order(self, timeout: float = TIMEOUT) -> None:
        """What this thread gives its current stream from now on comes after it. Raises TimeoutError."""
        self._wait_issued(timeout)
        if (event := self._event) is not None:
            torch.cuda.current_stream().wait_event(event)

    def _wait_issued(self, timeout: float) -> None:
        if not self._issued.wait(timeout):
            raise TimeoutError(f"a copy or an update beside the training was not done within {timeout:g} s")


class Users:
    """Who has been given a piece of memory, one after the other: the next one comes after them, whatever came of
    that."""

    def __init__(self, *dones: Completion) -> None:
        self._given: list[tuple[Completion, int]] = [(done, 0) for done in dones]
        self.last = 0.0  # time at which it was given away last

    def add(self, done: Completion, size: int = 0) -> None:
        """It has been given to work that is over with `done`."""
        self._given.append((done, size))
        if len(self._given) > MOST_USERS:
            self.all()
        self.last = time.perf_counter()

    def all(self) -> list[Completion]:
        """Whom the next one must wait for."""
        self._given = [item for item in self._given if not isinstance(item[0].error, Cancelled)]
        while len(self._given) > 1 and self._given[0][0].is_issued and self._given[1][0].is_issued:
            del self._given[0]  # on a stream the later one comes after it
        return [done for done, _ in self._given]

    @property
    def waiting(self) -> int:
        """Sizes of all that is not over."""
        return sum(size for done, size in self._given if not done.is_issued)


def soonest_free(users: Sequence[Users]) -> int:
    """Which of several pieces of memory will be free first, as far as can be told."""
    return min(range(len(users)), key=lambda index: (users[index].waiting, users[index].last))


def when_all_issued(dones: Sequence[Completion], call: Callable[[], None]) -> None:
    """Have it called once nothing of these is left to the host."""
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
    """An event on a stream; a thread that waits for it sleeps, and leaves the processor to others."""
    return stream.record_event(torch.cuda.Event(blocking=True))
