"""Slots for experts off the device: what comes to them when, and what becomes of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from memory.completion import Completion
from moe.experts.streamed import Arrived, ExpertStream, StreamedExperts
from parallel.pipeline import slot_fills

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")
SHAPES = [torch.Size([2, 3, 2]), torch.Size([2, 2, 3])]  # two experts' matrices
NUMEL, SECOND = 32, 16  # of a slot, and where the second kind begins in it


@dataclass
class _Shelf:
    """A tier whose weights of a layer are all the layer's number, and which writes down what it is asked for."""

    sums_on_host: bool = False
    is_shared: bool = False
    kind_offsets: Sequence[int] = (0, SECOND)
    said: list[tuple[object, ...]] = field(default_factory=list)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)

    def bring(self, layer: int, layer_slot: torch.Tensor, free: Sequence[Completion]) -> Sequence[Completion]:
        self.said.append(("bring", layer))
        layer_slot.fill_(layer)
        return [Completion.already()]

    def add(
        self, layer: int, layer_slot: torch.Tensor, arrived: Arrived, is_first: bool, is_last: bool
    ) -> Sequence[Completion]:
        self.said.append(("add", layer, is_first, is_last))
        self.sums[layer] = layer_slot.clone() if is_first else self.sums[layer] + layer_slot
        return [Completion.already()]

    def sum_to(self, layer: int, layer_slot: torch.Tensor, free: Sequence[Completion]) -> Sequence[Completion]:
        self.said.append(("sum_to", layer))
        layer_slot.copy_(self.sums[layer])
        return [Completion.already()]

    def finish(self, layer: int, layer_slot: torch.Tensor) -> Sequence[Completion]:
        self.said.append(("finish", layer))
        self.sums[layer] = layer_slot.clone()
        return [Completion.already()]


def _visits(layers: int, micro_batches: int, forward_only: bool) -> list[int]:
    """The order of one stage's layers; one that is used twice in a row stands once."""
    back = [] if forward_only else [*reversed(range(layers - 1))]
    return [layer for layer, _ in itertools.groupby([*range(layers), *back] * micro_batches)]


def _stream(shelf: _Shelf, layers: int, num_slots: tuple[int, int] = (2, 2)) -> ExpertStream:
    return ExpertStream(shelf, CPU, torch.float32, NUMEL, num_slots, partial(_visits, layers))


def _layer(stream: ExpertStream, number: int) -> StreamedExperts:
    return StreamedExperts(stream, number, SHAPES, "gelu")


def _use(stream: ExpertStream, number: int) -> None:
    """As a pass does: the slab, the next layers' way, then the layer's own weights."""
    experts = _layer(stream, number)
    slab = experts.open()
    experts.fetch()
    experts.wait()
    assert slab.fc1.shape == SHAPES[0] and slab.fc2.shape == SHAPES[1]
    assert bool((slab.fc1 == number).all()) and bool((slab.fc2 == number).all())


@pytest.mark.parametrize(("layers", "micro_batches", "num_slots"), itertools.product([2, 3, 6], [1, 3], [1, 2, 3, 6]))
def test_weights_come_as_often_as_the_plan_says_and_never_late(layers: int, micro_batches: int, num_slots: int) -> None:
    stream, first = _stream(_Shelf(), layers, (num_slots, 2)), 0
    for forward_only in (False, True):
        before = stream.counts.fetched
        stream.begin_passes(micro_batches, forward_only)
        order = _visits(layers, micro_batches, forward_only)
        for number in order:
            _use(stream, number)
        assert stream.counts.fetched - before == len(slot_fills(order, num_slots)), forward_only
        first += 1
    # One slot has its next layer only once it is left; the first of all comes when passes begin.
    assert stream.counts.asked == (0 if num_slots > 1 else stream.counts.fetched - first)


def test_another_order_asks_for_weights_when_they_are_used() -> None:
    stream = _stream(_Shelf(), 4)
    stream.begin_passes(1, forward_only=True)
    for number in (0, 3, 1, 1, 2):
        _use(stream, number)
    assert stream.counts.asked == 3  # 3, 1 and 2: each takes the slot that was used longest ago
    assert stream.nbytes == 2 * NUMEL * 4 + 2 * NUMEL * 4


def test_weights_that_changed_come_again() -> None:
    shelf = _Shelf()
    stream = _stream(shelf, 2)
    stream.begin_passes(1, forward_only=True)
    _use(stream, 0)
    _layer(stream, 0).forget()
    _use(stream, 0)
    assert [said for said in shelf.said if said == ("bring", 0)] == [("bring", 0)] * 2


def test_what_a_copy_raised_is_raised_where_weights_are_used() -> None:
    shelf = _Shelf()
    stream = _stream(shelf, 2)
    stream.begin_passes(1, forward_only=True)
    experts = _layer(stream, 0)
    experts.open()
    failed = Completion()
    failed.finish(error=OSError(5, "the disk is gone"))
    stream.weight_slots[0].there = stream.weight_slots[1].there = [failed]
    with pytest.raises(OSError, match="the disk is gone"):
        experts.wait()


@pytest.mark.parametrize(("sums_on_host", "is_shared"), [(False, False), (True, False), (True, True)])
def test_gradients_of_micro_batches_and_copies_add_up(sums_on_host: bool, is_shared: bool) -> None:
    shelf, micro_batches = _Shelf(sums_on_host, is_shared), 3
    stream = _stream(shelf, 2)
    stream.begin_passes(micro_batches, forward_only=False)
    shelf.said.clear()
    draw, expected = torch.Generator().manual_seed(0), torch.zeros(NUMEL)
    for _ in range(micro_batches):
        grads = [torch.randn(shape, generator=draw) for shape in SHAPES]
        for start, grad in zip(shelf.kind_offsets, grads, strict=True):
            expected[start : start + grad.numel()] += grad.reshape(-1)
        arrived: Arrived = []
        if not sums_on_host:  # what comes of a copy of expert 1: all its matrices, one after the other
            record = torch.randn(12, generator=draw)
            expected[6:12] += record[:6]
            expected[SECOND + 6 : SECOND + 12] += record[6:]
            arrived = [(1, record)]
        _layer(stream, 1).store(grads, arrived)
    assert torch.equal(shelf.sums[1], expected)
    ends = {
        (False, False): [("finish", 1)],
        (True, False): [("add", 1, True, False), ("add", 1, False, False), ("add", 1, False, True)],
        (True, True): [("add", 1, True, False), ("add", 1, False, False), ("sum_to", 1), ("finish", 1)],
    }
    assert shelf.said == ends[sums_on_host, is_shared]
