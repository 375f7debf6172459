"""Streams and events of the pretended device.

The default stream computes at once. Another stream does nothing before somebody waits for it. So a read without a wait
finds NaN. Of a side stream only copies are known: it is all that the product runs there.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.cuda.observed import OBSERVED, place

DEVICE = torch.device("cuda", 0)
AT_SYNCHRONIZE: list[Callable[[], object]] = []  # what else runs then


class Event:
    """A point on a stream: the first `position` of its copies."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.position, self.time = 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.stream, self.position, self.time = stream, stream.queued, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        OBSERVED.wait("event.synchronize")
        if self.stream is not None:
            self.stream.run_to(self.position)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.position

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


class Stream:
    """Copies that are run in their order, when somebody waits for them, or at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream = DEVICE, id(self)
        self.queued = self.done = 0
        self._copies: deque[Callable[[], None]] = deque()
        _STREAMS.append(self)

    def queue(self, copy: Callable[[], None]) -> None:
        self.queued += 1
        if OBSERVED.early:
            self.done += 1
            copy()
        else:
            self._copies.append(copy)

    def run_to(self, position: int) -> None:
        while self.done < position:
            self.done += 1
            self._copies.popleft()()

    def clear(self) -> None:
        self._copies.clear()
        self.done = self.queued

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is not None and not OBSERVED.leaves_out("wait_event"):
            event.stream.run_to(event.position)

    def wait_stream(self, stream: Stream) -> None:
        if not OBSERVED.leaves_out("wait_stream"):
            stream.run_to(stream.queued)

    def synchronize(self) -> None:
        OBSERVED.wait("stream.synchronize")
        self.run_to(self.queued)

    def query(self) -> bool:
        return self.done == self.queued


_STREAMS: list[Stream] = []
_DEFAULT = Stream()
_CURRENT = [_DEFAULT]
_RECORDED: set[int] = set()  # addresses of storages whose memory waits for the side streams


def default_stream(_device: Any = None) -> Stream:
    return _DEFAULT


def current_stream(_device: Any = None) -> Stream:
    return _CURRENT[-1]


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """In the place of `torch.cuda.stream`."""
    _CURRENT.append(stream or _CURRENT[-1])
    try:
        yield
    finally:
        _CURRENT.pop()


def run_all() -> int:
    """Run what is left of every stream; how many copies nobody had waited for."""
    left = 0
    for stream in _STREAMS:
        left += stream.queued - stream.done
        stream.run_to(stream.queued)
    return left


def forget() -> None:
    """Leave undone what is left, as a run has failed or ended."""
    for stream in _STREAMS:
        stream.clear()
    _RECORDED.clear()


def refuse_on_side_stream(operation: Any) -> None:
    """Raises NotImplementedError: of a side stream only copies are known."""
    if _CURRENT[-1] is not _DEFAULT and not operation.is_view:
        raise NotImplementedError(
            f"{operation} on a side stream, in {place()}: the pretended device knows copies alone there"
        )


def copy(target: torch.Tensor, source: torch.Tensor, from_device: bool, waits: bool) -> None:
    """Copy between host tensors on the current stream; `from_device`: the source is memory of the device; `waits`: the
    host does."""
    stream = _CURRENT[-1]
    if waits:
        stream.run_to(stream.queued)
    if waits or stream is _DEFAULT:
        target.copy_(source)
        return
    poison(target)
    key, where = source.untyped_storage().data_ptr(), place()

    def run() -> None:
        # The allocator gives memory of the device to the next one who asks, unless it was told of the stream that still
        # reads it.
        if OBSERVED.early or not from_device or key in _RECORDED:  # early, nobody has had the time to give it back
            target.copy_(source)
        else:
            OBSERVED.fault(f"a side stream read what was not recorded on it, copied in {where}")

    stream.queue(run)


def poison(tensor: torch.Tensor) -> None:
    """Fill a host tensor with what nobody could take for a result."""
    tensor.fill_(float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).min // 2)


def record(source: torch.Tensor) -> None:
    """In the place of `Tensor.record_stream`: side streams still read this memory."""
    if not OBSERVED.leaves_out("record_stream"):
        _RECORDED.add(source.untyped_storage().data_ptr())


def synchronize(_device: Any = None) -> None:
    """In the place of `torch.cuda.synchronize`."""
    OBSERVED.wait("device synchronize")
    for stream in _STREAMS:
        stream.run_to(stream.queued)
    for run in AT_SYNCHRONIZE:
        run()
