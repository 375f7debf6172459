"""Streams and events of the pretended device.

The default stream computes at once; only what it copies to the host without waiting comes late, when the host waits.
Another stream does nothing before the host or the default stream waits for it, be it by way of other streams. So a read
without a wait finds NaN, or what was there before; and order.py reports it. A side stream takes copies and what writes
to memory that is there; it allocates nothing. Any thread may issue work, and whoever waits for a stream does its work.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from tests.cuda.pretended import memory, order
from tests.cuda.pretended.observed import AT_WAIT, OBSERVED, call_site

DEVICE = torch.device("cuda", 0)
Uses = Sequence[tuple[torch.Tensor, bool]]  # tensors of the host inside the device's; whether they are written
AT_SYNCHRONIZE: list[Callable[[], object]] = []  # what else runs then


class Event:
    """A point on a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.moment: order.Moment = {}
        self.position, self.time = 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.stream, self.moment, self.time = stream, stream.moment(), time.perf_counter()
        self.position = self.moment[stream.number]

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if OBSERVED.leaves_out("event.synchronize"):
            return
        OBSERVED.wait("event.synchronize")
        if self.stream is not None:
            self.stream.run_to(self.position)
            order.HOST.learn(self.moment)

    def query(self) -> bool:
        if self.stream is _DEFAULT:
            self.stream.run_to(self.position)
        if self.stream is not None and not self.stream.is_done(self.position):
            return False
        order.HOST.learn(self.moment)
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


class _Work:
    """What waits on a stream for its turn: `run` gets the tensors again."""

    def __init__(self, run: Callable[..., object], tensors: Sequence[torch.Tensor], user: str) -> None:
        self._run = run
        self.uses = [memory.Use(tensor, user) for tensor in tensors]

    def run(self) -> None:
        tensors = [use.tensor() for use in self.uses]
        if all(tensor is not None for tensor in tensors):
            with no_dispatch(), torch.no_grad():  # the stream's work, not the host's
                self._run(*tensors)
        self.end()

    def end(self) -> None:
        for use in self.uses:
            use.end()


class _Wait:
    """What comes after it on a stream comes after another one's work up to `position`."""

    uses = ()

    def __init__(self, stream: Stream, position: int) -> None:
        self.run = lambda: stream.run_to(position)

    def end(self) -> None:
        pass


class _Exchange:
    """What ranks do together in its turn on a stream, in a thread of its own: what is known here is free while it waits
    for others, who may need what this rank's threads do meanwhile."""

    uses = ()

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._is_over = call, False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="exchange on a side stream", daemon=True)
            self._thread.start()
        _OVER.wait_for(lambda: self._is_over)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._call()
        except BaseException as error:  # whoever waits must hear of it
            self._error = error
        with _OVER:
            self._is_over = True
            _OVER.notify_all()

    def end(self) -> None:
        pass


class Stream(order.Agent):
    """Work that is done in its order, when somebody waits for it, or at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.device, self.cuda_stream = DEVICE, id(self)
        self._queue: deque[tuple[int, _Work | _Wait | _Exchange]] = deque()

    def put(self, item: _Work | _Wait | _Exchange, position: int) -> None:
        with order.LOCK:
            for use in item.uses:
                use.keep_if_recorded(self.number)
            self._queue.append((position, item))
            _BUSY.add(self)
            if OBSERVED.early:
                self.run_to(position)

    def run_to(self, position: int) -> None:
        with order.LOCK:
            while not self.is_done(position):
                head = self._queue[0]
                if isinstance(head[1], _Work):
                    self._queue.popleft()
                head[1].run()  # meanwhile others may do the same, but for work
                if self._queue and self._queue[0] is head:
                    self._queue.popleft()
            if not self._queue:
                _BUSY.discard(self)

    def is_done(self, position: int) -> bool:
        return not self._queue or self._queue[0][0] > position

    def left(self) -> int:
        """How much work is to be done."""
        return sum(isinstance(item, _Work) for _, item in self._queue)

    def keep(self, host: torch.Tensor) -> None:
        """The allocator waits for this stream before it gives this memory to somebody else."""
        with order.LOCK:
            memory.record(host, self.number)
            for _, item in self._queue:
                for use in item.uses:
                    if use.is_of(host):
                        use.keep()

    def clear(self) -> None:
        for _, item in self._queue:
            item.end()
        self._queue.clear()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if not OBSERVED.leaves_out("wait_event"):
            self._wait(event)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        if not OBSERVED.leaves_out("wait_stream"):
            self._wait(event)

    def _wait(self, event: Event) -> None:
        if event.stream is None:
            return
        self.learn(event.moment)
        if self is _DEFAULT:  # which computes at once
            if event.stream is not _DEFAULT:
                event.stream.run_to(event.position)
        elif event.stream is not _DEFAULT:  # what that one copies to the host, the host alone waits for
            self.put(_Wait(event.stream, event.position), self.tick())

    def synchronize(self) -> None:
        if OBSERVED.leaves_out("stream.synchronize"):
            return
        OBSERVED.wait("stream.synchronize")
        self.run_to(self.time)
        order.HOST.learn(self.moment())

    def query(self) -> bool:
        return self.record_event().query()


class _Default(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.number = order.DEFAULT.number
        self._knows = order.DEFAULT._knows


_OVER = threading.Condition(order.LOCK)  # an exchange on a side stream is over
_BUSY: set[Stream] = set()  # those with something in their queue
_DEFAULT: Stream = _Default()


def _host_waits_for_default() -> None:
    _DEFAULT.run_to(_DEFAULT.time)
    order.HOST.learn(_DEFAULT.moment())


AT_WAIT.append(_host_waits_for_default)


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
    """Run what is left of every side stream; how much work nobody had waited for."""
    with order.LOCK:
        left = sum(stream.left() for stream in _BUSY if stream is not _DEFAULT)
        while _BUSY:
            stream = next(iter(_BUSY))
            stream.run_to(stream.time)
        order.host_waited_for_all()
    return left


def forget() -> None:
    """Leave undone what is left, as a run has failed or ended."""
    with order.LOCK:
        for stream in _BUSY:
            stream.clear()
        _BUSY.clear()
        order.host_waited_for_all()


def refuse_on_side_stream(what: object) -> None:
    """Raises NotImplementedError: a side stream allocates nothing, and tells the host nothing."""
    if not is_default():
        raise NotImplementedError(
            f"{what} on a side stream, in {call_site()}: the pretended device does there what writes to memory that is "
            "there, and nothing else"
        )


def at_once(uses: Uses) -> None:
    """The default stream does something with memory of the device."""
    with order.LOCK:
        order.DEFAULT.tick()
        for tensor, writes in uses:
            order.use(order.DEFAULT, tensor, writes)


def queue(run: Callable[..., object], name: str, tensors: Sequence[torch.Tensor], uses: Uses) -> None:
    """Give the current side stream an operation on memory of the device: `run` of the tensors."""
    stream, user = current_stream(), f"{name} on a side stream, in {call_site()},"
    with order.LOCK:
        position = stream.tick()
        for tensor, writes in uses:
            order.use(stream, tensor, writes, user)
        stream.put(_Work(run, tensors, user), position)


def exchange(call: Callable[[], object]) -> None:
    """Give the current side stream what ranks do together."""
    stream = current_stream()
    with order.LOCK:
        stream.put(_Exchange(call), stream.tick())


def copy_on_stream(target: torch.Tensor, source: torch.Tensor, to_device: bool, from_device: bool, waits: bool) -> None:
    """Copy between host tensors on the current stream; `to_device`, `from_device`: which of them is memory of the
    device; `waits`: the host does."""
    stream = current_stream()
    user = None if stream is _DEFAULT else f"a copy on a side stream, in {call_site()},"
    with order.LOCK:
        position = stream.tick()
        # What is not pinned is read and written by the host, which waits.
        order.use(stream, source, False, user)
        order.use(stream, target, True, user)
        if waits:
            stream.run_to(position)
            order.HOST.learn(stream.moment())
        if waits or (stream is _DEFAULT and to_device):
            target.copy_(source)
            return
        if stream is _DEFAULT:
            source, from_device = source.clone(), False  # as it is now, whatever the stream computes next
        work = _Work(torch.Tensor.copy_, [target, source], user or f"a copy to the host, in {call_site()},")
        for use, is_device in zip(work.uses, (to_device, from_device), strict=True):
            if not is_device:  # pinned memory is not used again before a copy is over: torch records events for it
                use.keep()
        if not memory.is_used(target, besides=work.uses):  # what is queued may be about to read it
            poison(target)
        stream.put(work, position)


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
    run_all()
    for run in AT_SYNCHRONIZE:
        run()
