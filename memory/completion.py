"""Completion handles of jobs that other threads and CUDA streams run while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_USERS = 16  # of one buffer that are listed before finished ones are removed
TIMEOUT = 600.0  # seconds that a job may take


class Cancelled(Exception):
    """The error of a job that was cancelled because its result is no longer needed."""


class Completion:
    """A handle to wait for a background job. `error`: the error that the job, or a job it depends on, has raised."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._issued = threading.Event()
        self._event: Any = None  # a CUDA event at the end of the job, if it runs on a stream
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._started = threading.Lock()  # acquired once: by the thread that runs the job, or by `cancel`

    @classmethod
    def already(cls) -> Completion:
        """Return a handle that is complete from the start."""
        done = cls()
        done.finish()
        return done

    @classmethod
    def so_far(cls, device: torch.device) -> Completion:
        """Return a handle that is complete once all work launched so far on the current CUDA stream is done."""
        done = cls()
        done.finish(event=record_event(torch.cuda.current_stream(device)) if device.type == "cuda" else None)
        return done

    def finish(self, error: BaseException | None = None, event: Any = None) -> None:
        """Mark the job as done or failed. With a CUDA event, it counts as done when its stream reaches the event."""
        self.error, self._event = error, event
        with self._lock:
            self._issued.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def begin(self) -> bool:
        """Claim the job for execution, after which it cannot be cancelled. Returns False if it was started or
        cancelled."""
        return self._started.acquire(blocking=False)

    def cancel(self) -> bool:
        """Cancel the job and all jobs that depend on it, unless it has started. Returns whether it was cancelled."""
        if not self.begin():
            return False
        self.finish(Cancelled())
        return True

    def when_issued(self, call: Callable[[], None]) -> None:
        """Call a function once the job is done or, on a GPU, launched; the thread that finishes the job calls it."""
        with self._lock:
            if not self._issued.is_set():
                self._then.append(call)
                return
        call()

    @property
    def is_issued(self) -> bool:
        """Whether the job has run, has failed or, on a GPU, has been launched on its stream."""
        return self._issued.is_set()

    def wait(self, timeout: float = TIMEOUT) -> None:
        """Block the host until the job is done or has failed. Raises TimeoutError after `timeout` seconds."""
        self._wait_issued(timeout)
        if (event := self._event) is not None:
            event.synchronize()
            self._event = None  # nobody has to wait again

    def order(self, timeout: float = TIMEOUT) -> None:
        """Make the current CUDA stream wait for the job; the host waits only for its launch. Raises TimeoutError."""
        self._wait_issued(timeout)
        if (event := self._event) is not None:
            torch.cuda.current_stream().wait_event(event)

    def result(self) -> None:
        """Block the host until the job is done, and raise the error of a failed job. Raises TimeoutError."""
        self.wait()
        if self.error is not None:
            raise self.error

    def follow(self) -> None:
        """Make the current CUDA stream wait for the job, and raise its error. Raises TimeoutError."""
        self.order()
        if self.error is not None:
            raise self.error

    def _wait_issued(self, timeout: float) -> None:
        if not self._issued.wait(timeout):
            raise TimeoutError(
                f"A background copy or optimizer update did not finish within {timeout:g} s. Check the disk and the "
                "GPU, or raise parallel.timeout_seconds if they are only slow."
            )


class Users:
    """The jobs that use a shared buffer, oldest first. The next user must wait for all of them, even if some failed."""

    def __init__(self, *dones: Completion) -> None:
        self._given: list[tuple[Completion, int]] = [(done, 0) for done in dones]
        self.last = 0.0  # time of the last `add`

    def add(self, done: Completion, size: int = 0) -> None:
        """Add a job to those that use the buffer. done: its completion handle.

        size: its amount of work, such as bytes, which counts as waiting until the job is launched.
        """
        self._given.append((done, size))
        if len(self._given) > MOST_USERS:
            self.all()
        self.last = time.perf_counter()

    def all(self) -> list[Completion]:
        """Return the completion handles that the buffer's next user must wait for."""
        self._given = [item for item in self._given if not isinstance(item[0].error, Cancelled)]
        while len(self._given) > 1 and self._given[0][0].is_issued and self._given[1][0].is_issued:
            del self._given[0]  # the later job runs after this one on its stream
        return [done for done, _ in self._given]

    @property
    def waiting(self) -> int:
        """Amount of work, such as bytes, of the buffer's jobs that have neither run nor been launched yet."""
        return sum(size for done, size in self._given if not done.is_issued)


def soonest_free(users: Sequence[Users]) -> int:
    """Return the index of the buffer that is expected to be free first. users: the jobs that use each buffer."""
    return min(range(len(users)), key=lambda index: (users[index].waiting, users[index].last))


def when_all_issued(dones: Sequence[Completion], call: Callable[[], None]) -> None:
    """Call a function once all jobs are done or, on a GPU, launched."""
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
    """Record a CUDA event on a stream and return it. A thread that waits for the event sleeps instead of spinning."""
    return stream.record_event(torch.cuda.Event(blocking=True))
