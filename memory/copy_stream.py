"""Background threads, with CUDA streams on a GPU, that run copies and computations one at a time during training.

For a job of the GPU, the thread only launches kernels. A job of the host runs in the thread itself, as all do on a CPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memory.completion import TIMEOUT, Cancelled, Completion, record_event, when_all_issued

CLOSE_TIMEOUT = 10.0  # seconds to wait for a thread at the end of a run
# Highest first: copies that forward and backward passes wait for; weights and gradients of whole layers, before and
# after their use; optimizer updates; saves, which nothing waits for.
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


class CopyStream:
    """A background thread, with one CUDA stream per priority on a GPU, that runs jobs one at a time.

    Among the jobs whose dependencies are done, the highest priority runs first, then the oldest job. On a GPU, a job
    also waits for all jobs of higher priority that were launched before it, but never for jobs of lower priority: a
    copy that waits for an optimizer update does not delay a copy that a pass needs.
    """

    def __init__(self, name: str, device: torch.device, on_device: bool = False, timeout: float = TIMEOUT):
        """Prepare a copy stream, whose thread starts with the first job.

        on_device: whether the jobs run on the device; if it is a GPU, the thread launches them on CUDA streams.
        timeout: seconds to wait for a job.
        """
        self.name = name
        self.num_bytes = 0  # of all jobs so far
        self.busy_seconds = 0.0  # of the thread, without waits
        # For measurements: the bytes per second to which copies are slowed down. None: no limit.
        self.rate: float | None = None
        self._device, self._timeout = device, timeout
        on_streams = on_device and device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in PRIORITIES] if on_streams else None
        self._events: dict[int, Any] = {}  # CUDA event of the last job launched, by priority
        self._ready: queue.PriorityQueue[_Item] = queue.PriorityQueue()
        self._count = 0  # of items submitted
        self._lock = threading.Lock()  # the thread of a save submits jobs, too
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
        """Queue `work` to run in the thread after all jobs of `after` and `free`; return its completion.

        `work` must neither allocate device memory nor wait for jobs. If a job of `after` fails, `work` does not run and
        fails with the same error. free: earlier users of the memory that `work` uses; whether they failed does not
        matter.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self.name} stream", daemon=True)
                self._thread.start()
            self._count += 1
            item = _Item(priority, self._count, work, after, free, num_bytes, Completion())

        def cancel_with(before: Completion) -> None:
            if isinstance(before.error, Cancelled):
                item.done.cancel()

        for before in after:
            before.when_issued(partial(cancel_with, before))
        queued = threading.Lock()

        def put() -> None:
            if queued.acquire(blocking=False):
                self._ready.put(item)

        item.done.when_issued(put)  # the thread counts cancelled jobs, too
        when_all_issued([*after, *free], put)
        return item.done

    def issue(
        self, work: Callable[[], object], after: Sequence[Completion] = (), num_bytes: int = 0, priority: int = PASSES
    ) -> Completion:
        """Launch `work` from the calling thread, to run after the jobs `after` and the current CUDA stream's work.

        On a CPU, `work` is done on return.
        """
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
        """End the thread once its jobs are done. Returns False if it did not end within `timeout` seconds."""
        if (thread := self._thread) is None:
            return True
        self._is_closing = True
        self.submit(lambda: None)  # wakes the thread
        thread.join(timeout)
        self._thread = thread if thread.is_alive() else None
        return self._thread is None

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        excess = 0.0  # seconds that earlier sleeps took too long, by which later sleeps are shortened
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
            except BaseException as error:  # raised where the job is waited for
                item.done.finish(error)
            del item
        for event in self._events.values():  # memory must not be freed before its last copy is done
            event.synchronize()

    def _issue(self, work: Callable[[], object], priority: int) -> Any:
        """Run `work` or, on a GPU, launch it on its priority's stream. Returns a CUDA event at its end, or None."""
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
        """Wait until the jobs that a queued job depends on are done; on a GPU, let the job's CUDA stream wait instead.

        Raises the error of a failed job.
        """
        free = [done for done in item.free if not isinstance(done.error, Cancelled)]
        if self._streams is None:
            free = free[-1:]  # the last user of the memory has waited for the earlier ones
        for before in (*item.after, *free):
            if self._streams is None:
                before.wait(self._timeout)
            else:
                with torch.cuda.stream(self._streams[item.priority]):
                    before.order(self._timeout)
        for before in item.after:
            if before.error is not None:
                raise before.error
