"""Streams and events of the pretended device.

The default stream computes at once; only what it copies to the host without waiting comes late, when the host waits.
Another stream does nothing before somebody waits for it. So a read without a wait finds NaN. Of a side stream only
copies are known: it is all that the product runs there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.cuda.pretended import memory
from tests.cuda.pretended.observed import AT_WAIT, OBSERVED, place

DEVICE = torch.device("cuda", 0)
AT_SYNCHRONIZE: list[Callable[[], object]] = []  # what else runs then


class Event:
    """A point on a stream: the first `position` of its copies."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.position, self.time = 0, 0.0
        self.clock = 0  # of the default stream

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.stream, self.position, self.time = stream, stream.queued, time.perf_counter()
        self.clock = memory.Clock.now if stream is _DEFAULT else stream.knows

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if OBSERVED.leaves_out("event.synchronize"):
            return
        OBSERVED.wait("event.synchronize")
        if self.stream is not None:
            self.stream.run_to(self.position)

    def query(self) -> bool:
        if self.stream is _DEFAULT:
            self.stream.run_to(self.position)
        return self.stream is None or self.stream.done >= self.position

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


class _Copy:
    """A copy that waits on a stream for its turn."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, to_device: bool, from_device: bool) -> None:
        user = f"a copy on a side stream, in {place()},"
        self.uses = [memory.Use(tensor, user) for tensor in (target, source)]
        for use, is_device in zip(self.uses, (to_device, from_device), strict=True):
            if not is_device:  # pinned memory is not used again before a copy is over: torch records events for it
                use.keep()

    def run(self) -> None:
        target, source = (use.tensor() for use in self.uses)
        if target is not None and source is not None:
            target.copy_(source)
        self.end()

    def end(self) -> None:
        for use in self.uses:
            use.end()


class Stream:
    """Copies that are run in their order, when somebody waits for them, or at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream = DEVICE, id(self)
        self.queued = self.done = 0
        self.knows = 0  # the default stream's operations that it has waited for
        self._copies: deque[_Copy] = deque()
        self._lock = threading.RLock()
        _STREAMS.append(self)

    def queue(self, copy: _Copy) -> None:
        self.queued += 1
        for use in copy.uses:
            use.keep_if_recorded(id(self))
            if self is not _DEFAULT and use.written > self.knows:
                OBSERVED.fault(f"{use.user} did not wait for what the default stream was doing with the memory")
        self._copies.append(copy)
        if OBSERVED.early:
            self.run_to(self.queued)

    def run_to(self, position: int) -> None:
        with self._lock:
            while self.done < position:
                self.done += 1
                self._copies.popleft().run()

    def keep(self, host: torch.Tensor) -> None:
        """The allocator waits for this stream before it gives this memory to somebody else."""
        memory.record(host, id(self))
        for copy in self._copies:
            for use in copy.uses:
                if use.is_of(host):
                    use.keep()

    def clear(self) -> None:
        for copy in self._copies:
            copy.end()
        self._copies.clear()
        self.done = self.queued

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is None or OBSERVED.leaves_out("wait_event"):
            return
        self.knows = max(self.knows, event.clock)
        if event.stream is not _DEFAULT:  # what that one copies to the host, the host alone waits for
            event.stream.run_to(event.position)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        if not OBSERVED.leaves_out("wait_stream"):
            self.wait_event(event)

    def synchronize(self) -> None:
        if OBSERVED.leaves_out("stream.synchronize"):
            return
        OBSERVED.wait("stream.synchronize")
        self.run_to(self.queued)

    def query(self) -> bool:
        if self is _DEFAULT:
            self.run_to(self.queued)
        return self.done == self.queued


_STREAMS: list[Stream] = []
_DEFAULT = Stream()
AT_WAIT.append(lambda: _DEFAULT.run_to(_DEFAULT.queued))


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams = [_DEFAULT]


_CURRENT = _Current()


def default_stream(_device: Any = None) -> Stream:
    return _DEFAULT


def current_stream(_device: Any = None) -> Stream:
    return _CURRENT.streams[-1]


def is_default() -> bool:
    """Whether the calling thread's stream is the default one."""
    return current_stream() is _DEFAULT


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """In the place of `torch.cuda.stream`."""
    _CURRENT.streams.append(stream or current_stream())
    try:
        yield
    finally:
        _CURRENT.streams.pop()


def run_all() -> int:
    """Run what is left of every side stream; how many copies nobody had waited for."""
    left = 0
    for stream in _STREAMS:
        left += 0 if stream is _DEFAULT else stream.queued - stream.done
        stream.run_to(stream.queued)
    return left


def forget() -> None:
    """Leave undone what is left, as a run has failed or ended."""
    for stream in _STREAMS:
        stream.clear()


def refuse_on_side_stream(operation: Any) -> None:
    """Raises NotImplementedError: of a side stream only copies are known."""
    if not is_default() and not operation.is_view:
        raise NotImplementedError(
            f"{operation} on a side stream, in {place()}: the pretended device knows copies alone there"
        )


def copy(target: torch.Tensor, source: torch.Tensor, to_device: bool, from_device: bool, waits: bool) -> None:
    """Copy between host tensors on the current stream; `to_device`, `from_device`: which of them is memory of the
    device; `waits`: the host does."""
    stream = current_stream()
    if waits:
        stream.run_to(stream.queued)
    if waits or (stream is _DEFAULT and to_device):
        target.copy_(source)
        if to_device:
            memory.wrote(target)
        return
    if stream is _DEFAULT:
        source = source.clone()  # as it is now, whatever the stream computes next
    queued = _Copy(target, source, to_device, from_device and stream is not _DEFAULT)
    poison(target)
    stream.queue(queued)


def poison(tensor: torch.Tensor) -> None:
    """Fill a host tensor with what nobody could take for a result."""
    tensor.fill_(_poison_of(tensor.dtype))


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether it is still as `poison` left it."""
    value = _poison_of(tensor.dtype)
    return bool((tensor.isnan() if tensor.dtype.is_floating_point else tensor == value).all())


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min // 2 or torch.iinfo(dtype).max


def record(source: torch.Tensor, stream: Stream) -> None:
    """In the place of `Tensor.record_stream`: the stream still uses this memory."""
    if not OBSERVED.leaves_out("record_stream"):
        stream.keep(source)


def synchronize(_device: Any = None) -> None:
    """In the place of `torch.cuda.synchronize`."""
    OBSERVED.wait("device synchronize")
    for stream in _STREAMS:
        stream.run_to(stream.queued)
    for run in AT_SYNCHRONIZE:
        run()
