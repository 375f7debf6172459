"""A rank's side of context_exchange.py: attention over context ranks whose kernels take a virtual accelerator's time,
and the time that its rounds would take at best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.kit.accelerator import Clock
from models.attention import kernels, mask_slices
from models.attention.exchange_rounds import ExchangeSchedule, Segments
from models.attention.mask_slices import CAUSAL, Slices
from models.attention.sequence_rows import BatchSlices, ShardedSlices
from models.attention.sequence_sharding import SequenceSharding, shard_sequence
from models.attention.slice_attention import SlicePlan, attend
from parallel.topology import Axis

HEADS, WIDTH, NUMBER = 1, 32, 4  # channels of keys and of values, bytes of fp32
ROW_BYTES = 2 * HEADS * WIDTH * NUMBER
FORWARD, BACKWARD = 4 * HEADS * WIDTH, 10 * HEADS * WIDTH  # operations of a pair of rows
BALANCED, ZIG_ZAG = "balanced", "zig-zag"


@dataclass(frozen=True)
class Mix:
    """The lengths of the documents of a sample, and how their rows are sharded."""

    lengths: tuple[int, ...]
    sharding: str = BALANCED

    def shard(self, cp_size: int) -> SequenceSharding:
        """Return the rows that each rank has."""
        lengths = np.array(self.lengths)
        return shard_sequence(lengths, cp_size) if self.sharding == BALANCED else zig_zag(lengths, cp_size)


def zig_zag(lengths: np.ndarray, cp_size: int) -> SequenceSharding:
    """Return the sharding of each document in twice as many chunks as there are ranks, the first and the last on the
    first rank. Lengths are multiples of the chunks."""
    chunk = np.arange(2 * cp_size)
    owner = np.repeat(
        np.tile(np.minimum(chunk, chunk[::-1]), len(lengths)), np.repeat(lengths, len(chunk)) // len(chunk)
    )
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    order = np.lexsort((first, owner[first]))
    return SequenceSharding(cp_size, owner[first][order], first[order], np.diff(np.append(first, len(owner)))[order])


def zipf(tokens: int, documents: int) -> tuple[int, ...]:
    """Return lengths that fall as one by their rank, in multiples of 16, in a shuffled order."""
    shares = 1 / np.arange(1, documents + 1)
    lengths = np.maximum(1, tokens // 16 * shares / shares.sum()).astype(np.int64) * 16
    lengths[0] += tokens - lengths.sum()
    return tuple(np.random.default_rng(0).permutation(lengths).tolist())


# -- what the rounds take at best --------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The work of each rank: pairs `[ranks, 2 + rounds]`, first and last those of the two halves of its own slices, and
    the rows that it receives in each round from each owner, `[rounds, ranks, owners]`."""

    pairs: np.ndarray
    received: np.ndarray

    def bytes_each_way(self) -> np.ndarray:
        """Return the bytes that each rank receives or sends, whichever is more, in a forward and a backward pass,
        `[ranks]`."""
        coming, going = self.received.sum((0, 2)) * ROW_BYTES, self.received.sum((0, 1)) * ROW_BYTES
        return np.maximum(2 * coming + going, 2 * going + coming)

    def operations(self) -> np.ndarray:
        """Return the operations of each rank in both passes, `[ranks]`."""
        return self.pairs.sum(1) * (FORWARD + BACKWARD)


def work_of(mix: Mix, cp_size: int) -> Work:
    """Return the work of a mix's rounds."""
    found = ExchangeSchedule(Segments(np.array(mix.lengths)), mix.shard(cp_size))
    by_rank = [found.rounds(cp_rank) for cp_rank in range(cp_size)]
    received = np.zeros((len(by_rank[0][1]), cp_size, cp_size), np.int64)
    for cp_rank, (_, rounds) in enumerate(by_rank):
        for number, each in enumerate(rounds):
            for owner, count in each.receives.items():
                received[number, cp_rank, owner] = count
    pairs = []
    for own, rounds in by_rank:
        first, *others = own.halves()
        last = sum(each.pairs for each in others)
        pairs.append([first.pairs, *(each.slices.pairs for each in rounds), last])
    return Work(np.array(pairs), received)


class Link:
    """Each rank's outgoing and incoming link: messages are sent in the order in which they are ready, in both
    directions at once."""

    def __init__(self, cp_size: int, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._out, self._in = np.zeros(cp_size), np.zeros(cp_size)

    def send(self, source: int, target: int, num_bytes: float, ready: float) -> float:
        """Return the time at which a message arrives that can leave from `ready` on."""
        seconds = num_bytes / self._rate
        self._out[source] = max(self._out[source], ready) + seconds
        self._in[target] = max(self._in[target], ready) + seconds
        return float(max(self._out[source], self._in[target]))


def critical_path(work: Work, bytes_per_second: float, operations_per_second: float) -> float:
    """Return the seconds of a forward and a backward pass if nothing waits except for rows: a round's rows leave once
    the links are free of earlier rounds, and are used when they arrive; gradients return as soon as their round is over
    and no rows precede them."""
    start, both = np.zeros(len(work.pairs)), work.pairs.copy()
    both[:, 0], both[:, -1] = both[:, 0] + both[:, -1], 0
    link = Link(len(start), bytes_per_second)
    ends = _pass(Work(both, work.received), link, start, FORWARD / operations_per_second)
    link = Link(len(start), bytes_per_second)
    ends = _pass(work, link, ends[:, -1], BACKWARD / operations_per_second)
    gradients = [(ends[cp_rank, number + 1], cp_rank, owner, size) for number, cp_rank, owner, size in _messages(work)]
    home = [link.send(cp_rank, owner, size, ready) for ready, cp_rank, owner, size in sorted(gradients)]
    return float(max([ends.max(), *home]))


def _pass(work: Work, link: Link, start: np.ndarray, seconds_per_pair: float) -> np.ndarray:
    """Return the time at which each rank finishes each section of its work, `[ranks, 2 + rounds]`."""
    there = np.zeros(work.pairs.shape)
    for number, cp_rank, owner, num_bytes in _messages(work):
        arrival = link.send(owner, cp_rank, num_bytes, max(start[owner], start[cp_rank]))
        there[cp_rank, number + 1] = max(there[cp_rank, number + 1], arrival)
    ends, now = np.zeros(work.pairs.shape), start
    for number in range(work.pairs.shape[1]):
        now = np.maximum(now, there[:, number]) + work.pairs[:, number] * seconds_per_pair
        ends[:, number] = now
    return ends


def _messages(work: Work) -> list[tuple[int, int, int, float]]:
    """Return round, rank, owner and bytes of all messages with keys, in the order of the rounds."""
    found = np.argwhere(work.received > 0)
    return [(*map(int, each), float(work.received[tuple(each)]) * ROW_BYTES) for each in found]  # type: ignore[misc]


# -- on the ranks ------------------------------------------------------------------------------------------------------


class VirtualKernels:
    """Replacement of flash attention's launches: they take the time of their pairs and return zeros."""

    def __init__(self, operations_per_second: float) -> None:
        self._clock = Clock(operations_per_second)
        self._pairs: dict[int, int] = {}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: kernels.Lengths,
        causal: bool,
        scale: float,
    ) -> kernels.Found:
        """See models.attention.kernels.launch_forward."""
        self._clock.work(FORWARD * self._count(lengths, causal))
        t, n = query.shape[:2]
        return query.new_zeros(1).expand(t, n, value.size(2)), query.new_zeros(1).expand(n, t), ()

    def backward(
        self,
        grad: torch.Tensor,
        inputs: kernels.Triple,
        result: kernels.Found,
        lengths: kernels.Lengths,
        causal: bool,
        scale: float,
    ) -> kernels.Triple:
        """See models.attention.kernels.launch_backward."""
        self._clock.work(BACKWARD * self._count(lengths, causal))
        return tuple(each.new_zeros(1).expand(each.shape) for each in inputs)  # type: ignore[return-value]

    def _count(self, lengths: kernels.Lengths, causal: bool) -> int:
        key = id(lengths.queries)
        if key not in self._pairs:
            queries, keys = (np.diff(each.numpy().astype(np.int64)) for each in lengths[:2])
            self._pairs[key] = int((queries * (queries + 1) // 2 if causal else queries * keys).sum())
        return self._pairs[key]


_plans: dict[Mix, SlicePlan] = {}
_inputs: list[torch.Tensor] = []


def _plan(mix: Mix) -> ShardedSlices:
    """Return a rank's share of a mix, as a training makes it."""
    lengths = np.array(mix.lengths)
    first, sample = np.cumsum(lengths) - lengths, np.zeros_like(lengths)
    whole = Slices(np.full(len(lengths), CAUSAL), sample, first, lengths, first, lengths)
    group = dist.group.WORLD
    assert group is not None
    with mock.patch("models.attention.sequence_rows.shard_sequence", lambda lengths, cp_size, **_: mix.shard(cp_size)):
        context = Axis(dist.get_rank(), dist.get_world_size(), group)
        return ShardedSlices(BatchSlices(whole, 1, int(lengths.sum())), context, heads=1)


def run(mix: Mix, operations_per_second: float) -> dict[str, float]:
    """Return the seconds of a forward and a backward pass of attention with keys and values [n / ranks, 1, HEADS,
    WIDTH]."""
    if mix not in _plans:
        _plans[mix] = _plan(mix).plan(None)
    plan, num_rows = _plans[mix], sum(mix.lengths) // dist.get_world_size()
    if not _inputs or len(_inputs[0]) != num_rows:
        _inputs[:] = [torch.zeros(num_rows, 1, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    virtual = VirtualKernels(operations_per_second)
    with (
        mock.patch.object(kernels, "takes_launches", lambda query, value: True),
        mock.patch.object(kernels, "launch_forward", virtual.forward),
        mock.patch.object(kernels, "launch_backward", virtual.backward),
    ):
        before = time.perf_counter()
        output = attend(_inputs[0], _inputs[1], _inputs[2], plan, 1.0)
        torch.autograd.grad(output, _inputs, torch.zeros(1).expand_as(output))
        return {"step": time.perf_counter() - before}


def outputs(mixes: Sequence[Mix]) -> list[tuple[float, float, float]]:
    """Return the loss of a computed forward pass over ranks, and the largest differences of outputs and gradients from
    one process's."""
    found = []
    for mix in mixes:
        tokens, generator = sum(mix.lengths), torch.Generator().manual_seed(0)
        whole = [torch.randn(tokens, 1, HEADS, 16, generator=generator).requires_grad_() for _ in range(3)]
        target = torch.randn(tokens, 1, HEADS, 16, generator=generator)
        positions = np.concatenate([np.arange(each) for each in mix.lengths])[None]
        whole_slices = BatchSlices(mask_slices.of_documents(positions), 1, tokens)
        alone = attend(whole[0], whole[1], whole[2], whole_slices.plan(None), 0.25)
        expected = torch.autograd.grad((alone * target).sum(), whole)
        sharded = _plan(mix)
        own = [each.detach()[sharded.sequence_rows].requires_grad_() for each in whole]
        output = attend(own[0], own[1], own[2], sharded.plan(None), 0.25)
        loss = (output * target[sharded.sequence_rows]).sum()
        grads = torch.autograd.grad(loss, own)
        total = loss.detach().clone()
        dist.all_reduce(total)
        gradient_differences = [(grad - each[sharded.sequence_rows]).abs().max() for grad, each in zip(grads, expected)]
        off = (output - alone[sharded.sequence_rows]).abs().max()
        found.append((float(total), float(off), float(torch.stack(gradient_differences).max())))
    return found
