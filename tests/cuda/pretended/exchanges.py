"""Operations of process groups as NCCL may run them at the latest: when somebody waits.

Until then results hold NaN, and what is sent is not read. The operations of a communicator run in the order of their
issue. What is called without `async_op` runs at once, after all that the communicator was told before; on a side
stream in the stream's turn. Each is noted in a log, which logs.py compares over the ranks.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from tests.cuda.pretended import memory, order, streams
from tests.cuda.pretended.device import host_of
from tests.cuda.pretended.logs import Key, Log, Operation
from tests.cuda.pretended.observed import OBSERVED
from tests.cuda.pretended.streams import current_stream, is_default, is_poisoned, poison
from tests.waits import LONG

LIMIT = timedelta(seconds=LONG)  # that the other ranks have to do their part
MOST_ON_THEIR_WAY = 64  # messages


class _State:
    def __init__(self) -> None:
        self.queues: dict[Key, deque[Exchange]] = {}
        self.overtaken: dict[Key, Exchange] = {}  # by the mutant `order`
        self.all: list[Exchange] = []  # the Python half of what C++ still holds
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()  # messages on their way, and gloo's works
        self.not_waited_for: dict[Key, deque[Exchange]] = defaultdict(deque)  # sends that have run without a wait
        self.log: Log = {}
        self.agents: dict[Key, order.Agent] = defaultdict(order.Agent)  # a communicator has a stream of its own
        self.locks: dict[Key, Any] = defaultdict(threading.RLock)  # who holds it does its operations


class _Thread(threading.local):
    is_running = False  # what is called now is gloo's


_STATE, _THREAD = _State(), _Thread()


class Exchange(Work):  # type: ignore[misc]
    """One operation of a communicator. Like torch's it keeps its tensors until it is over, but not what `Tensor.data`
    has taken away from them."""

    def __init__(
        self,
        key: Key,
        operation: Operation,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        run: Callable[[Callable[[torch.Tensor], torch.Tensor]], None],
        is_at_once: bool = False,
        is_gather: bool = False,
    ) -> None:
        super().__init__()
        self._key, self.operation, self._run, self._is_done = key, operation, run, False
        self._outputs = [tensor for tensor in outputs if tensor.numel()]
        self._inputs = [tensor for tensor in inputs if tensor.numel()]
        self._aside: dict[int, torch.Tensor] = {}  # inputs that lie in outputs, as they were
        self._poisoned: list[torch.Tensor] = []
        user = f"{operation.name}, issued in {operation.call_site},"
        tensors = {id(tensor): tensor for tensor in (*self._outputs, *self._inputs)}
        self._uses = {key: memory.Use(host_of(tensor), user) for key, tensor in tensors.items()}
        if not is_default() and not is_at_once:
            raise NotImplementedError(f"{user} on a side stream, not waited for")
        _STATE.all.append(self)
        self._moment = self._touch()
        self._is_on_side_stream = not is_default()
        if self._is_on_side_stream:  # its tensors may be under way to where they are read
            self._enqueue()
            current_stream().learn(self._moment)
            streams.exchange(self._complete)
        elif is_at_once or OBSERVED.early:
            self._enqueue()
            self._complete()
            if is_at_once:
                current_stream().learn(self._moment)
        else:
            self._poison(is_gather)
            self._enqueue()

    def _touch(self) -> order.Moment:
        agent, user = _STATE.agents[self._key], f"{self.operation.name}, issued in {self.operation.call_site},"
        with order.LOCK:
            agent.learn(current_stream().moment())
            agent.tick()
            for tensors, are_written in ((self._inputs, False), (self._outputs, True)):
                for tensor in tensors:
                    order.use(agent, host_of(tensor), are_written, user)
                    memory.record(host_of(tensor), agent.number)  # as NCCL's does; `_uses` are those under way
            return agent.moment()

    def _enqueue(self) -> None:
        queue = _STATE.queues.setdefault(self._key, deque())
        if self._key not in _STATE.overtaken and dist.get_rank() == 1 and OBSERVED.leaves_out("order"):
            _STATE.overtaken[self._key] = self
            return
        for exchange in (self, _STATE.overtaken.pop(self._key, None)):
            if exchange is not None:
                note(self._key, exchange.operation)
                queue.append(exchange)

    def _poison(self, is_gather: bool) -> None:
        outputs = [host_of(tensor) for tensor in self._outputs]
        for tensor in self._inputs:
            if any(_overlap(host_of(tensor), output) for output in outputs):
                self._aside[id(tensor)] = host_of(tensor).clone()
        for output in outputs:
            poison(output)
        if is_gather:  # in place: a rank's own part is there all the time
            for tensor in self._inputs:
                if id(tensor) in self._aside:
                    host_of(tensor).copy_(self._aside[id(tensor)])
            return
        earlier = [host_of(tensor) for other in _STATE.queues.get(self._key, ()) for tensor in other._outputs]
        # What the communicator writes there before this one, it may.
        if not any(_overlap(one, other) for i, one in enumerate(outputs) for other in (*outputs[:i], *earlier)):
            self._poisoned = list(self._outputs)

    def wait(self, timeout: Any = None) -> bool:
        """The operations of the communicator up to this one; what the current stream is given next comes after them. A
        worker's side stream is so late as its thread is: it does them at once. What was issued on one has its
        turn there, and its stream waits."""
        if not self._is_on_side_stream and not OBSERVED.leaves_out("wait"):
            self._complete()
            current_stream().learn(self._moment)
        return True

    def is_completed(self) -> bool:
        return self._is_done

    def _complete(self) -> None:
        with _STATE.locks[self._key]:
            if _STATE.overtaken.get(self._key) is self:  # nothing has come to overtake it
                del _STATE.overtaken[self._key]
                note(self._key, self.operation)
                _STATE.queues[self._key].append(self)
            while not self._is_done:
                _STATE.queues[self._key].popleft().run()
            sent = _STATE.not_waited_for[self._key]
            for _ in range(sent.index(self) + 1 if self in sent else len(sent)):
                sent.popleft().end()

    def run(self, is_waited_for: bool = True) -> None:
        if self.operation.name != "send":  # that does not wait for other ranks
            _send_what_waits()
        self._is_done = True
        hosts = {}
        for tensor in (*self._outputs, *self._inputs):
            use = self._uses[id(tensor)]
            host = use.tensor()
            hosts[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype) if host is None else host
            if host is not None and any(tensor is each for each in self._poisoned) and not is_poisoned(host):
                OBSERVED.fault(f"{use.user} was under way when somebody wrote to its result")
        in_place = {id(tensor) for tensor in self._outputs}
        for key, values in self._aside.items():
            if key in in_place:
                hosts[key].copy_(values)
            else:
                hosts[key] = values
        _THREAD.is_running = True
        try:
            self._run(lambda tensor: hosts[id(tensor)] if id(tensor) in hosts else host_of(tensor))
        except RuntimeError as error:
            raise RuntimeError(f"{self.operation}, on rank {dist.get_rank()}, over {self._key}: {error}") from error
        finally:
            _THREAD.is_running = False
            if is_waited_for:
                self.end()
            else:  # NCCL may read until somebody has waited
                _STATE.not_waited_for[self._key].append(self)

    def end(self) -> None:
        """Nothing is held any more."""
        for use in self._uses.values():
            use.end()
        self._outputs, self._inputs, self._poisoned = [], [], []
        self._uses, self._aside, self._run = {}, {}, _nothing


def _nothing(_: Any) -> None:
    return None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return begin < other_end and other_begin < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.storage_offset()
    return begin, begin + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def is_running() -> bool:
    """Whether what is called now is the work of an exchange that runs."""
    return _THREAD.is_running


def note(key: Key, operation: Operation) -> None:
    """Into this rank's log."""
    _STATE.log.setdefault(key, []).append(operation)


def take_log() -> Log:
    """What this rank's communicators have been told since `forget`."""
    return _STATE.log


def run_all() -> int:
    """Run what is left; how many operations nobody had waited for."""
    left = 0
    for queue in _STATE.queues.values():
        while queue:
            left += 1
            queue.popleft().run()
    for sent in _STATE.not_waited_for.values():
        while sent:
            sent.popleft().end()
    while _STATE.sent:
        _STATE.sent.popleft()[0].wait(LIMIT)
    return left


def _send_what_waits() -> None:
    # Before this rank stands still until another one has done its part: that one may need a message of this rank, which
    # NCCL would have sent without anybody's wait.
    for key, queue in list(_STATE.queues.items()):
        if _STATE.locks[key].acquire(blocking=False):
            try:
                while queue and queue[0].operation.name == "send":
                    queue.popleft().run(is_waited_for=False)
            finally:
                _STATE.locks[key].release()


def send(work: Any, message: torch.Tensor) -> None:
    """A message is on its way, and nobody waits for it; gloo's `work` may still read it."""
    _STATE.sent.append((work, message))
    while len(_STATE.sent) > MOST_ON_THEIR_WAY:
        _STATE.sent.popleft()[0].wait(LIMIT)


def forget() -> None:
    """Leave undone what is left: its process groups go."""
    for exchange in _STATE.all:
        exchange.end()
    _STATE.queues, _STATE.overtaken, _STATE.all, _STATE.log = {}, {}, [], {}
    _STATE.not_waited_for.clear()
    _STATE.sent.clear()
