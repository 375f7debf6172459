"""Asynchronous uneven all-to-all of token rows over the expert parallel group.

On gloo every receive is posted before the send that answers it: gloo's pairs share one connection for data and for the
"ready to receive" notices, and a notice behind a payload makes the two directions run one after the other (16 MiB at
1 Gbit/s: 141 ms instead of 71). On NCCL it is one grouped collective on the communicator's own stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist

MAX_TAG = 2**20


@dataclass(frozen=True)
class SplitSizes:
    """One exchange's numbers of rows: `send[i]` to rank i and `receive[i]` from it, this rank's own included.

    `relay` has the further numbers of an exchange with relays; `back`: the exchange is a combine, not a dispatch.
    """

    send: list[int]
    receive: list[int]
    relay: Any = None
    back: bool = False


@dataclass(frozen=True)
class ExchangeCounts:
    """Result of `AllToAll.count`: numbers [rank][column] that this rank sends and receives."""

    sent: list[list[int]]
    received: list[list[int]]

    def split_sizes(self, columns: Sequence[int], back: bool = False) -> SplitSizes:
        """Return the sizes of an exchange of the rows in these columns; `back`: of their combine."""
        sent, received = add_columns(self.sent, columns), add_columns(self.received, columns)
        return SplitSizes(received, sent, back=True) if back else SplitSizes(sent, received)


class Handle(Protocol):
    """One exchange: call `send`, `wait` and `finish` once each. The sent rows must not change until `finish`."""

    def send(self, token_rows: torch.Tensor, own: bool = True) -> None:
        """Start sending rows, sorted by rank. Without `own` this rank's rows are missing: they are in the receive
        buffer already."""

    def wait(self) -> torch.Tensor:
        """Return the filled receive buffer, and drop the reference to it; on a GPU the current stream waits."""

    def finish(self) -> None:
        """Wait until everything is sent. Separate from `wait`, so that a rank can compute with the received rows while
        it still sends."""


class AllToAll(Protocol):
    """Exchanges over a group, whose ranks all call these methods in the same order."""

    rank: int
    size: int

    def count(self, counts: torch.Tensor) -> ExchangeCounts:
        """Send each rank its row of `counts` [ranks, columns] (int64): a small exchange that the host waits for."""

    def expect(self, buffer: torch.Tensor, split_sizes: SplitSizes) -> Handle:
        """Prepare to receive into a contiguous buffer, in the order of ranks."""


def start(exchange: AllToAll, token_rows: torch.Tensor, buffer: torch.Tensor, split_sizes: SplitSizes) -> Handle:
    """Start an exchange: prepare to receive, and send."""
    handle = exchange.expect(buffer, split_sizes)
    handle.send(token_rows)
    return handle


def add_columns(counts: Sequence[Sequence[int]], columns: Sequence[int]) -> list[int]:
    """Return the sum of these columns for each rank."""
    return [sum(of_rank[column] for column in columns) for of_rank in counts]


class FlatAllToAll:
    """Every rank exchanges with every other directly."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.pairwise = dist.get_backend(group) == "gloo"
        self._tag = 0

    def count(self, counts: torch.Tensor) -> ExchangeCounts:
        received, ones = torch.empty_like(counts), [1] * self.size
        handle = start(self, counts, received, SplitSizes(ones, ones))
        handle.wait()
        sent, got = torch.stack([counts, received]).tolist()
        handle.finish()
        return ExchangeCounts(sent, got)

    def expect(self, buffer: torch.Tensor, split_sizes: SplitSizes) -> Handle:
        self._tag = (self._tag + 1) % MAX_TAG
        return _FlatHandle(self, buffer, split_sizes, self._tag)


class _FlatHandle:
    def __init__(self, exchange: FlatAllToAll, buffer: torch.Tensor, split_sizes: SplitSizes, tag: int) -> None:
        self._exchange, self._split_sizes, self._tag = exchange, split_sizes, tag
        self._buffer: torch.Tensor | None = buffer
        self._receive_views = _split(buffer, split_sizes.receive)
        self._receives: list[Any] = []
        self._sends: list[Any] = []
        self._sent: torch.Tensor | None = None
        if exchange.pairwise:
            for rank in _others(exchange):
                if len(view := self._receive_views[rank]):
                    self._receives.append(dist.irecv(view, group=exchange.group, group_src=rank, tag=tag))

    def send(self, token_rows: torch.Tensor, own: bool = True) -> None:
        exchange, counts = self._exchange, list(self._split_sizes.send)
        if not own:
            counts[exchange.rank] = 0
        send_views = _split(token_rows, counts)
        self._sent = token_rows  # alive until `finish`
        if exchange.pairwise:
            for rank in _others(exchange):
                if len(view := send_views[rank]):
                    self._sends.append(dist.isend(view, group=exchange.group, group_dst=rank, tag=self._tag))
        else:
            outputs, inputs = list(self._receive_views), list(send_views)
            outputs[exchange.rank], inputs[exchange.rank] = outputs[exchange.rank][:0], inputs[exchange.rank][:0]
            self._receives.append(dist.all_to_all(outputs, inputs, group=exchange.group, async_op=True))
        if own and len(send_views[exchange.rank]):
            self._receive_views[exchange.rank].copy_(send_views[exchange.rank])

    def wait(self) -> torch.Tensor:
        for work in self._receives:
            work.wait()
        self._receives.clear()
        self._receive_views.clear()
        buffer, self._buffer = self._buffer, None  # the caller alone decides how long the rows live
        assert buffer is not None
        return buffer

    def finish(self) -> None:
        for work in self._sends:
            work.wait()
        self._sends.clear()
        self._sent = None


def _others(exchange: FlatAllToAll) -> list[int]:
    # Each rank begins with its successor, so that no rank is everybody's first.
    return [(exchange.rank + step) % exchange.size for step in range(1, exchange.size)]


def _split(buffer: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    ends = list(accumulate(counts))
    assert len(buffer) == (ends[-1] if ends else 0), (len(buffer), list(counts))
    return [buffer[end - count : end] for end, count in zip(ends, counts, strict=True)]
