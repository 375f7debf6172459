"""Who may touch what memory when: the order that streams, events and the host's waits give, and what is outside of it.

An agent is a stream or the host. Each counts what it is given, and knows of every other one up to which of its
operations all is over before the agent's own next one (a vector clock). Two uses of the same bytes of which one writes
are a race, unless the agent of the later one knows the earlier one. So a race is found in every mode, wherever the
numbers happen to be right.

All of the host's threads are one agent: what one of them has waited for is over for the others too.
"""

from __future__ import annotations

import itertools
import threading
import weakref

import torch

from tests.cuda.pretended.observed import OBSERVED, call_site

LOCK = threading.RLock()  # of all that is known here, and of what side streams do
Moment = dict[int, int]  # by agent: how many of its operations
_NUMBERS = itertools.count()
_TIMES: Moment = {}


class Agent:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self._knows: Moment = {}
        _TIMES[self.number] = 0

    @property
    def time(self) -> int:
        """How many operations it has been given."""
        return _TIMES[self.number]

    def tick(self) -> int:
        """It is given one more; the time after it."""
        with LOCK:
            _TIMES[self.number] += 1
            return _TIMES[self.number]

    def moment(self) -> Moment:
        """All that it knows to be over, and its own operations."""
        with LOCK:
            return {**self._knows, self.number: self.time}

    @property
    def is_default(self) -> bool:
        return self.number == DEFAULT.number

    def learn(self, moment: Moment) -> None:
        with LOCK:
            for number, time in moment.items():
                if time > self._knows.get(number, 0):
                    self._knows[number] = time

    def knows(self, number: int, time: int) -> bool:
        """Whether an agent's operation is over before the next one of this: what the host has seen the end of is."""
        return self._knows.get(number, 0) >= time or HOST._knows.get(number, 0) >= time


HOST, DEFAULT = Agent(), Agent()
_Key = tuple[int, int, int]  # agent, first byte, end


class _Memory:
    """When a storage was used: the last reads and writes by agent and range."""

    def __init__(self) -> None:
        self.by_default: dict[_Key, list[int]] = {}
        self.by_others: dict[_Key, list[int]] = {}
        self.users: dict[_Key, str] = {}


_OF_DEVICE: dict[int, _Memory] = {}  # by address of the storage
_OF_HOST: dict[int, tuple[_Memory, weakref.ref[torch.UntypedStorage]]] = {}  # what streams have used of it


def start(storage: torch.UntypedStorage) -> None:
    """The default stream gets this memory of the device from the allocator."""
    with LOCK:
        memory = _OF_DEVICE[storage._cdata] = _Memory()
        memory.by_default[DEFAULT.number, 0, storage.nbytes()] = [0, DEFAULT.time]


def use(agent: Agent, host: torch.Tensor, writes: bool, user: str | None = None) -> None:
    """An agent's newest operation reads this memory, or writes to it as well. What it does not wait for is a fault."""
    if host.numel() == 0:
        return
    storage = host.untyped_storage()
    key, (begin, end) = storage._cdata, byte_range(host)
    with LOCK:
        memory = _OF_DEVICE.get(key)
        if memory is None:
            if key not in _OF_HOST:
                _OF_HOST[key] = _Memory(), weakref.ref(storage, lambda _: _OF_HOST.pop(key, None))
            memory = _OF_HOST[key][0]
        _check(memory, agent, begin, end, writes, user)
        mine = (agent.number, begin, end)
        times = (memory.by_default if agent.is_default else memory.by_others).setdefault(mine, [0, 0])
        times[writes] = agent.time
        if user is not None:
            memory.users[mine] = user


def knows_of_host() -> bool:
    """Whether a stream has used memory of the host that is still there."""
    return bool(_OF_HOST)


def use_on_host(host: torch.Tensor, writes: bool) -> None:
    """The host reads memory of its own, or writes to it, at once."""
    with LOCK:
        memory = _OF_HOST.get(host.untyped_storage()._cdata)
        if memory is not None and host.numel():
            _check(memory[0], HOST, *byte_range(host), writes, None)


def _check(memory: _Memory, agent: Agent, begin: int, end: int, writes: bool, user: str | None) -> None:
    for uses in (memory.by_others,) if agent.is_default else (memory.by_others, memory.by_default):
        for other, (read, written) in uses.items():
            number, other_begin, other_end = other
            if number == agent.number or begin >= other_end or other_begin >= end:
                continue
            if not agent.knows(number, max(read, written) if writes else written):
                user = user or f"{'the host' if agent is HOST else 'the default stream'}, in {call_site()},"
                whose = "the default stream" if number == DEFAULT.number else memory.users[other]
                OBSERVED.fault(f"{user} did not wait for what {whose} was doing with the memory")
                return


def users_at_end(key: int, recorded: set[int]) -> list[str]:
    """Who may still use memory that the allocator gets back: streams that it does not know of, and that the default
    stream has not waited for."""
    with LOCK:
        memory = _OF_DEVICE.pop(key, None)
        if memory is None:
            return []
        return [
            memory.users[use]
            for use, times in memory.by_others.items()
            if use[0] not in recorded and not DEFAULT.knows(use[0], max(times))
        ]


def host_waited_for_all() -> None:
    """Whatever was given to any stream is over."""
    with LOCK:
        HOST.learn(_TIMES)


def byte_range(host: torch.Tensor) -> tuple[int, int]:
    """The bytes from the first number to the last."""
    if host.is_contiguous():
        count = host.numel()
    else:
        count = 1 + sum((size - 1) * step for size, step in zip(host.shape, host.stride(), strict=True))
    begin, size = host.storage_offset(), host.element_size()
    return begin * size, (begin + count) * size
