"""Asynchronous uneven all-to-all of token rows over the expert parallel group.

On gloo a rank posts its receives before its sends. Two ranks share one connection for data and for "ready to receive"
notices, and a notice behind a payload makes the two directions run one after the other (16 MiB at 1 Gbit/s: 141 ms
instead of 71). On NCCL an all-to-all is one grouped collective on the communicator's own stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

MAX_TAG = 2**20


@dataclass(frozen=True)
class SplitSizes:
    """Row counts of one all-to-all: `send[i]` rows to rank i and `receive[i]` rows from rank i, this rank included.

    `relay`: the numbers of rows that this rank forwards in a hierarchical all-to-all. `back`: the all-to-all is a
    combine; otherwise it is a dispatch.
    """

    send: list[int]
    receive: list[int]
    relay: Any = None
    back: bool = False


@dataclass(frozen=True)
class ExchangeCounts:
    """Counts that this rank has sent to and received from each rank, [rank][column].

    A column is, for example, the number of rows in one chunk.
    """

    sent: list[list[int]]
    received: list[list[int]]

    def split_sizes(self, columns: Sequence[int], back: bool = False) -> SplitSizes:
        """Return the split sizes for dispatching the rows counted in `columns`.

        `back`: return the split sizes of the combine that returns these rows.
        """
        sent, received = add_columns(self.sent, columns), add_columns(self.received, columns)
        return SplitSizes(received, sent, back=True) if back else SplitSizes(sent, received)


class Handle(Protocol):
    """An all-to-all in flight: call `send`, `wait` and `finish` once each. Sent rows must not change until `finish`."""

    def send(self, token_rows: torch.Tensor, own: bool = True) -> None:
        """Start sending rows that are sorted by destination rank.

        If `own` is false, `token_rows` omits the rows from this rank to itself: the receive buffer already has them.
        """

    def wait(self) -> torch.Tensor:
        """Wait for all rows, and return the receive buffer. On a GPU only the current stream waits."""

    def finish(self) -> None:
        """Wait until all rows are sent. Separate from `wait`, so that a rank can use received rows while it sends."""


class AllToAll(Protocol):
    """Interface of an all-to-all over a group. All ranks of the group must call its methods in the same order."""

    rank: int
    size: int

    def count(self, counts: torch.Tensor) -> ExchangeCounts:
        """Send row i of `counts`, int64 [ranks, columns], to rank i; return all counts. The host waits for them."""

    def expect(self, buffer: torch.Tensor, split_sizes: SplitSizes) -> Handle:
        """Prepare an all-to-all that receives rows, sorted by source rank, into a contiguous buffer."""


def start(exchange: AllToAll, token_rows: torch.Tensor, buffer: torch.Tensor, split_sizes: SplitSizes) -> Handle:
    """Start an all-to-all: prepare to receive into `buffer`, and send `token_rows`."""
    handle = exchange.expect(buffer, split_sizes)
    handle.send(token_rows)
    return handle


def add_columns(counts: Sequence[Sequence[int]], columns: Sequence[int]) -> list[int]:
    """Return each rank's sum of the given columns of `counts` [rank][column]."""
    return [sum(of_rank[column] for column in columns) for of_rank in counts]


class FlatAllToAll:
    """An all-to-all in which every rank sends directly to every other rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.pairwise = dist.get_backend(group) == "gloo"
        # Each rank begins with its successor, so that not all ranks send to the same rank first.
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
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
        self._receive_views = list(buffer.split(split_sizes.receive))
        self._receives: list[Any] = []
        self._sends: list[Any] = []
        self._sent: torch.Tensor | None = None
        if exchange.pairwise:
            for rank in exchange.others:
                if len(view := self._receive_views[rank]):
                    self._receives.append(dist.irecv(view, group=exchange.group, group_src=rank, tag=tag))

    def send(self, token_rows: torch.Tensor, own: bool = True) -> None:
        exchange, counts = self._exchange, list(self._split_sizes.send)
        if not own:
            counts[exchange.rank] = 0
        send_views = token_rows.split(counts)
        self._sent = token_rows  # alive until `finish`
        if exchange.pairwise:
            for rank in exchange.others:
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
        buffer, self._buffer = self._buffer, None  # so that only the caller keeps the rows alive
        assert buffer is not None
        return buffer

    def finish(self) -> None:
        for work in self._sends:
            work.wait()
        self._sends.clear()
        self._sent = None
