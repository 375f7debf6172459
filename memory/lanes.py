"""Work that goes on beside the training: lanes, each a thread that does one thing after the other, and what is over.

A lane of the device is a stream too: its thread issues the work, and waits for the host's part of what comes before
alone. A lane of the host does its work itself. On a CPU every lane is of the host, and a device's work is done by a
thread of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TIMEOUT = 600.0  # seconds that a lane may take for what comes before a piece of work
CLOSE_TIMEOUT = 10.0  # seconds that the end of a run waits for a lane's thread


class CalledOff(Exception):
    """Work that was left out because nobody wants it any more."""


class Done:
    """A piece of work that will be over. `error` is what it raised, or what it waited for did."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._issued = threading.Event()
        self._event: Any = None  # of CUDA, where a stream does the work
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._begun = threading.Lock()  # whoever has it does the work, or calls it off

    @classmethod
    def already(cls) -> Done:
        """Nothing to wait for."""
        done = cls()
        done.finish()
        return done

    @classmethod
    def so_far(cls, device: torch.device) -> Done:
        """All that this thread's current stream has been given."""
        done = cls()
        done.finish(event=_record(torch.cuda.current_stream(device)) if device.type == "cuda" else None)
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
        """Whether the work is still to be done; from now on it cannot be called off."""
        return self._begun.acquire(blocking=False)

    def call_off(self) -> bool:
        """Leave the work out, and what comes after it, unless it has begun; whether it was left out."""
        if not self.begin():
            return False
        self.finish(CalledOff())
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

    def __init__(self, *dones: Done) -> None:
        self._given: list[tuple[Done, int]] = [(done, 0) for done in dones]
        self.last = 0.0  # time at which it was given away last

    def add(self, done: Done, size: int = 0) -> None:
        """It has been given to work that is over with `done`."""
        self._given.append((done, size))
        self.last = time.perf_counter()

    def all(self) -> list[Done]:
        """Whom the next one must wait for."""
        self._given = [item for item in self._given if not isinstance(item[0].error, CalledOff)]
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


@dataclass(order=True)
class _Item:
    number: int
    work: Callable[[], object] = field(compare=False)
    after: Sequence[Done] = field(compare=False)
    free: Sequence[Done] = field(compare=False)
    num_bytes: int = field(compare=False)
    done: Done = field(compare=False)


def _pass_on(before: Done, done: Done) -> None:
    """What comes after work that is called off is so at once, whoever else it waits for."""
    if isinstance(before.error, CalledOff):
        done.call_off()


def _when_all_issued(dones: Sequence[Done], call: Callable[[], None]) -> None:
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


def _record(stream: Any) -> Any:
    """An event on a stream; a thread that waits for it sleeps, and leaves the processor to others."""
    return stream.record_event(torch.cuda.Event(blocking=True))


class Lane:
    """A thread, and on a GPU a stream, that does one thing after the other: of what can be done, what it was given
    first. Its thread starts with the first."""

    def __init__(self, name: str, device: torch.device, on_device: bool = False, timeout: float = TIMEOUT):
        """on_device: the work is the device's; on a CPU it is the thread's all the same."""
        self.name = name
        self.num_bytes = 0  # of all work so far
        self.busy_seconds = 0.0  # on the host, without what it waited for
        # Bytes per second that it is held to, for measurements; None: as fast as it goes.
        self.rate: float | None = None
        self._device, self._timeout = device, timeout
        self._on_stream = on_device and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_stream else None
        self._ready: queue.PriorityQueue[_Item] = queue.PriorityQueue()
        self._count = 0  # of what it was given
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def submit(
        self, work: Callable[[], object], after: Sequence[Done] = (), num_bytes: int = 0, free: Sequence[Done] = ()
    ) -> Done:
        """Do `work` once all of `after` and `free` is over; it must not allocate memory of the device, nor submit and
        wait.

        Where something of `after` failed it is left out, and fails alike. `free`: who had the work's memory before it,
        whatever came of that. One thread submits.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self.name} lane", daemon=True)
            self._thread.start()
        self._count += 1
        item = _Item(self._count, work, after, free, num_bytes, Done())
        for before in after:
            before.when_issued(lambda before=before: _pass_on(before, item.done))  # type: ignore[misc]
        given = threading.Lock()

        def give() -> None:
            if given.acquire(blocking=False):
                self._ready.put(item)

        item.done.when_issued(give)  # called off: the thread is to see that, too
        _when_all_issued([*after, *free], give)
        return item.done

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End the thread after all that it has been given is over; whether it was in time."""
        if self._thread is None:
            return True
        self._is_closing = True
        self.submit(lambda: None)  # wakes it
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        self._thread = None
        return ended

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        late = 0.0  # what a sleep took too long, the next ones are shorter
        num_over = 0
        while not (self._is_closing and num_over == self._count):
            item = self._ready.get()
            num_over += 1
            if not item.done.begin():
                continue
            try:
                self._wait(item)
                before = time.perf_counter()
                if self._stream is None:
                    item.work()
                    event = None
                else:
                    with torch.cuda.stream(self._stream):
                        item.work()
                        event = _record(self._stream)
                seconds = time.perf_counter() - before
                if self.rate is not None:
                    pause = item.num_bytes / self.rate - seconds - late
                    if pause > 0:
                        time.sleep(pause)
                    seconds = time.perf_counter() - before
                    late += seconds - item.num_bytes / self.rate
                    late = min(max(late, -0.001), 0.1)
                self.num_bytes += item.num_bytes
                self.busy_seconds += seconds
                item.done.finish(event=event)
            except BaseException as error:  # whoever waits must hear of it
                item.done.finish(error)
            del item
        if self._stream is not None:  # no memory goes before the last copy to it or from it is over
            _record(self._stream).synchronize()

    def _wait(self, item: _Item) -> None:
        """The host's part of all is over, but for what others than lanes do."""
        # The last user of the memory came after the others itself.
        last = next((done for done in reversed(item.free) if not isinstance(done.error, CalledOff)), None)
        for before in (*item.after, *(() if last is None else (last,))):
            if self._stream is None:
                before.wait(self._timeout)
            else:
                with torch.cuda.stream(self._stream):
                    before.order(self._timeout)
        for before in item.after:
            if before.error is not None:
                raise before.error


class Lanes:
    """The lanes of one rank: `up` and `down` the link to the device and from it, `update` computation of the device
    beside the training's, `host` computation of the host, `read` and `write` the disk."""

    def __init__(self, device: torch.device, timeout: float = TIMEOUT):
        self.device = device
        self.up = Lane("to device", device, on_device=True, timeout=timeout)
        self.down = Lane("from device", device, on_device=True, timeout=timeout)
        self.update = Lane("device update", device, on_device=True, timeout=timeout)
        self.host = Lane("host update", device, timeout=timeout)
        self.read = Lane("disk read", device, timeout=timeout)
        self.write = Lane("disk write", device, timeout=timeout)

    @property
    def all(self) -> tuple[Lane, ...]:
        return (self.up, self.down, self.update, self.host, self.read, self.write)

    def close(self) -> list[str]:
        """End all threads; the names of lanes that did not end in time."""
        return [lane.name for lane in self.all if not lane.close()]
