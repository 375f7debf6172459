"""All-to-all in two stages: inside a node, then between nodes, where a rank sends one message to each other node.

After SE-MoE (Shen et al., 2022, section 4.2). Rank (n, l) is the l-th of node n. Rows from (n, l) to (m, k) are sent
through (n, k), their relay: inside the node, then between ranks of the same local number (peers). Combined rows return
through the same relay, between nodes first, so that one exchange of counts serves both directions. Rows within a node
are sent directly.

Nothing is repacked: a relay receives the rows of the other ranks of its node (its mates) at their offsets in its
message to each node, and the receiver's buffer is contiguous in these messages. Only the relay's own rows are copied.

On gloo all receives of both stages are posted first, and a thread starts the second stage when the first has arrived.
On NCCL the stages are two groups of sends and receives, one after the other on the communicator's stream.
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

from base.errors import ConfigError
from base.ranks import launched
from memory.pool import WORKSPACE
from moe.alltoall.flat import MAX_TAG, AllToAll, ExchangeCounts, FlatAllToAll, SplitSizes, add_columns


def ranks_per_node(group: dist.ProcessGroup) -> int | None:
    """Return how many of the group's ranks each node has; None if nodes differ or a node's ranks are not consecutive.

    None means that a hierarchical all-to-all is impossible. Collective: all ranks of the group get the same result.
    """
    # Nodes that are emulated on one host share its name; the launcher's numbers distinguish them.
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
    """Exchange counts, plus counts of the rows that this rank relays: `relayed` [node][local rank][column].

    `relayed[m][l]` counts the rows that local rank l of this node dispatches to this rank's peer in node m. A peer is
    the rank with the same local number in a different node.
    """

    relayed: list[list[list[int]]]

    def split_sizes(self, columns: Sequence[int], back: bool = False) -> SplitSizes:
        """Return the split sizes as the base class does, with `relay` as lists [node][local rank]."""
        relay = [add_columns(of_node, columns) for of_node in self.relayed]
        return replace(super().split_sizes(columns, back), relay=relay)


class HierarchicalAllToAll:
    """An all-to-all in two stages: within and between nodes of `ranks_per_node` consecutive ranks.

    Split sizes must come from `count` of this object. Layers should share one object, because on gloo it starts two
    threads that relay rows during computation. Raises ValueError if `ranks_per_node` does not divide the group's size.
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
        # Each rank begins with its successor, so that not all ranks send to the same rank first.
        self.others = [(self.node + step) % self.num_nodes for step in range(1, self.num_nodes)]  # nodes
        self.mates = [(self.local + step) % ranks_per_node for step in range(1, ranks_per_node)]  # local ranks
        self._next = 0
        # Combines have their own thread: their first stage is the slow one, and dispatches should not wait for it.
        self.relays = _Worker(), _Worker()  # of dispatches and of combines; their threads start with the first job

    def count(self, counts: torch.Tensor) -> HierarchicalCounts:
        """Exchange counts [ranks, columns] over the same relays as rows, so that each relay learns its row counts."""
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
        # One tag per node, because two ranks of a node exchange one message per node.
        self._next = (self._next + 1) % (MAX_TAG // self.num_nodes)
        return _HierarchicalHandle(self, buffer, split_sizes, self._next * self.num_nodes)


class _Message(NamedTuple):
    token_rows: torch.Tensor
    rank: int  # of the other end
    tag: int


class _HierarchicalHandle:
    """A two-stage all-to-all in flight. A combine (`back`) sends each kind of message in the reverse direction.

    Messages `inside` this node are exchanged with its mates, the other ranks of the node. Messages `between` nodes are
    exchanged with its peers, the ranks with the same local number in other nodes. This rank relays the rows in
    `passing` between mates and peers. Its own rows (`mine`) are in messages of both kinds that other ranks relay. A
    message's tag identifies the node that is not the relay's.
    """

    def __init__(self, exchange: HierarchicalAllToAll, buffer: torch.Tensor, split_sizes: SplitSizes, tag: int) -> None:
        assert split_sizes.relay is not None, "the split sizes are not from this exchange's count"
        self._exchange, self._buffer, self._split_sizes, self._tag = exchange, buffer, split_sizes, tag
        self._receive_views = buffer.split(split_sizes.receive)
        passing = WORKSPACE.take((sum(map(sum, split_sizes.relay)), *buffer.shape[1:]), buffer)
        self._passing: torch.Tensor | None = passing
        of_nodes = passing.split([sum(counts) for counts in split_sizes.relay])
        # [node][local rank]
        self._passing_views = [view.split(counts) for view, counts in zip(of_nodes, split_sizes.relay, strict=True)]
        inside = {node: self._inside(node, self._passing_views[node]) for node in exchange.others}
        between = {node: [_Message(of_nodes[node], self._rank(node), tag + node)] for node in exchange.others}
        self._taken, self._passed_on = (between, inside) if split_sizes.back else (inside, between)  # {node: messages}
        self._direct = self._inside(exchange.node, self._of_node(self._receive_views, exchange.node))
        if split_sizes.back:
            self._last = self._mine_inside(self._receive_views)
        else:
            self._last = self._mine_between(buffer, split_sizes.receive)
        self._receives: list[Any] = []
        self._sends: list[Any] = []
        self._sent: torch.Tensor | None = None
        self._relay: Future[list[Any]] | None = None
        self._own_taken = False
        if exchange.pairwise:
            self._relay_receives = {node: self._receive(messages) for node, messages in self._taken.items()}
            self._receives = self._receive([*self._last, *self._direct])

    def send(self, token_rows: torch.Tensor, own: bool = True) -> None:
        exchange, split_sizes, counts = self._exchange, self._split_sizes, list(self._split_sizes.send)
        if not own:
            counts[exchange.rank] = 0
        self._sent = token_rows  # alive until `finish`
        send_views = token_rows.split(counts)
        if split_sizes.back:
            first = self._mine_between(token_rows, counts)
        else:
            first = self._mine_inside(send_views)
            for node in exchange.others:
                self._passing_views[node][exchange.local].copy_(send_views[self._rank(node)])
        direct = self._inside(exchange.node, self._of_node(send_views, exchange.node))
        if exchange.pairwise:
            self._sends = self._send(first)
            # Not before `send`: a relay thread waits for one exchange after the other, so that all ranks must queue
            # exchanges in the same order.
            self._relay = exchange.relays[split_sizes.back].submit(self._pass_on)
            self._sends += self._send(direct)
        else:
            # The second batch follows the first on the communicator's stream. Messages of two ranks match in this
            # order.
            taken = [message for node in exchange.others for message in self._taken[node]]
            passed_on = [message for node in exchange.others for message in self._passed_on[node]]
            self._receives = self._batch([*first, *direct], [*taken, *self._direct])
            self._receives += self._batch(passed_on, self._last)
        if own:
            self._receive_views[exchange.rank].copy_(send_views[exchange.rank])

    def wait(self) -> torch.Tensor:
        if self._relay is not None:
            self._relay.result()  # done no later than the mates' direct rows, or it has failed
        for work in self._receives:
            work.wait()
        self._receives.clear()
        self._take_own()
        return self._buffer

    def finish(self) -> None:
        if self._relay is None:
            self.wait()  # on the current stream: only then may the buffers be reused
        else:
            passed_on = self._relay.result()
            self._take_own()
            for work in [*self._sends, *passed_on]:
                work.wait()
        WORKSPACE.give(self._passing)
        self._passing = self._sent = None

    def relayed(self) -> torch.Tensor:
        """Wait for the rows that this rank relays, and return them sorted by the other node, then by local rank."""
        assert self._passing is not None
        if self._relay is not None:
            self._relay.result()
        return self._passing

    # -- messages ----------------------------------------------------------------------------------------------------

    def _rank(self, node: int) -> int:
        return node * self._exchange.ranks_per_node + self._exchange.local

    def _of_node(self, views: Sequence[torch.Tensor], node: int) -> Sequence[torch.Tensor]:
        first = node * self._exchange.ranks_per_node
        return views[first : first + self._exchange.ranks_per_node]

    def _inside(self, node: int, views: Sequence[torch.Tensor]) -> list[_Message]:
        """Return a message for each other rank of this node, with rows from or to `node`. `views`: by local rank."""
        first = self._exchange.node * self._exchange.ranks_per_node
        return [_Message(views[mate], first + mate, self._tag + node) for mate in self._exchange.mates]

    def _mine_inside(self, views: Sequence[torch.Tensor]) -> list[_Message]:
        """Return the messages within this node with this rank's own rows, which mates relay. `views`: by rank."""
        return [message for node in self._exchange.others for message in self._inside(node, self._of_node(views, node))]

    def _mine_between(self, token_rows: torch.Tensor, counts: Sequence[int]) -> list[_Message]:
        """Return the messages to or from other nodes with this rank's own rows, which its peers relay."""
        exchange, step = self._exchange, self._exchange.ranks_per_node
        of_nodes = token_rows.split([sum(counts[first : first + step]) for first in range(0, exchange.size, step)])
        return [_Message(of_nodes[node], self._rank(node), self._tag + exchange.node) for node in exchange.others]

    # -- moving them -------------------------------------------------------------------------------------------------

    def _receive(self, messages: Sequence[_Message]) -> list[Any]:
        group = self._exchange.group
        return [dist.irecv(view, group=group, group_src=rank, tag=tag) for view, rank, tag in messages if view.numel()]

    def _send(self, messages: Sequence[_Message]) -> list[Any]:
        group = self._exchange.group
        return [dist.isend(view, group=group, group_dst=rank, tag=tag) for view, rank, tag in messages if view.numel()]

    def _batch(self, sends: Sequence[_Message], receives: Sequence[_Message]) -> list[Any]:
        group = self._exchange.group
        ops = [
            dist.P2POp(op, view, group=group, group_peer=rank)
            for op, messages in ((dist.isend, sends), (dist.irecv, receives))
            for view, rank, _ in messages
            if view.numel()
        ]
        return dist.batch_isend_irecv(ops) if ops else []

    def _pass_on(self) -> list[Any]:
        """Forward the relayed rows, node by node as they arrive, and return the sends. Runs in a relay thread."""
        sends: list[Any] = []
        for node in self._exchange.others:
            for work in self._relay_receives[node]:
                work.wait()
            sends += self._send(self._passed_on[node])
        return sends

    def _take_own(self) -> None:
        """Copy combined rows that this rank relays for itself to its receive buffer."""
        if self._split_sizes.back and not self._own_taken:
            for node in self._exchange.others:
                self._receive_views[self._rank(node)].copy_(self._passing_views[node][self._exchange.local])
        self._own_taken = True


class _Worker:
    """A daemon thread that runs jobs in order. It starts with the first job and ends when this object is deleted."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None] = queue.SimpleQueue()
        self._started = False
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], list[Any]]) -> Future[list[Any]]:
        """Queue a job, and return the future of its result or exception."""
        if not self._started:
            threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="relay").start()
            self._started = True
        future: Future[list[Any]] = Future()
        self._jobs.put((job, future))
        return future


def _serve(jobs: queue.SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None]) -> None:
    # Has a reference only to the queue, so that the worker can be garbage-collected.
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del item, job, future  # an idle thread keeps no buffers alive


_exchanges = weakref.WeakValueDictionary[tuple[int, str], FlatAllToAll | HierarchicalAllToAll]()


def shared_exchange(group: dist.ProcessGroup, kind: str) -> AllToAll:
    """Return a group's all-to-all of this kind ("flat" or "hierarchical"), one object for all layers. Collective.

    Raises ConfigError for "hierarchical" unless the group has the same number of ranks, at least 2, on each of several
    nodes.
    """
    exchange = _exchanges.get((id(group), kind))
    if exchange is None or exchange.group is not group:
        if kind == "flat":
            exchange = FlatAllToAll(group)
        elif (mates := _ranks_of_hierarchy(group)) is not None:
            exchange = HierarchicalAllToAll(group, mates)
        else:
            raise ConfigError(
                "moe.all_to_all (hierarchical) needs an expert parallel group with the same number of ranks, at least "
                f"2, on each of several nodes; this group's {group.size()} ranks are placed differently. Try "
                "moe.all_to_all=flat."
            )
        _exchanges[id(group), kind] = exchange
    return exchange


def exchange_kinds(group: dist.ProcessGroup) -> list[str]:
    """Return the kinds of all-to-all that a group supports: ["flat"] or ["flat", "hierarchical"]. Collective."""
    return ["flat"] if _ranks_of_hierarchy(group) is None else ["flat", "hierarchical"]


def _ranks_of_hierarchy(group: dist.ProcessGroup) -> int | None:
    """Return a group's ranks per node; None if it cannot use, or does not need, a hierarchical all-to-all.

    A group on one node, or with one rank per node, does not need it.
    """
    mates = ranks_per_node(group)
    return mates if mates is not None and 1 < mates < group.size() else None
