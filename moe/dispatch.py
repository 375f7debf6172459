"""Uneven all-to-all of rows over the expert parallel group, started now and waited for later.

On gloo every receive is posted before the send that answers it: gloo's pairs share one connection for data and for the
"ready to receive" notices, and a notice behind a payload makes the two directions run one after the other (16 MiB at
1 Gbit/s: 141 ms instead of 71). On NCCL it is one grouped collective on the communicator's own stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist

MAX_TAG = 2**20


class Handle(Protocol):
    """One exchange: `send` once, `wait` for what is received, and at last `finish`, until when the sent rows must stay as they are."""

    def send(self, rows: torch.Tensor, counts: Sequence[int], own: bool = True) -> None:
        """Start sending `rows` [sum(counts), ...], `counts[i]` of them to rank i; with `own`, copy this rank's part to itself."""

    def wait(self) -> torch.Tensor:
        """The receive buffer, filled (on a GPU: once the current stream gets there)."""

    def finish(self) -> None:
        """Everything is sent too. Apart from `wait`, so that a rank that sends much can go on with what it has received."""


class AllToAll(Protocol):
    """All ranks of a group call `expect` in the same order."""

    rank: int
    size: int

    def expect(self, buffer: torch.Tensor, counts: Sequence[int]) -> Handle:
        """Get ready to receive `counts[i]` rows from rank i, in the order of ranks, in a contiguous buffer."""


def start(exchange: AllToAll, rows: torch.Tensor, counts: Sequence[int], buffer: torch.Tensor, receive_counts: Sequence[int]) -> Handle:
    """Expect and send in one."""
    handle = exchange.expect(buffer, receive_counts)
    handle.send(rows, counts)
    return handle


class FlatAllToAll:
    """Every rank exchanges with every other directly."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.pairwise = dist.get_backend(group) == "gloo"
        self._tag = 0

    def expect(self, buffer: torch.Tensor, counts: Sequence[int]) -> _FlatHandle:
        """See AllToAll."""
        self._tag = (self._tag + 1) % MAX_TAG
        return _FlatHandle(self, buffer, counts, self._tag)


class _FlatHandle:
    def __init__(self, exchange: FlatAllToAll, buffer: torch.Tensor, counts: Sequence[int], tag: int) -> None:
        self._exchange, self._buffer, self._tag = exchange, buffer, tag
        self._parts = _split(buffer, counts)
        self._receives: list[Any] = []
        self._sends: list[Any] = []
        self._sent: torch.Tensor | None = None
        if exchange.pairwise:
            for rank in _others(exchange):
                if len(self._parts[rank]):
                    self._receives.append(dist.irecv(self._parts[rank], group=exchange.group, group_src=rank, tag=tag))

    def send(self, rows: torch.Tensor, counts: Sequence[int], own: bool = True) -> None:
        exchange, parts = self._exchange, _split(rows, counts)
        self._sent = rows  # alive until `finish`
        if exchange.pairwise:
            for rank in _others(exchange):
                if len(parts[rank]):
                    self._sends.append(dist.isend(parts[rank], group=exchange.group, group_dst=rank, tag=self._tag))
        else:
            outputs, inputs = list(self._parts), list(parts)
            outputs[exchange.rank], inputs[exchange.rank] = outputs[exchange.rank][:0], inputs[exchange.rank][:0]
            self._receives.append(dist.all_to_all(outputs, inputs, group=exchange.group, async_op=True))
        if own and len(parts[exchange.rank]):
            self._parts[exchange.rank].copy_(parts[exchange.rank])

    def wait(self) -> torch.Tensor:
        for work in self._receives:
            work.wait()
        self._receives.clear()
        return self._buffer

    def finish(self) -> None:
        for work in self._sends:
            work.wait()
        self._sends.clear()
        self._sent = None


def _others(exchange: FlatAllToAll) -> list[int]:
    # Each rank begins with its successor, so that no rank is everybody's first.
    return [(exchange.rank + step) % exchange.size for step in range(1, exchange.size)]


def _split(rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    ends = list(accumulate(counts))
    assert len(rows) == (ends[-1] if ends else 0), (len(rows), list(counts))
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]
