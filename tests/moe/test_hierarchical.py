"""The all-to-all in two stages: equal to the flat one, fewer messages between nodes, and under the whole layer."""

from __future__ import annotations

import gc
import os
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.alltoall import hierarchical
from moe.alltoall.flat import MAX_TAG, AllToAll, ExchangeCounts, FlatAllToAll, Handle, start
from moe.alltoall.hierarchical import HierarchicalAllToAll, ranks_per_node
from moe.chunk_plan import STRATEGIES, Plan
from tests.distributed import RankError, run
from tests.moe.oracle import Case, check_on_ranks, with_dtype
from tests.waits import LONG

NODES = [(4, 2), (4, 1), (4, 4), (2, 1), (3, 3)]  # (ranks, ranks per node)
COLUMNS = [[0], [1], [2], [0, 2], [3], [0, 1, 2, 3]]
KINDS = [(torch.float64, (3,)), (torch.int32, ()), (torch.bfloat16, (5, 2)), (torch.int64, (2,)), (torch.float32, (0,))]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _counts(seed: int, size: int) -> torch.Tensor:
    """[from, to, column] numbers of rows, the same on every rank: many zeros, empty columns, a silent rank and a deaf
    one."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (size, size, 4), generator=generator)
    counts *= torch.rand(size, size, 4, generator=generator) < (0.8, 0.3)[seed % 2]
    counts[:, :, 3] *= seed % 3 == 0
    if seed % 4 == 3:
        counts[seed % size] = 0
        counts[:, (seed + 1) % size] = 0
    return counts


def _token_rows(rank: int, number: int, count: int, kind: tuple[torch.dtype, tuple[int, ...]]) -> torch.Tensor:
    """Rows that no other rank or exchange has: small whole numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(-128, 128, (count, *kind[1]), generator=generator).to(kind[0])


def _exchange_all(
    exchange: AllToAll, exchange_counts: ExchangeCounts, order: random.Random, own: bool
) -> list[torch.Tensor]:
    """The receive buffers of many exchanges in flight together; `order` is the same on all ranks."""
    dispatch_sizes = [exchange_counts.split_sizes(columns, back) for columns in COLUMNS for back in (False, True)]
    buffers, token_rows = [], []
    for number, split_sizes in enumerate(dispatch_sizes):
        kind = KINDS[number % len(KINDS)]
        mine = _token_rows(exchange.rank, number, sum(split_sizes.send), kind)
        buffer = torch.full((sum(split_sizes.receive), *kind[1]), 77, dtype=kind[0])
        if not own:
            sent_views, received_views = list(mine.split(split_sizes.send)), buffer.split(split_sizes.receive)
            received_views[exchange.rank].copy_(sent_views.pop(exchange.rank))
            mine = torch.cat(sent_views)
        token_rows.append(mine)
        buffers.append(buffer)
    todo = [(step, number) for number in range(len(dispatch_sizes)) for step in ("send", "wait", "finish")]
    handles = {
        number: exchange.expect(buffers[number], split_sizes) for number, split_sizes in enumerate(dispatch_sizes)
    }
    sent: set[int] = set()
    order.shuffle(todo)
    for step, number in todo:
        if number not in sent:
            handles[number].send(token_rows[number], own=own)
            sent.add(number)
        if step == "wait":
            assert handles[number].wait() is buffers[number]
        elif step == "finish":
            handles[number].finish()
    return buffers


def _equals_flat(per_node: int) -> None:
    group = _world()
    exchange, flat = HierarchicalAllToAll(group, per_node), FlatAllToAll(group)
    for seed in range(8):
        counts = _counts(seed, exchange.size)
        exchange_counts, expected = exchange.count(counts[exchange.rank]), flat.count(counts[exchange.rank])
        assert (exchange_counts.sent, exchange_counts.received) == (expected.sent, expected.received)
        mates = range(exchange.node * per_node, (exchange.node + 1) * per_node)
        for node in set(range(exchange.num_nodes)) - {exchange.node}:
            assert exchange_counts.relayed[node] == [
                counts[mate, node * per_node + exchange.local].tolist() for mate in mates
            ]
        for own in (True, False):
            got = _exchange_all(exchange, exchange_counts, random.Random(seed), own)
            wanted = _exchange_all(flat, expected, random.Random(seed), own)
            for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
                assert torch.equal(a, b), (seed, own, number)


@pytest.mark.parametrize("num_ranks,per_node", NODES)
def test_equals_the_flat_exchange(num_ranks: int, per_node: int) -> None:
    run(_equals_flat, num_ranks, per_node)


def _over_the_last_tag(per_node: int) -> None:
    group, counts = _world(), _counts(1, _world().size())
    early: list[Any] = [FlatAllToAll(group), HierarchicalAllToAll(group, per_node)]
    late: list[Any] = [FlatAllToAll(group), HierarchicalAllToAll(group, per_node)]
    late[0]._tag, late[1]._next = MAX_TAG - 3, MAX_TAG // late[1].num_nodes - 3
    for exchange, other in zip(late, early, strict=True):
        found, expected = (
            _exchange_all(each, each.count(counts[each.rank]), random.Random(1), True) for each in (exchange, other)
        )
        assert all(map(torch.equal, found, expected))
    exchanges = 1 + 2 * len(COLUMNS)
    assert late[0]._tag == late[1]._next == exchanges - 3 and early[0]._tag == early[1]._next == exchanges


def test_after_the_last_tag_comes_the_first() -> None:
    run(_over_the_last_tag, 2, 1)


class _Sends:
    """Counts what this rank sends to other nodes: (messages, bytes)."""

    def __init__(self, per_node: int) -> None:
        self.sizes: list[int] = []
        self.per_node, self._isend = per_node, dist.isend

    def __enter__(self) -> list[int]:
        def isend(tensor: torch.Tensor, **kwargs: Any) -> Any:
            if kwargs["group_dst"] // self.per_node != dist.get_rank() // self.per_node:
                self.sizes.append(tensor.nbytes)
            return self._isend(tensor, **kwargs)

        dist.isend = isend
        return self.sizes

    def __exit__(self, *_: object) -> None:
        dist.isend = self._isend


def _between_nodes() -> None:
    per_node, width = 2, 16
    group = _world()
    rank, size = group.rank(), group.size()
    numbers = torch.arange(1, size * size + 1).view(size, size, 1)  # rows from each rank to each
    found: dict[str, list[Any]] = {}
    for name, exchange in (("flat", FlatAllToAll(group)), ("hierarchical", HierarchicalAllToAll(group, per_node))):
        with _Sends(per_node) as counting:
            exchange_counts = exchange.count(numbers[rank])
        found[name] = [sorted(counting)]
        for back in (False, True):
            split_sizes = exchange_counts.split_sizes([0], back)
            with _Sends(per_node) as sending:
                handle = start(
                    exchange,
                    torch.zeros(sum(split_sizes.send), width),
                    torch.empty(sum(split_sizes.receive), width),
                    split_sizes,
                )
                handle.wait()
                handle.finish()
            found[name].append(sorted(sending))
    node, local = divmod(rank, per_node)
    other = 1 - node
    mine, peer = slice(node * per_node, (node + 1) * per_node), other * per_node + local
    theirs = slice(other * per_node, (other + 1) * per_node)
    row = width * 4
    # Flat: a message to each rank of the other node. Hierarchical: one to the peer, with the rows of all mates.
    assert found["flat"] == [
        [8, 8],
        sorted(n * row for n in numbers[rank, theirs, 0].tolist()),
        sorted(n * row for n in numbers[theirs, rank, 0].tolist()),
    ]
    assert found["hierarchical"] == [
        [8 * per_node],
        [int(numbers[mine, peer, 0].sum()) * row],
        [int(numbers[theirs, rank, 0].sum()) * row],
    ]


def test_one_message_to_each_other_node() -> None:
    run(_between_nodes, 4)


def _relays_while_the_program_is_busy() -> None:
    exchange = HierarchicalAllToAll(_world(), 2)
    exchange_counts = exchange.count(torch.full((4, 1), 3))
    for back in (False, True):
        handle = exchange.expect(torch.empty(12, 2), exchange_counts.split_sizes([0], back))
        token_rows = torch.full((12, 2), float(exchange.rank))
        if exchange.rank != 1:
            handle.send(token_rows)
        dist.barrier()  # sending waits for nobody
        if exchange.rank == 1:
            handle.send(token_rows)
        for rank in range(4):
            # Only this rank waits; the others are at the barrier, and their relays have to work by themselves.
            if rank == exchange.rank:
                assert handle.wait()[:, 0].tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [3.0] * 3
            dist.barrier()
        handle.finish()


def test_relays_while_the_program_is_busy() -> None:
    run(_relays_while_the_program_is_busy, 4)


def _late_rank() -> None:
    # One rank sends each exchange only when it has received the one before; the others send all at once.
    exchange = HierarchicalAllToAll(_world(), 2)
    exchange_counts = exchange.count(torch.full((4, 1), 2))
    handles: list[Handle] = []
    token_rows = [torch.full((8, 1), float(10 * exchange.rank + number)) for number in range(3)]
    dispatch_sizes = [exchange_counts.split_sizes([0], back) for back in (False, True, False)]
    if exchange.rank == 1:
        for number, split_sizes in enumerate(dispatch_sizes):
            handles.append(start(exchange, token_rows[number], torch.empty(8, 1), split_sizes))
            handles[-1].wait()
    else:
        handles = [exchange.expect(torch.empty(8, 1), split_sizes) for split_sizes in dispatch_sizes]
        for handle, tensor in zip(handles, token_rows, strict=True):
            handle.send(tensor)
    for number, handle in enumerate(handles):
        assert handle.wait()[::2, 0].tolist() == [10 * rank + number for rank in range(4)]
        handle.finish()


def test_a_rank_that_comes_late() -> None:
    run(_late_rank, 4)


def _failing_relay() -> None:
    exchange = HierarchicalAllToAll(_world(), 2)
    split_sizes = exchange.count(torch.ones(4, 1, dtype=torch.int64)).split_sizes([0])
    isend = dist.isend

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return isend(*args, **kwargs)
        raise ConnectionError("the link is down")

    dist.isend = refuse
    try:
        handle = start(exchange, torch.zeros(4, 1), torch.empty(4, 1), split_sizes)
        with pytest.raises(ConnectionError, match="link is down"):
            handle.wait()
        with pytest.raises(ConnectionError, match="link is down"):
            handle.finish()
    finally:
        dist.isend = isend


def test_failures_of_a_relay_reach_the_program() -> None:
    run(_failing_relay, 4)


def _threads_end() -> None:
    def relays() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "relay"]

    before = set(relays())
    exchange = HierarchicalAllToAll(_world(), 1)
    assert set(relays()) == before  # none before it is needed
    exchange.count(torch.ones(2, 1, dtype=torch.int64))
    started = set(relays()) - before
    assert len(started) == 1 and all(thread.daemon for thread in started)
    del exchange
    gc.collect()
    for thread in started:
        thread.join(timeout=LONG)
        assert not thread.is_alive()


def test_threads_end_with_the_exchange() -> None:
    run(_threads_end, 2)


# -- the way of NCCL, whose batches run one after the other on a stream, and match messages of two ranks by their order
# --


class _InOrder:
    """A group that is no gloo group, whose batches are over when they return."""

    def __init__(self) -> None:
        self._batch = dist.batch_isend_irecv
        self._backend = dist.get_backend

    def __enter__(self) -> None:
        def batch(ops: list[Any]) -> list[Any]:
            assert ops
            for work in self._batch(
                [op for op in ops if op.op is dist.irecv] + [op for op in ops if op.op is dist.isend]
            ):
                work.wait()
            return []

        dist.batch_isend_irecv, dist.get_backend = batch, lambda group: "nccl"

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv, dist.get_backend = self._batch, self._backend


def _batches(per_node: int) -> None:
    group = _world()
    flat = FlatAllToAll(group)
    with _InOrder():
        exchange = HierarchicalAllToAll(group, per_node)
    assert not exchange.pairwise
    for seed in range(8):
        counts = _counts(seed, flat.size)
        expected = flat.count(counts[flat.rank])
        wanted = _exchange_all(flat, expected, random.Random(seed), own=True)
        with _InOrder():
            exchange_counts = exchange.count(counts[flat.rank])
            got = _exchange_all(exchange, exchange_counts, random.Random(seed), own=True)
        assert (exchange_counts.sent, exchange_counts.received) == (expected.sent, expected.received)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), seed


@pytest.mark.parametrize("num_ranks,per_node", NODES)
def test_batches(num_ranks: int, per_node: int) -> None:
    run(_batches, num_ranks, per_node)


# -- more ranks than the pool has: threads and a mailbox, which also sees that no two messages can be taken for each
# other --


class _Mail:
    """Messages by (from, to, tag); in place of torch.distributed for ranks that are threads of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pairwise: bool) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = {}
        self._used: set[tuple[int, int, int]] = set()
        monkeypatch.setattr(dist, "get_backend", lambda group: "gloo" if pairwise else "nccl")
        monkeypatch.setattr(dist, "isend", self.isend)
        monkeypatch.setattr(dist, "irecv", self.irecv)
        monkeypatch.setattr(dist, "P2POp", self.later)
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [op() for op in ops])
        monkeypatch.setattr(hierarchical, "WORKSPACE", _NoPool())  # the pool is one thread's

    def box(self, source: int, target: int, tag: int) -> queue.SimpleQueue[torch.Tensor]:
        with self._lock:
            return self._boxes.setdefault((source, target, tag), queue.SimpleQueue())

    def isend(self, tensor: torch.Tensor, group: _Member, group_dst: int, tag: int) -> _Taken:
        key = (group.rank(), group_dst, tag)
        assert tensor.is_contiguous() and (tag < 0 or key not in self._used), key
        self._used.add(key)
        self.box(*key).put(tensor.clone())
        return _Taken(None, None)

    def irecv(self, tensor: torch.Tensor, group: _Member, group_src: int, tag: int) -> _Taken:
        assert tensor.is_contiguous()
        return _Taken(tensor, self.box(group_src, group.rank(), tag))

    def later(self, op: Any, tensor: torch.Tensor, group: _Member, group_peer: int) -> Callable[[], _Taken]:
        return lambda: self._now(op, tensor, group, group_peer)

    def _now(self, op: Any, tensor: torch.Tensor, group: _Member, group_peer: int) -> _Taken:
        # By their order alone, and all over at the end of the batch: its sends come first and never wait.
        if op == self.isend:
            return self.isend(tensor, group, group_peer, -1)
        taken = self.irecv(tensor, group, group_peer, -1)
        taken.wait()
        return _Taken(None, None)


@dataclass
class _Taken:
    tensor: torch.Tensor | None
    box: queue.SimpleQueue[torch.Tensor] | None

    def wait(self) -> None:
        if self.box is not None and self.tensor is not None:
            got = self.box.get(timeout=LONG)
            assert (got.shape, got.dtype) == (self.tensor.shape, self.tensor.dtype)
            self.tensor.copy_(got)


@dataclass(frozen=True)
class _Member:
    own_rank: int
    num_ranks: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.num_ranks


class _NoPool:
    def take(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype)

    def give(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                tensor.fill_(99)  # whoever reads it now gets wrong rows


@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize("num_ranks,per_node", [(6, 2), (6, 3), (8, 2), (9, 3)])
def test_more_ranks(monkeypatch: pytest.MonkeyPatch, num_ranks: int, per_node: int, pairwise: bool) -> None:
    _Mail(monkeypatch, pairwise)

    def expected(counts: torch.Tensor, rank: int) -> list[torch.Tensor]:
        buffers = []
        for number, (columns, back) in enumerate((columns, back) for columns in COLUMNS for back in (False, True)):
            kind, sent = KINDS[number % len(KINDS)], counts[:, :, columns].sum(dim=2)
            sent = sent.t() if back else sent
            sent_views = [
                _token_rows(source, number, int(sent[source].sum()), kind).split(sent[source].tolist())
                for source in range(num_ranks)
            ]
            buffers.append(torch.cat([sent_views[source][rank] for source in range(num_ranks)]))
        return buffers

    def on_rank(rank: int) -> None:
        exchange = HierarchicalAllToAll(_Member(rank, num_ranks), per_node)
        for seed in range(3):
            counts = _counts(seed, num_ranks)
            exchange_counts = exchange.count(counts[rank])
            assert exchange_counts.received == counts[:, rank].tolist()
            got = _exchange_all(exchange, exchange_counts, random.Random(seed), own=seed != 1)
            for number, (a, b) in enumerate(zip(got, expected(counts, rank), strict=True)):
                assert torch.equal(a, b), (seed, number)

    with ThreadPoolExecutor(num_ranks) as threads:
        list(threads.map(on_rank, range(num_ranks)))


# -- which ranks share a node ------------------------------------------------------------------------------------------


LAYOUTS: list[tuple[list[int] | None, str, list[int], int | None]] = [  # (local ranks, hosts, members, expected)
    ([0, 1, 2, 3], "aaaa", [0, 1, 2, 3], 4),
    ([0, 1, 0, 1], "aabb", [0, 1, 2, 3], 2),
    ([0, 1, 0, 1], "aaaa", [0, 1, 2, 3], 2),  # emulated nodes
    ([0, 0, 0, 0], "abcd", [0, 1, 2, 3], 1),
    ([0, 1, 0, 1], "aabb", [0, 2], 1),  # a group across the nodes
    ([0, 1, 0, 1], "aabb", [2, 3], 2),
    ([0, 1, 2, 0], "aaab", [0, 1, 2, 3], None),  # uneven
    (None, "aabb", [0, 1, 2, 3], 2),
    (None, "abab", [0, 1, 2, 3], None),  # its ranks do not follow one another
    (None, "abba", [0, 1, 2, 3], None),
]


def _nodes() -> None:
    rank, gethostname = dist.get_rank(), socket.gethostname
    try:
        for local_ranks, hosts, members, expected in LAYOUTS:
            if local_ranks is None:
                os.environ.pop("LOCAL_RANK", None)
            else:
                os.environ["LOCAL_RANK"] = str(local_ranks[rank])
            socket.gethostname = lambda hosts=hosts: hosts[rank]  # type: ignore[misc]
            group = dist.new_group(members)
            if rank in members:
                assert ranks_per_node(group) == expected, (local_ranks, hosts, members)
    finally:
        socket.gethostname = gethostname


def test_ranks_per_node() -> None:
    run(_nodes, 4)


def _wrong_nodes() -> None:
    HierarchicalAllToAll(_world(), 3)


def test_nodes_must_divide_the_group() -> None:
    with pytest.raises(RankError, match=r"ranks_per_node \(3\) must divide the group's size \(2\)"):
        run(_wrong_nodes, 2)


# -- the whole layer ---------------------------------------------------------------------------------------------------


def _cases() -> Iterator[tuple[Case, list[Plan]]]:
    every = [
        Plan(degree, degree, strategy, weight_lag=(number + degree) % (degree + 1))
        for degree in (1, 2, 3, 8)
        for number, strategy in enumerate(STRATEGIES)
    ]
    few = [Plan(2, 2), Plan(3, 2, "communicate_recompute", 1), Plan(1, 3)]
    yield Case(shared=True), every
    yield Case(top_k=4, routing="dropped", activation="gelu", bias=True), few
    yield Case(num_tokens=2, routing="one_expert"), few
    for routing in ("skewed", "empty_experts", "one_expert"):
        yield Case(routing=routing, top_k=1), few
    for dtype in ("float32", "bfloat16"):
        yield with_dtype(Case(top_k=8), dtype), few


def _all_cases_on_ranks(per_node: int) -> float:
    return check_on_ranks(_cases(), HierarchicalAllToAll(_world(), per_node))


@pytest.mark.parametrize("num_ranks,per_node", [(4, 2), (2, 1)])
def test_layer(num_ranks: int, per_node: int) -> None:
    assert max(run(_all_cases_on_ranks, num_ranks, per_node)) < 1
