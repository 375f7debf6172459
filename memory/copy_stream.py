"""Threads, on a GPU with streams, that copy and compute one item after the other while training continues.

Work of the device is done by the streams: the thread issues it, and waits only for the host's part of earlier work. The
thread does the host's work itself, and on a CPU the device's work, too.
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
# From first to last: work that the passes wait for; weights and gradients of whole layers, before and after their use;
# updates; work that nothing waits for.
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
    """Cancel work whose predecessor is cancelled, at once."""
    if isinstance(before.error, Cancelled):
        done.cancel()


class CopyStream:
    """A thread, and on a GPU a stream for each priority. Of the work that is ready the highest priority is done first,
    then in the order of submission. The thread starts with the first work.

    On a GPU work of a lower priority also waits for all work of a higher one that was issued before it, never the other
    way round: a copy that waits for an update delays no copy that the passes wait for.
    """

    def __init__(self, name: str, device: torch.device, on_device: bool = False, timeout: float = TIMEOUT):
        """on_device: the work is the device's; on a CPU the thread does it all the same."""
        self.name = name
        self.num_bytes = 0  # of all work so far
        self.busy_seconds = 0.0  # on the host, without waits
        # Bytes per second to which it is limited, for measurements; None: unlimited.
        self.rate: float | None = None
        self._device, self._timeout = device, timeout
        on_streams = on_device and device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in PRIORITIES] if on_streams else None
        self._events: dict[int, Any] = {}  # of the last work issued, by priority
        self._ready: queue.PriorityQueue[_Item] = queue.PriorityQueue()
        self._count = 0  # of items submitted
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
        """Do `work` once all of `after` and `free` is done; it must not allocate device memory, nor submit and wait.

        If a completion of `after` failed, the work is not done and fails with the same error. `free`: earlier users of
        the work's memory, whether they failed or not.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self.name} stream", daemon=True)
                self._thread.start()
            self._count += 1
            item = _Item(priority, self._count, work, after, free, num_bytes, Completion())
        for before in after:
            before.when_issued(lambda before=before: _pass_on(before, item.done))  # type: ignore[misc]
        queued = threading.Lock()

        def put() -> None:
            if queued.acquire(blocking=False):
                self._ready.put(item)

        item.done.when_issued(put)  # the thread must see cancelled work, too
        when_all_issued([*after, *free], put)
        return item.done

    def issue(
        self, work: Callable[[], object], after: Sequence[Completion] = (), num_bytes: int = 0, priority: int = PASSES
    ) -> Completion:
        """Do `work` after `after` and all work of the calling thread's current stream, issued by that thread: on a CPU
        it is done when this returns."""
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
            done.finish(event=self._issue(work, priority))
        self.num_bytes += num_bytes
        return done

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End the thread once all its work is done; whether it ended in time."""
        if (thread := self._thread) is None:
            return True
        self._is_closing = True
        self.submit(lambda: None)  # wakes it
        thread.join(timeout)
        self._thread = thread if thread.is_alive() else None
        return self._thread is None

    @property
    def is_running(self) -> bool:
        """Whether its thread was started and has not ended."""
        return self._thread is not None

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        excess = 0.0  # seconds that sleeps took too long; the next ones are shorter
        num_done = 0
        while not (self._is_closing and num_done == self._count):
            item = self._ready.get()
            num_done += 1
            if not item.done.begin():
                continue
            try:
                self._wait(item)
                before = time.perf_counter()
                event = self._issue(item.work, item.priority)
                seconds = time.perf_counter() - before
                if self.rate is not None:
                    pause = item.num_bytes / self.rate - seconds - excess
                    if pause > 0:
                        time.sleep(pause)
                    seconds = time.perf_counter() - before
                    excess += seconds - item.num_bytes / self.rate
                    excess = min(max(excess, -0.001), 0.1)
                self.num_bytes += item.num_bytes
                self.busy_seconds += seconds
                item.done.finish(event=event)
            except BaseException as error:  # for those who wait
                item.done.finish(error)
            del item
        for event in self._events.values():  # no memory is freed before its last copy is done
            event.synchronize()

    def _issue(self, work: Callable[[], object], priority: int) -> Any:
        """Do the work, or issue it to the priority's stream; return the stream's event."""
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
        """Wait for the item's predecessors, on a GPU by its stream. Raises the error of one."""
        free = [done for done in item.free if not isinstance(done.error, Cancelled)]
        if self._streams is None:
            free = free[-1:]  # the last user of the memory has waited for the others
        for before in (*item.after, *free):
            if self._streams is None:
                before.wait(self._timeout)
            else:
                with torch.cuda.stream(self._streams[item.priority]):
                    before.order(self._timeout)
        for before in item.after:
            if before.error is not None:
                raise before.error
