"""All-to-all in two stages: what goes to another node is gathered inside the node first, so that a rank sends one
message to each other node (SE-MoE, Shen et al., 2022, section 4.2).

Rank (n, l) is the l-th of node n. Rows from (n, l) to (m, k) go over (n, k), their relay: inside the node, then between
ranks of the same number. Combined rows come back over the same relay, between nodes first, so that one exchange of
counts serves both. Rows that stay in their node go straight.

Nothing is repacked: a relay receives its mates' rows where its message to each node wants them, and those messages are
pieces of the receive buffer at the other end. Only the relay's own rows are copied.

On gloo all receives of both stages are posted first, and a thread starts the second stage when the first is there. On
NCCL the stages are two groups of sends and receives, one after the other on the communicator's stream.
"""

from __future__ import annotations

import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from configs.ranks import launched
from memory.pool import WORKSPACE
from moe.alltoall.flat import MAX_TAG, ExchangeCounts, SplitSizes, add_columns


def ranks_per_node(group: dist.ProcessGroup) -> int | None:
    """How many ranks of the group each node has, or None where `HierarchicalAllToAll` cannot run: nodes have different
    numbers of them, or their ranks do not follow one another. Collective over the group; all its ranks get the same
    answer.
    """
    # Nodes that are emulated on one host have its name too: there the launcher's numbers tell them apart.
    local_rank = launched().local_rank
    first_rank = 0 if local_rank is None else dist.get_rank() - local_rank
    nodes: list[Any] = [None] * group.size()
    dist.all_gather_object(nodes, (socket.gethostname(), first_rank), group=group)
    size = nodes.count(nodes[0])
    blocks = [nodes[first : first + size] for first in range(0, len(nodes), size)]
    even = all(block == [block[0]] * size for block in blocks) and len(set(nodes)) == len(blocks)
    return size if even else None


@dataclass(frozen=True)
class HierarchicalCounts(ExchangeCounts):
    """Exchange counts, and the numbers [node][local rank][column] of rows between this rank's node and its peer in
    another that it relays."""

    relayed: list[list[list[int]]]

    def split_sizes(self, columns: Sequence[int], back: bool = False) -> SplitSizes:
        """See ExchangeCounts; `relay` is then [node][local rank]."""
        return replace(
            super().split_sizes(columns, back), relay=[add_columns(of_node, columns) for of_node in self.relayed]
        )


class HierarchicalAllToAll:
    """An AllToAll over nodes of `ranks_per_node` ranks each, which follow one another in the group.

    Split sizes must come from this exchange's own `count`. Raises ValueError where the nodes do not divide the group.
    Layers should share one: on gloo it has two threads, which pass rows on while the program computes.
    """

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        if ranks_per_node < 1 or self.size % ranks_per_node:
            raise ValueError(
                f"ranks_per_node ({ranks_per_node}) must divide the group's size ({self.size}). Try ranks_per_node=1."
            )
        self.pairwise = dist.get_backend(group) == "gloo"
        self.ranks_per_node, self.num_nodes = ranks_per_node, self.size // ranks_per_node
        self.node, self.local = divmod(self.rank, ranks_per_node)
        # Each rank begins with its successor, so that no rank is everybody's first.
        self.others = [(self.node + step) % self.num_nodes for step in range(1, self.num_nodes)]  # nodes
        self.mates = [(self.local + step) % ranks_per_node for step in range(1, ranks_per_node)]  # local ranks
        self._next = 0
        # Combines have a thread of their own: their slow stage comes first, and rows that wait for a link should not
        # wait for them.
        self._relays = (_Worker(), _Worker()) if self.pairwise else None

    def count(self, counts: torch.Tensor) -> HierarchicalCounts:
        """See AllToAll. One row to each rank: so what passes through a relay are the numbers that it will relay."""
        ones, received = [1] * self.size, torch.empty_like(counts)
        relay = [[int(node != self.node)] * self.ranks_per_node for node in range(self.num_nodes)]
        handle = self.expect(received, SplitSizes(ones, ones, relay))
        handle.send(counts)
        handle.wait()
        numbers = torch.cat([counts, received, handle.relayed()]).tolist()
        handle.finish()
        sent, got, passed = numbers[: self.size], numbers[self.size : 2 * self.size], numbers[2 * self.size :]
        relayed = [passed[first : first + self.ranks_per_node] for first in range(0, len(passed), self.ranks_per_node)]
        relayed.insert(self.node, [[0] * counts.size(1)] * self.ranks_per_node)
        return HierarchicalCounts(sent, got, relayed)

    def expect(self, buffer: torch.Tensor, split_sizes: SplitSizes) -> _HierarchicalHandle:
        # A tag for each node: two ranks of a node exchange a message for each.
        self._next = (self._next + 1) % (MAX_TAG // self.num_nodes)
        return _HierarchicalHandle(self, buffer, split_sizes, self._next * self.num_nodes)

    def relay(self, job: Callable[[], list[Any]], back: bool) -> Future[list[Any]]:
        """Let the thread of this direction run a job, after those before it."""
        assert self._relays is not None
        return self._relays[back].submit(job)


class _Message(NamedTuple):
    rows: torch.Tensor
    rank: int  # of the other end
    tag: int


class _HierarchicalHandle:
    """The four kinds of messages of one exchange; `back` turns each kind round.

    Of the relay (`passing`): `inside` with its mates, `between` with its peers in other nodes. Of the ends (`mine`):
    the same. Tags: the node that is not the relay's.
    """

    def __init__(self, exchange: HierarchicalAllToAll, buffer: torch.Tensor, split_sizes: SplitSizes, tag: int) -> None:
        assert split_sizes.relay is not None, "the split sizes are not from this exchange's count"
        self._exchange, self._buffer, self._split_sizes, self._tag = exchange, buffer, split_sizes, tag
        self._parts = buffer.split(split_sizes.receive)
        passing = WORKSPACE.take((sum(map(sum, split_sizes.relay)), *buffer.shape[1:]), buffer)
        self._passing: torch.Tensor | None = passing
        of_nodes = passing.split([sum(counts) for counts in split_sizes.relay])
        # [node][local rank]
        self._passing_parts = [rows.split(counts) for rows, counts in zip(of_nodes, split_sizes.relay, strict=True)]
        inside = {node: self._inside(node, self._passing_parts[node]) for node in exchange.others}
        between = {node: [_Message(of_nodes[node], self._rank(node), tag + node)] for node in exchange.others}
        self._taken, self._passed_on = (between, inside) if split_sizes.back else (inside, between)  # {node: messages}
        self._direct = self._inside(exchange.node, self._of_node(self._parts, exchange.node))
        self._last = (
            self._mine_inside(self._parts) if split_sizes.back else self._mine_between(buffer, split_sizes.receive)
        )
        self._receives: list[Any] = []
        self._sends: list[Any] = []
        self._sent: torch.Tensor | None = None
        self._relay: Future[list[Any]] | None = None
        self._own_taken = False
        if exchange.pairwise:
            self._relay_receives = {node: self._receive(messages) for node, messages in self._taken.items()}
            self._receives = self._receive([*self._last, *self._direct])

    def send(self, rows: torch.Tensor, own: bool = True) -> None:
        exchange, split_sizes, counts = self._exchange, self._split_sizes, list(self._split_sizes.send)
        if not own:
            counts[exchange.rank] = 0
        self._sent = rows  # alive until `finish`
        parts = rows.split(counts)
        if split_sizes.back:
            first = self._mine_between(rows, counts)
        else:
            first = self._mine_inside(parts)
            for node in exchange.others:
                self._passing_parts[node][exchange.local].copy_(parts[self._rank(node)])
        direct = self._inside(exchange.node, self._of_node(parts, exchange.node))
        if exchange.pairwise:
            self._sends = self._send(first)
            # Not earlier: only `send` comes in an order in which every rank's thread can wait for one exchange after
            # the other.
            self._relay = exchange.relay(self._pass_on, split_sizes.back)
            self._sends += self._send(direct)
        else:
            # The second batch follows the first on the communicator's stream. Messages of two ranks match in this
            # order.
            taken, passed_on = (
                [m for node in exchange.others for m in of[node]] for of in (self._taken, self._passed_on)
            )
            self._receives = self._batch([*first, *direct], [*taken, *self._direct]) + self._batch(
                passed_on, self._last
            )
        if own:
            self._parts[exchange.rank].copy_(parts[exchange.rank])

    def wait(self) -> torch.Tensor:
        if self._relay is not None:
            self._relay.result()  # no later than the mates' direct rows, or it has failed
        for work in self._receives:
            work.wait()
        self._receives.clear()
        self._take_own()
        return self._buffer

    def finish(self) -> None:
        if self._relay is None:
            self.wait()  # of the current stream: only then may the buffers be used for something else
        else:
            passed_on = self._relay.result()
            self._take_own()
            for work in [*self._sends, *passed_on]:
                work.wait()
        WORKSPACE.give(self._passing)
        self._passing = self._sent = None

    def relayed(self) -> torch.Tensor:
        """What this rank passes on, once it is all there: rows by node and local rank, without this rank's node."""
        assert self._passing is not None
        if self._relay is not None:
            self._relay.result()
        return self._passing

    # -- messages ----------------------------------------------------------------------------------------------------

    def _rank(self, node: int) -> int:
        return node * self._exchange.ranks_per_node + self._exchange.local

    def _of_node(self, parts: Sequence[torch.Tensor], node: int) -> Sequence[torch.Tensor]:
        first = node * self._exchange.ranks_per_node
        return parts[first : first + self._exchange.ranks_per_node]

    def _inside(self, node: int, parts: Sequence[torch.Tensor]) -> list[_Message]:
        """Messages with the mates, of rows that have to do with a node; `parts` by local rank."""
        first = self._exchange.node * self._exchange.ranks_per_node
        return [_Message(parts[mate], first + mate, self._tag + node) for mate in self._exchange.mates]

    def _mine_inside(self, parts: Sequence[torch.Tensor]) -> list[_Message]:
        """This rank's own rows, which mates relay; `parts` by rank."""
        return [message for node in self._exchange.others for message in self._inside(node, self._of_node(parts, node))]

    def _mine_between(self, rows: torch.Tensor, counts: Sequence[int]) -> list[_Message]:
        """This rank's own rows, which its peers in other nodes relay."""
        exchange, step = self._exchange, self._exchange.ranks_per_node
        of_nodes = rows.split([sum(counts[first : first + step]) for first in range(0, exchange.size, step)])
        return [_Message(of_nodes[node], self._rank(node), self._tag + exchange.node) for node in exchange.others]

    # -- moving them -------------------------------------------------------------------------------------------------

    def _receive(self, messages: Sequence[_Message]) -> list[Any]:
        group = self._exchange.group
        return [dist.irecv(rows, group=group, group_src=rank, tag=tag) for rows, rank, tag in messages if rows.numel()]

    def _send(self, messages: Sequence[_Message]) -> list[Any]:
        group = self._exchange.group
        return [dist.isend(rows, group=group, group_dst=rank, tag=tag) for rows, rank, tag in messages if rows.numel()]

    def _batch(self, sends: Sequence[_Message], receives: Sequence[_Message]) -> list[Any]:
        group = self._exchange.group
        ops = [
            dist.P2POp(op, rows, group=group, group_peer=rank)
            for op, messages in ((dist.isend, sends), (dist.irecv, receives))
            for rows, rank, _ in messages
            if rows.numel()
        ]
        return dist.batch_isend_irecv(ops) if ops else []

    def _pass_on(self) -> list[Any]:
        """The relay's second stage, node by node as the first one's messages are there. Runs in a thread of the
        exchange."""
        sends: list[Any] = []
        for node in self._exchange.others:
            for work in self._relay_receives[node]:
                work.wait()
            sends += self._send(self._passed_on[node])
        return sends

    def _take_own(self) -> None:
        """Copy the combined rows that this rank relayed to itself."""
        if self._split_sizes.back and not self._own_taken:
            for node in self._exchange.others:
                self._parts[self._rank(node)].copy_(self._passing_parts[node][self._exchange.local])
        self._own_taken = True


class _Worker:
    """A thread that runs jobs one after the other, and ends with this object or the program. It starts at the first
    job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None] = queue.SimpleQueue()
        self._started = False
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], list[Any]]) -> Future[list[Any]]:
        """Run it later; its exception is the future's."""
        if not self._started:
            threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="relay").start()
            self._started = True
        future: Future[list[Any]] = Future()
        self._jobs.put((job, future))
        return future


def _serve(jobs: queue.SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None]) -> None:
    # Knows the queue alone, so that the worker's owner can be collected.
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del item, job, future  # an idle thread keeps no buffers alive
