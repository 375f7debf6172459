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
from typing import Any

import torch

TIMEOUT = 600.0  # seconds that a lane may take for what comes before a piece of work
CLOSE_TIMEOUT = 10.0  # seconds that the end of a run waits for a lane's thread


class Done:
    """A piece of work that will be over. `error` is what it raised, or what it waited for did."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._issued = threading.Event()
        self._event: Any = None  # of CUDA, where a stream does the work

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
        self._issued.set()

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


def _record(stream: Any) -> Any:
    """An event on a stream; a thread that waits for it sleeps, and leaves the processor to others."""
    return stream.record_event(torch.cuda.Event(blocking=True))


class Lane:
    """A thread, and on a GPU a stream, that does what it is given in the order of the calls. Its thread starts with the
    first."""

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
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Sequence[Done], Done, int] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], object], after: Sequence[Done] = (), num_bytes: int = 0) -> Done:
        """Do `work` once all of `after` is over; it must not allocate memory of the device, nor submit and wait.

        Where something before it failed it is left out, and fails alike.
        """
        done = Done()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self.name} lane", daemon=True)
            self._thread.start()
        self._queue.put((work, after, done, num_bytes))
        return done

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End the thread after all that it has been given is over; whether it was in time."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        self._thread = None
        return ended

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        late = 0.0  # what a sleep took too long, the next ones are shorter
        while (item := self._queue.get()) is not None:
            work, after, done, num_bytes = item
            try:
                self._wait(after)
                before = time.perf_counter()
                if self._stream is None:
                    work()
                    event = None
                else:
                    with torch.cuda.stream(self._stream):
                        work()
                        event = _record(self._stream)
                seconds = time.perf_counter() - before
                if self.rate is not None:
                    pause = num_bytes / self.rate - seconds - late
                    if pause > 0:
                        time.sleep(pause)
                    seconds = time.perf_counter() - before
                    late += seconds - num_bytes / self.rate
                    late = min(max(late, -0.001), 0.1)
                self.num_bytes += num_bytes
                self.busy_seconds += seconds
                done.finish(event=event)
            except BaseException as error:  # whoever waits must hear of it
                done.finish(error)
            del item, work, after, done
        if self._stream is not None:  # no memory goes before the last copy to it or from it is over
            _record(self._stream).synchronize()

    def _wait(self, after: Sequence[Done]) -> None:
        for before in after:
            if self._stream is None:
                before.wait(self._timeout)
            else:
                with torch.cuda.stream(self._stream):
                    before.order(self._timeout)
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
