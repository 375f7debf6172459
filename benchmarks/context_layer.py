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

from benchmarks.accelerator import Clock
from models.attention import kernels, slices
from models.attention.dealing import Deal, deal
from models.attention.rounds import Dealt, Pieces
from models.attention.rows import BatchSlices, DealtSlices
from models.attention.sliced import SlicePlan, attend
from models.attention.slices import CAUSAL, Slices
from parallel.topology import Axis

HEADS, WIDTH, NUMBER = 1, 32, 4  # channels of keys and of values, bytes of fp32
ROW_BYTES = 2 * HEADS * WIDTH * NUMBER
FORWARD, BACKWARD = 4 * HEADS * WIDTH, 10 * HEADS * WIDTH  # operations of a pair of rows
DEALT, ZIG_ZAG = "dealt", "zig-zag"


@dataclass(frozen=True)
class Mix:
    """Documents of a sample, by their lengths, and how their rows are dealt."""

    lengths: tuple[int, ...]
    dealing: str = DEALT

    def deal(self, num_places: int) -> Deal:
        """Which rows are where."""
        lengths = np.array(self.lengths)
        return deal(lengths, num_places) if self.dealing == DEALT else zig_zag(lengths, num_places)


def zig_zag(lengths: np.ndarray, num_places: int) -> Deal:
    """Each document in twice as many chunks as there are places, the first and the last to the first place. Lengths are
    multiples of the chunks."""
    chunk = np.arange(2 * num_places)
    owner = np.repeat(
        np.tile(np.minimum(chunk, chunk[::-1]), len(lengths)), np.repeat(lengths, len(chunk)) // len(chunk)
    )
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    order = np.lexsort((first, owner[first]))
    return Deal(num_places, owner[first][order], first[order], np.diff(np.append(first, len(owner)))[order])


def zipf(tokens: int, documents: int) -> tuple[int, ...]:
    """Lengths that fall as one by their rank, in multiples of 16, in a shuffled order."""
    shares = 1 / np.arange(1, documents + 1)
    lengths = np.maximum(1, tokens // 16 * shares / shares.sum()).astype(np.int64) * 16
    lengths[0] += tokens - lengths.sum()
    return tuple(np.random.default_rng(0).permutation(lengths).tolist())


# -- what the rounds take at best --------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What each place does: pairs `[places, 2 + rounds]`, first and last those of the two parts of its own slices, and
    rows that it gets in each round from which, `[rounds, places, owners]`."""

    pairs: np.ndarray
    rows: np.ndarray

    def bytes_each_way(self) -> np.ndarray:
        """What each place gets or sends in a forward and a backward pass, the more of both, `[places]`."""
        coming, going = self.rows.sum((0, 2)) * ROW_BYTES, self.rows.sum((0, 1)) * ROW_BYTES
        return np.maximum(2 * coming + going, 2 * going + coming)

    def operations(self) -> np.ndarray:
        """What each place computes in both passes, `[places]`."""
        return self.pairs.sum(1) * (FORWARD + BACKWARD)


def work_of(mix: Mix, num_places: int) -> Work:
    """A mix's rounds."""
    found = Dealt(Pieces(np.array(mix.lengths)), mix.deal(num_places))
    by_place = [found.rounds(place) for place in range(num_places)]
    rows = np.zeros((len(by_place[0][1]), num_places, num_places), np.int64)
    for place, (_, rounds) in enumerate(by_place):
        for number, each in enumerate(rounds):
            for owner, count in each.receives.items():
                rows[number, place, owner] = count
    pairs = []
    for own, rounds in by_place:
        first, *others = own.halves()
        last = sum(each.pairs for each in others)
        pairs.append([first.pairs, *(each.slices.pairs for each in rounds), last])
    return Work(np.array(pairs), rows)


class Link:
    """Each place's way out and way in: what is ready first goes first, both ways at once."""

    def __init__(self, num_places: int, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._out, self._in = np.zeros(num_places), np.zeros(num_places)

    def send(self, source: int, target: int, num_bytes: float, ready: float) -> float:
        """When so many bytes are there that can go from `ready` on."""
        seconds = num_bytes / self._rate
        self._out[source] = max(self._out[source], ready) + seconds
        self._in[target] = max(self._in[target], ready) + seconds
        return float(max(self._out[source], self._in[target]))


def critical_path(work: Work, bytes_per_second: float, operations_per_second: float) -> float:
    """Seconds of a forward and a backward pass where nothing waits but for rows: those of a round are on their way once
    the links are free of the rounds before, and are computed with when they are there; gradients go home as soon as
    their round is over and no rows are before them."""
    start, both = np.zeros(len(work.pairs)), work.pairs.copy()
    both[:, 0], both[:, -1] = both[:, 0] + both[:, -1], 0
    link = Link(len(start), bytes_per_second)
    ends = _pass(Work(both, work.rows), link, start, FORWARD / operations_per_second)
    link = Link(len(start), bytes_per_second)
    ends = _pass(work, link, ends[:, -1], BACKWARD / operations_per_second)
    gradients = [(ends[place, number + 1], place, owner, size) for number, place, owner, size in _messages(work)]
    home = [link.send(place, owner, size, ready) for ready, place, owner, size in sorted(gradients)]
    return float(max([ends.max(), *home]))


def _pass(work: Work, link: Link, start: np.ndarray, seconds_per_pair: float) -> np.ndarray:
    """When each place is through with each part of its work, `[places, 2 + rounds]`."""
    there = np.zeros(work.pairs.shape)
    for number, place, owner, num_bytes in _messages(work):
        arrival = link.send(owner, place, num_bytes, max(start[owner], start[place]))
        there[place, number + 1] = max(there[place, number + 1], arrival)
    ends, now = np.zeros(work.pairs.shape), start
    for number in range(work.pairs.shape[1]):
        now = np.maximum(now, there[:, number]) + work.pairs[:, number] * seconds_per_pair
        ends[:, number] = now
    return ends


def _messages(work: Work) -> list[tuple[int, int, int, float]]:
    """Round, place, owner and bytes of all messages with keys, in the order of the rounds."""
    found = np.argwhere(work.rows > 0)
    return [(*map(int, each), float(work.rows[tuple(each)]) * ROW_BYTES) for each in found]  # type: ignore[misc]


# -- on the ranks ------------------------------------------------------------------------------------------------------


class VirtualKernels:
    """In place of flash attention's launches: the time of their pairs, and zeros."""

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


def _plan(mix: Mix) -> DealtSlices:
    """A rank's part of a mix, as a training makes it."""
    lengths = np.array(mix.lengths)
    first, sample = np.cumsum(lengths) - lengths, np.zeros_like(lengths)
    whole = Slices(np.full(len(lengths), CAUSAL), sample, first, lengths, first, lengths)
    group = dist.group.WORLD
    assert group is not None
    with mock.patch("models.attention.rows.deal", lambda lengths, places, **_: mix.deal(places)):
        context = Axis(dist.get_rank(), dist.get_world_size(), group)
        return DealtSlices(BatchSlices(whole, 1, int(lengths.sum())), context, heads=1)


def run(mix: Mix, operations_per_second: float) -> dict[str, float]:
    """Seconds of a forward and a backward pass of attention with keys and values [n / ranks, 1, HEADS, WIDTH]."""
    if mix not in _plans:
        _plans[mix] = _plan(mix).plan(None)
    plan, rows = _plans[mix], sum(mix.lengths) // dist.get_world_size()
    if not _inputs or len(_inputs[0]) != rows:
        _inputs[:] = [torch.zeros(rows, 1, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
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
    """The loss of a computed forward pass over ranks, and how far its outputs and gradients are from one process's."""
    found = []
    for mix in mixes:
        tokens, generator = sum(mix.lengths), torch.Generator().manual_seed(0)
        whole = [torch.randn(tokens, 1, HEADS, 16, generator=generator).requires_grad_() for _ in range(3)]
        target = torch.randn(tokens, 1, HEADS, 16, generator=generator)
        positions = np.concatenate([np.arange(each) for each in mix.lengths])[None]
        apart = BatchSlices(slices.of_documents(positions), 1, tokens)
        alone = attend(whole[0], whole[1], whole[2], apart.plan(None), 0.25)
        expected = torch.autograd.grad((alone * target).sum(), whole)
        part = _plan(mix)
        own = [each.detach()[part.rows].requires_grad_() for each in whole]
        output = attend(own[0], own[1], own[2], part.plan(None), 0.25)
        loss = (output * target[part.rows]).sum()
        grads = torch.autograd.grad(loss, own)
        total = loss.detach().clone()
        dist.all_reduce(total)
        gradients_apart = [(grad - each[part.rows]).abs().max() for grad, each in zip(grads, expected)]
        off = (output - alone[part.rows]).abs().max()
        found.append((float(total), float(off), float(torch.stack(gradients_apart).max())))
    return found
