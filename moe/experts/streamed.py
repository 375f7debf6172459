"""Experts whose weights lie off the device: slots of the device that layers' weights come to ahead of their use, and
the way that their gradients leave by.

In training every layer is used in every pass, in an order that is known, and so is what comes to which
slot (parallel/pipeline.py): as soon as a slot has had its last use, the next layer's weights come to it.
Where the order is not the expected one, weights come when they are asked for.

A slot is one flat range: all experts' first matrices, second matrices and biases, each from its own start on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from memory.completion import Completion, Users
from moe.experts.weights import Slab
from parallel.pipeline import SlotFill, slot_fills

MOST_WAITS = 4096  # of a stream that are held until they are added up
Arrived = Sequence[tuple[int, torch.Tensor]]  # gradients of copies that came home: slot, an expert's record in fp32


class OffDeviceTier(Protocol):
    """Where weights and gradients lie off the device: optim/tiers/expert_tier.py."""

    @property
    def first(self) -> Sequence[int]:
        """Where each kind of weight begins in a slot."""

    @property
    def adds_on_host(self) -> bool:
        """Whether micro-batches of a layer come apart: the host adds up what they leave."""

    def bring(self, layer: int, slot: torch.Tensor, free: Sequence[Completion]) -> Sequence[Completion]:
        """Have a layer's weights come to a slot once it is free."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold the same experts, and add to their gradients."""

    def add(
        self, layer: int, slot: torch.Tensor, arrived: Arrived, is_first: bool, is_last: bool
    ) -> Sequence[Completion]:
        """Add a micro-batch's gradient, in a slot in the weights' dtype, to the sum on the host; the first is written
        over what is there, and the last makes it final. When the slot is free again."""

    def sum_to(self, layer: int, slot: torch.Tensor, free: Sequence[Completion]) -> Sequence[Completion]:
        """Have the sum on the host come to a slot for gradients."""

    def finish(self, layer: int, slot: torch.Tensor) -> Sequence[Completion]:
        """A layer's gradient is complete in a slot, but for what other ranks add. When the slot is free again."""


@dataclass
class _LayerSlot:
    """Memory of the device for a layer's weights or gradients. `layer`: whose they are."""

    flat: torch.Tensor
    layer: int | None = None
    there: Sequence[Completion] = ()  # when the weights are
    used: Sequence[Completion] = ()  # when they are no longer needed, as far as passes have come
    turn: int = -1  # the last use or fill, by the stream's count of both
    users: Users = field(default_factory=Users)


@dataclass
class StreamCounts:
    """Since the run began: layers' weights that came, those that came only when they were asked for, and seconds that
    what computes has waited for them: the device's stream, where there is one, else the thread."""

    fetched: int = 0
    asked: int = 0
    waited: float = 0.0
    _spans: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=MOST_WAITS))  # events around waits

    @contextmanager
    def wait(self, device: torch.device) -> Iterator[None]:
        """Count what is waited for inside. Nobody waits for that: a stream's waits count once they are over."""
        if device.type != "cuda":
            before = time.perf_counter()
            yield
            self.waited += time.perf_counter() - before
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._spans.append((start, end))

    def add_up(self) -> None:
        """Add the waits that are over to `waited`."""
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self.waited += start.elapsed_time(end) / 1000


class ExpertStream:
    """The slots of one rank, and whose turn is next. All calls are those of the thread that computes."""

    def __init__(
        self,
        tier: OffDeviceTier,
        device: torch.device,
        dtype: torch.dtype,
        numel: int,
        num_slots: tuple[int, int],
        visits: Callable[[int, bool], Sequence[int]],
    ):
        """numel: of a slot; num_slots: for weights, for gradients; visits: the order in which layers, numbered on this
        rank, are used in passes over so many micro-batches, or in forward ones alone."""
        self.tier, self._device, self._visits = tier, device, visits
        self.slots = [_LayerSlot(torch.zeros(numel, dtype=dtype, device=device)) for _ in range(num_slots[0])]
        self.dtype, in_parts = dtype, tier.adds_on_host and not tier.is_shared
        grads = dtype if in_parts else torch.promote_types(dtype, torch.float32)
        self.grad_slots = [_LayerSlot(torch.zeros(numel, dtype=grads, device=device)) for _ in range(num_slots[1])]
        self.counts, self.num_backwards = StreamCounts(), 0
        self._plans: dict[tuple[int, bool], tuple[Sequence[int], Sequence[SlotFill]]] = {}
        self._order: Sequence[int] = ()
        self._fills: deque[SlotFill] = deque()  # to come
        self._visit, self._count = -1, 0
        self._done: dict[int, int] = {}  # backward passes of each layer

    @property
    def nbytes(self) -> int:
        """What the slots take of the device."""
        return sum(slot.flat.nbytes for slot in (*self.slots, *self.grad_slots))

    def begin_passes(self, num_micro_batches: int, forward_only: bool) -> None:
        """Weights have changed: no slot holds any. Passes over so many micro-batches are to come."""
        for slot in (*self.slots, *self.grad_slots):
            slot.layer, slot.used = None, (self.so_far(),)
        key = num_micro_batches, forward_only
        if key not in self._plans:
            visits = list(self._visits(*key))
            self._plans[key] = visits, slot_fills(visits, len(self.slots))
        self.num_backwards = 0 if forward_only else num_micro_batches
        self._order, fills = self._plans[key]
        self._fills, self._visit, self._done = deque(fills), -1, {}
        self.prefetch()

    def enter(self, layer: int) -> _LayerSlot:
        """A layer is used now: its slot, with its weights on their way."""
        here = self._order[self._visit] if 0 <= self._visit < len(self._order) else None
        if here != layer:
            self._visit += 1
            if self._visit >= len(self._order) or self._order[self._visit] != layer:
                self._order, self._visit = [layer], 0  # another order than the expected one
                self._fills.clear()
        slot = next((slot for slot in self.slots if slot.layer == layer), None)
        if slot is None:
            self.counts.asked += 1
            planned = self._fills.popleft() if self._fills else None
            slot = min(self.slots, key=lambda slot: slot.turn) if planned is None else self.slots[planned.slot]
            self._fetch(layer, slot)
        self._touch(slot)
        return slot

    def prefetch(self) -> None:
        """Have the weights of the next layers come to the slots that have had their last use before."""
        while self._fills and self._fills[0].after < max(self._visit, 0):
            fill = self._fills.popleft()
            self._fetch(fill.layer, self.slots[fill.slot])

    def _fetch(self, layer: int, slot: _LayerSlot) -> None:
        slot.layer, self.counts.fetched = layer, self.counts.fetched + 1
        # What was computed with the weights that lay there comes first.
        free = (*slot.used, *slot.there)
        slot.there = self.tier.bring(layer, slot.flat, free)
        self._touch(slot)

    def _touch(self, slot: _LayerSlot) -> None:
        slot.turn = self._count = self._count + 1

    def so_far(self) -> Completion:
        """All that this thread's current stream has been given."""
        return Completion.so_far(self._device)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def store(self, layer: int, grads: Sequence[torch.Tensor], arrived: Arrived) -> None:
        """Take a backward pass' gradients of a layer: `grads` by kind, [experts, ...] each, and after them what came of
        copies. What is complete leaves."""
        is_first, self._done[layer] = layer not in self._done, self._done.get(layer, 0) + 1
        is_last, tier = self._done[layer] == self.num_backwards, self.tier
        if tier.adds_on_host and not (is_last and tier.is_shared):
            slot = self._free_slot()
            leaving = slot.flat.view(self.dtype)[: self.slots[0].flat.numel()]
            add_to(leaving, tier.first, grads, (), over=True)
            for done in tier.add(layer, leaving, arrived, is_first, is_last):
                slot.users.add(done)
            return
        held = next((slot for slot in self.grad_slots if slot.layer == layer), None)
        slot = held or self._free_slot()
        slot.layer = layer
        if held is None and tier.adds_on_host and not is_first:
            for done in tier.sum_to(layer, slot.flat, (Completion.so_far(self._device),)):
                done.order()
        add_to(slot.flat, tier.first, grads, arrived, over=is_first)
        if is_last:
            for done in tier.finish(layer, slot.flat):
                slot.users.add(done)
            slot.layer = None

    def _free_slot(self) -> _LayerSlot:
        """The slot for gradients that is free first; what is computed from now on comes after those who had it."""
        slot = min(self.grad_slots, key=lambda slot: (slot.layer is not None, slot.users.last))
        for done in slot.users.all():
            done.order()
        return slot


def add_to(
    flat: torch.Tensor, first: Sequence[int], grads: Sequence[torch.Tensor], arrived: Arrived, over: bool
) -> None:
    """Add gradients by kind to a flat range, or write them over it, and then those of copies."""
    for start, grad in zip(first, grads, strict=True):
        part = flat[start : start + grad.numel()].view(grad.shape)
        part.copy_(grad) if over else part.add_(grad)
    for expert, record in arrived:
        begin = 0
        for start, grad in zip(first, grads, strict=True):
            numel = grad[0].numel()
            flat[start + expert * numel :][:numel] += record[begin : begin + numel]
            begin += numel


class StreamedExperts:
    """One layer's experts off the device, as its schedule uses them."""

    def __init__(self, stream: ExpertStream, layer: int, shapes: Sequence[torch.Size], activation: str):
        """layer: its number on this rank. shapes: of its weights by kind, [experts, ...]."""
        self._stream, self._layer, self._shapes, self._activation = stream, layer, shapes, activation
        self._slot: _LayerSlot | None = None

    @torch.no_grad()
    def open(self) -> Slab:
        """The layer's weights where they will be once `wait` is over, as if they were parameters."""
        slot = self._slot = self._stream.enter(self._layer)
        parts = [
            slot.flat[start : start + shape.numel()].view(shape).requires_grad_()
            for start, shape in zip(self._stream.tier.first, self._shapes, strict=True)
        ]
        fc1, fc2, fc1_bias, fc2_bias = (*parts, None, None)[:4]
        assert fc1 is not None and fc2 is not None
        return Slab(fc1, fc2, fc1_bias, fc2_bias, self._activation)

    def forget(self) -> None:
        """Weights may have changed: no slot holds any."""
        self._stream.begin_passes(0, forward_only=True)

    def fetch(self) -> None:
        """Have the next layers' weights come."""
        self._stream.prefetch()

    def wait(self) -> None:
        """What is computed from now on comes after the weights' arrival. Raises what their way raised."""
        assert self._slot is not None and self._slot.layer == self._layer
        with self._stream.counts.wait(self._slot.flat.device):
            for done in self._slot.there:
                done.order()
                if done.error is not None:
                    raise done.error

    def leave(self) -> None:
        """What is computed from now on reads no weights of the layer, until it is opened again."""
        assert self._slot is not None
        self._slot.used = (self._stream.so_far(),)

    def store(self, grads: Sequence[torch.Tensor | None], arrived: Arrived) -> None:
        """Take a backward pass' gradients: see `ExpertStream.store`."""
        self._stream.store(self._layer, [each for each in grads if each is not None], arrived)
