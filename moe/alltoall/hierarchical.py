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
    """Return the number of the group's ranks on each node; None if it differs, or a node's ranks are not consecutive.

    With None a hierarchical all-to-all is impossible. Collective over the group; all its ranks get the same answer.
    """
    # Nodes that are emulated on one host share its name: there the launcher's numbers distinguish them.
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
    """Exchange counts, and in `relayed` [node][local rank][column] the counts of rows that this rank relays.

    They are the rows between that local rank of this node and this rank's peer in the other node.
    """

    relayed: list[list[list[int]]]

    def split_sizes(self, columns: Sequence[int], back: bool = False) -> SplitSizes:
        """Return the split sizes as in the base class, with the relayed rows as `relay`, [node][local rank]."""
        return replace(
            super().split_sizes(columns, back), relay=[add_columns(of_node, columns) for of_node in self.relayed]
        )


class HierarchicalAllToAll:
    """An all-to-all in two stages, inside and between nodes of `ranks_per_node` consecutive ranks.

    Its split sizes must be from its own `count`. Layers should share one object: on gloo it has two threads, which
    relay rows during computation. Raises ValueError if `ranks_per_node` does not divide the group's size.
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
        # Combines have a thread of their own: their slow stage is the first, and dispatches should not wait for it.
        self._relays = (_Worker(), _Worker()) if self.pairwise else None

    def count(self, counts: torch.Tensor) -> HierarchicalCounts:
        """Exchange counts [ranks, columns] over the same relays as rows, so each relay learns what it will forward."""
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
        """Queue a job for the thread that relays dispatches, or with `back` combines; return the job's future."""
        assert self._relays is not None
        return self._relays[back].submit(job)


class _Message(NamedTuple):
    token_rows: torch.Tensor
    rank: int  # of the other end
    tag: int


class _HierarchicalHandle:
    """An all-to-all in flight, with four kinds of messages; in a combine (`back`) each kind has the reverse direction.

    As a relay this rank forwards rows (`passing`) between its mates, the other ranks of its node (`inside`), and its
    peers, the ranks of its local number in other nodes (`between`). Its own rows (`mine`) are in messages of the same
    two kinds, which others relay. A message's tag is the number of the node that is not the relay's.
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
            # Not earlier: only the order of `send` calls lets every rank's thread wait for one exchange after the
            # other.
            self._relay = exchange.relay(self._pass_on, split_sizes.back)
            self._sends += self._send(direct)
        else:
            # The second batch follows the first on the communicator's stream. Messages of two ranks match in this
            # order.
            taken, passed_on = (
                [m for node in exchange.others for m in of[node]] for of in (self._taken, self._passed_on)
            )
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
        """Wait for the rows that this rank relays, and return them sorted by other node, then local rank."""
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
        """Return one message per other rank of this node, for rows from or to `node`; `views`: one per local rank."""
        first = self._exchange.node * self._exchange.ranks_per_node
        return [_Message(views[mate], first + mate, self._tag + node) for mate in self._exchange.mates]

    def _mine_inside(self, views: Sequence[torch.Tensor]) -> list[_Message]:
        """Return the messages inside this node with this rank's own rows, which others relay; `views`: one per rank."""
        return [message for node in self._exchange.others for message in self._inside(node, self._of_node(views, node))]

    def _mine_between(self, token_rows: torch.Tensor, counts: Sequence[int]) -> list[_Message]:
        """Return the messages to or from other nodes with this rank's own rows, which its peers there relay."""
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
        """Copy the combined rows that this rank relayed for itself to its receive buffer."""
        if self._split_sizes.back and not self._own_taken:
            for node in self._exchange.others:
                self._receive_views[self._rank(node)].copy_(self._passing_views[node][self._exchange.local])
        self._own_taken = True


class _Worker:
    """A daemon thread that runs jobs in order. It starts with the first job and ends with this object."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None] = queue.SimpleQueue()
        self._started = False
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], list[Any]]) -> Future[list[Any]]:
        """Queue a job, and return a future of its result or exception."""
        if not self._started:
            threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="relay").start()
            self._started = True
        future: Future[list[Any]] = Future()
        self._jobs.put((job, future))
        return future


def _serve(jobs: queue.SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None]) -> None:
    # Has a reference to the queue alone, so that the worker's owner can be collected.
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del item, job, future  # an idle thread keeps no buffers alive


_exchanges: weakref.WeakValueDictionary[tuple[int, str], FlatAllToAll | HierarchicalAllToAll] = (
    weakref.WeakValueDictionary()
)


def shared_exchange(group: dist.ProcessGroup, kind: str) -> AllToAll:
    """Return the all-to-all of a kind ("flat" or "hierarchical") over a group, one object for all layers. Collective.

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
                f"2, on each of several nodes; its {group.size()} ranks are not so here. Try moe.all_to_all=flat."
            )
        _exchanges[id(group), kind] = exchange
    return exchange


def exchange_kinds(group: dist.ProcessGroup) -> list[str]:
    """Return ["flat"], or ["flat", "hierarchical"] if the group has several ranks on several nodes. Collective."""
    return ["flat"] if _ranks_of_hierarchy(group) is None else ["flat", "hierarchical"]


def _ranks_of_hierarchy(group: dist.ProcessGroup) -> int | None:
    """Return the number of ranks per node; None if a group has no hierarchy, e.g. if it is on one node."""
    mates = ranks_per_node(group)
    return mates if mates is not None and 1 < mates < group.size() else None
