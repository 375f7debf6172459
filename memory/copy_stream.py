"""A thread, on a GPU with streams, that does one thing after the other beside the training.

On the device its streams do the work: the thread issues it, and waits for the host's part of what comes before alone.
Of the host the thread does the work itself, and on a CPU that of the device too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memory.completion import TIMEOUT, Cancelled, Completion, record_event, when_all_issued

CLOSE_TIMEOUT = 10.0  # seconds that the end of a run waits for a thread
# Whose work goes first: what the passes wait for; weights and gradients of whole layers, ahead of their use and behind
# it; updates; what nobody waits for.
PRIORITIES = PASSES, LAYERS, UPDATES, SAVES = range(4)


@dataclass(order=True)
class _Item:
    priority: int
    number: int
    work: Callable[[], object] = field(compare=False)
    after: Sequence[Completion] = field(compare=False)
    free: Sequence[Completion] = field(compare=False)
    num_bytes: int = field(compare=False)
    done: Completion = field(compare=False)


def _pass_on(before: Completion, done: Completion) -> None:
    """What comes after work that is cancelled is so at once, whoever else it waits for."""
    if isinstance(before.error, Cancelled):
        done.cancel()


class CopyStream:
    """A thread, and on a GPU a stream for each priority. Of what can be done, the highest priority goes first, then
    what was given first. The thread starts with the first work.

    On a GPU work of a lower priority also comes after all of a higher one that was issued before it, and never the
    other way round: a copy that waits for an update holds up no copy that the passes wait for.
    """

    def __init__(self, name: str, device: torch.device, on_device: bool = False, timeout: float = TIMEOUT):
        """on_device: the work is the device's; on a CPU it is the thread's all the same."""
        self.name = name
        self.num_bytes = 0  # of all work so far
        self.busy_seconds = 0.0  # on the host, without what it waited for
        # Bytes per second that it is held to, for measurements; None: as fast as it goes.
        self.rate: float | None = None
        self._device, self._timeout = device, timeout
        on_streams = on_device and device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in PRIORITIES] if on_streams else None
        self._events: dict[int, Any] = {}  # by priority: of the last work that was issued
        self._ready: queue.PriorityQueue[_Item] = queue.PriorityQueue()
        self._count = 0  # of what the thread was given
        self._lock = threading.Lock()  # a save's thread submits too
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def submit(
        self,
        work: Callable[[], object],
        after: Sequence[Completion] = (),
        num_bytes: int = 0,
        free: Sequence[Completion] = (),
        priority: int = UPDATES,
    ) -> Completion:
        """Do `work` once all of `after` and `free` is over; it must not allocate memory of the device, nor submit and
        wait.

        Where something of `after` failed it is left out, and fails alike. `free`: who had the work's memory before it,
        whatever came of that.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self.name} stream", daemon=True)
                self._thread.start()
            self._count += 1
            item = _Item(priority, self._count, work, after, free, num_bytes, Completion())
        for before in after:
            before.when_issued(lambda before=before: _pass_on(before, item.done))  # type: ignore[misc]
        given = threading.Lock()

        def give() -> None:
            if given.acquire(blocking=False):
                self._ready.put(item)

        item.done.when_issued(give)  # cancelled: the thread is to see that, too
        when_all_issued([*after, *free], give)
        return item.done

    def issue(
        self, work: Callable[[], object], after: Sequence[Completion] = (), num_bytes: int = 0, priority: int = PASSES
    ) -> Completion:
        """Do `work` after `after` and all that the calling thread's current stream was given, issued by that thread:
        on a CPU it is done when this returns."""
        done = Completion()
        if self._streams is None:
            for before in after:
                before.wait(self._timeout)
            work()
            done.finish()
        else:
            stream = self._streams[priority]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for before in after:
                    before.order(self._timeout)
            done.finish(event=self._give(work, priority))
        self.num_bytes += num_bytes
        return done

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End the thread after all that it has been given is over; whether it was in time."""
        if (thread := self._thread) is None:
            return True
        self._is_closing = True
        self.submit(lambda: None)  # wakes it
        thread.join(timeout)
        self._thread = thread if thread.is_alive() else None
        return self._thread is None

    @property
    def is_running(self) -> bool:
        """Whether its thread has begun, and has not been seen to end."""
        return self._thread is not None

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
                event = self._give(item.work, item.priority)
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
        for event in self._events.values():  # no memory goes before the last copy to it or from it is over
            event.synchronize()

    def _give(self, work: Callable[[], object], priority: int) -> Any:
        """Do the work, or have the priority's stream do it; the stream's event."""
        if self._streams is None:
            work()
            return None
        stream = self._streams[priority]
        for higher in range(priority):
            if (event := self._events.get(higher)) is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
        event = self._events[priority] = record_event(stream)
        return event

    def _wait(self, item: _Item) -> None:
        """The host's part of all is over, but for what others than these threads do."""
        free = [done for done in item.free if not isinstance(done.error, Cancelled)]
        if self._streams is None:
            free = free[-1:]  # the last user of the memory came after the others itself
        for before in (*item.after, *free):
            if self._streams is None:
                before.wait(self._timeout)
            else:
                with torch.cuda.stream(self._streams[item.priority]):
                    before.order(self._timeout)
        for before in item.after:
            if before.error is not None:
                raise before.error
