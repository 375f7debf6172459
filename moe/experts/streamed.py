"""Stream offloaded experts: copy each layer's weights to the device before their use, and its gradients off the device.

In training every pass uses every layer, in a fixed order. So parallel/pipeline.py can plan which layer is copied to
which slot (a device buffer): as soon as a slot's last use is over, the next layer's weights are copied to it. If layers
run in an unplanned order, their weights are copied when they are needed.

A slot is one flat range of memory: all experts' first matrices, second matrices and biases, each kind at its own
offset.
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
from parallel.pipeline import PlannedFill, slot_fills

MOST_WAITS = 4096  # most measured waits that are stored until they are added up
Arrived = Sequence[tuple[int, torch.Tensor]]  # gradients that replicas returned: (slot of the primary, fp32 gradients)


class OffloadedWeights(Protocol):
    """Interface to the offloaded weights and gradients of a rank's experts (optim/offload/experts.py)."""

    @property
    def kind_offsets(self) -> Sequence[int]:
        """Offset in a slot, in elements, of each kind of weight: first matrices, second matrices, biases."""

    @property
    def sums_on_host(self) -> bool:
        """Return whether the host sums a layer's gradients over micro-batches, as other layers run between them."""

    def bring(self, layer: int, layer_slot: torch.Tensor, free: Sequence[Completion]) -> Sequence[Completion]:
        """Start copying a layer's weights to a slot once `free` is complete; return the completions of the copy."""

    @property
    def is_shared(self) -> bool:
        """Return whether other ranks hold the same experts, so that gradients must be summed over ranks."""

    def add(
        self, layer: int, layer_slot: torch.Tensor, arrived: Arrived, is_first: bool, is_last: bool
    ) -> Sequence[Completion]:
        """Start adding a micro-batch's gradient, in a slot in the weights' dtype, to the layer's sum on the host.

        `arrived`: gradients from replicas, which are added, too. `is_first`: the sum is overwritten. `is_last`: the sum
        is complete afterwards. Returns the completions after which the slot is free.
        """

    def sum_to(self, layer: int, layer_slot: torch.Tensor, free: Sequence[Completion]) -> Sequence[Completion]:
        """Start copying a layer's gradient sum from the host to a device slot; return the completions of the copy."""

    def finish(self, layer: int, layer_slot: torch.Tensor) -> Sequence[Completion]:
        """Start reducing a layer's gradient over ranks and storing it.

        Returns the completions after which the gradient's slot is free.
        """


@dataclass
class LayerSlot:
    """A device buffer for the weights or gradients of one layer. `layer` is the layer's number, None while empty."""

    flat: torch.Tensor
    layer: int | None = None
    there: Sequence[Completion] = ()  # completions of the copy of the weights to the slot
    used: Sequence[Completion] = ()  # completions of the passes that have read the weights
    turn: int = -1  # number of the last use or fill, counted over all slots
    users: Users = field(default_factory=Users)


@dataclass
class StreamCounts:
    """Statistics of weight streaming since the start of the run.

    `fetched`: number of copies of a layer's weights to the device. `asked`: number of these copies that started only on
    demand. `waited`: seconds for which computation waited for weights (the GPU's stream or, on a CPU, the thread).
    """

    fetched: int = 0
    asked: int = 0
    waited: float = 0.0
    _spans: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=MOST_WAITS))  # events around waits

    @contextmanager
    def wait(self, device: torch.device) -> Iterator[None]:
        """Count the time of the `with` block as waiting for weights. On a GPU, `add_up` adds the time later."""
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
        """Add the recorded times of a GPU's finished waits to `waited`."""
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self.waited += start.elapsed_time(end) / 1000


class ExpertStream:
    """The device slots of offloaded layers: weights are copied to them in a planned order, and gradients from them.

    Only the thread that computes may call its methods.
    """

    def __init__(
        self,
        offloaded: OffloadedWeights,
        device: torch.device,
        dtype: torch.dtype,
        numel: int,
        num_slots: tuple[int, int],
        visits: Callable[[int, bool], Sequence[int]],
    ):
        """`numel`: elements of a slot. `num_slots`: the number of slots for weights, and that of slots for gradients.

        `visits(num_micro_batches, forward_only)` returns the layers, numbered on this rank, in the order of their use.
        """
        self.offloaded, self._device, self._visits = offloaded, device, visits
        self.weight_slots = [LayerSlot(torch.zeros(numel, dtype=dtype, device=device)) for _ in range(num_slots[0])]
        self.dtype, per_micro_batch = dtype, offloaded.sums_on_host and not offloaded.is_shared
        grads = dtype if per_micro_batch else torch.promote_types(dtype, torch.float32)
        self.grad_slots = [LayerSlot(torch.zeros(numel, dtype=grads, device=device)) for _ in range(num_slots[1])]
        self.counts, self.num_backwards = StreamCounts(), 0
        self._plans: dict[tuple[int, bool], tuple[Sequence[int], Sequence[PlannedFill]]] = {}
        self._order: Sequence[int] = ()
        self._fills: deque[PlannedFill] = deque()  # planned copies that have not started
        self._visit, self._count = -1, 0
        self._done: dict[int, int] = {}  # backward passes of each layer

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(layer_slot.flat.nbytes for layer_slot in (*self.weight_slots, *self.grad_slots))

    def begin_passes(self, num_micro_batches: int, forward_only: bool) -> None:
        """Empty all slots, since weights have changed, and start copies for the passes of the next micro-batches."""
        for layer_slot in (*self.weight_slots, *self.grad_slots):
            layer_slot.layer, layer_slot.used = None, (Completion.so_far(self._device),)
        key = num_micro_batches, forward_only
        if key not in self._plans:
            visits = list(self._visits(*key))
            self._plans[key] = visits, slot_fills(visits, len(self.weight_slots))
        self.num_backwards = 0 if forward_only else num_micro_batches
        self._order, fills = self._plans[key]
        self._fills, self._visit, self._done = deque(fills), -1, {}
        self.prefetch()

    def enter(self, layer: int) -> LayerSlot:
        """Begin to use a layer: return its slot, which has the layer's weights or is receiving them."""
        here = self._order[self._visit] if 0 <= self._visit < len(self._order) else None
        if here != layer:
            self._visit += 1
            if self._visit >= len(self._order) or self._order[self._visit] != layer:
                self._order, self._visit = [layer], 0  # not the planned order
                self._fills.clear()
        layer_slot = next((layer_slot for layer_slot in self.weight_slots if layer_slot.layer == layer), None)
        if layer_slot is None:
            self.counts.asked += 1
            if self._fills:
                layer_slot = self.weight_slots[self._fills.popleft().slot_index]
            else:
                layer_slot = min(self.weight_slots, key=lambda layer_slot: layer_slot.turn)
            self._fetch(layer, layer_slot)
        self._touch(layer_slot)
        return layer_slot

    def prefetch(self) -> None:
        """Start copying the next layers' weights to the slots whose last planned use is over."""
        while self._fills and self._fills[0].after < max(self._visit, 0):
            fill = self._fills.popleft()
            self._fetch(fill.layer, self.weight_slots[fill.slot_index])

    def _fetch(self, layer: int, layer_slot: LayerSlot) -> None:
        layer_slot.layer, self.counts.fetched = layer, self.counts.fetched + 1
        # The copy starts after all computation with the slot's present weights.
        layer_slot.there = self.offloaded.bring(layer, layer_slot.flat, (*layer_slot.used, *layer_slot.there))
        self._touch(layer_slot)

    def _touch(self, layer_slot: LayerSlot) -> None:
        layer_slot.turn = self._count = self._count + 1

    # -- gradients ---------------------------------------------------------------------------------------------------

    def store(self, layer: int, grads: Sequence[torch.Tensor], arrived: Arrived) -> None:
        """Add a layer's gradients of one backward pass: `grads`, a tensor per kind of weight, and those from replicas.

        If the host sums gradients, each pass starts to copy them off the device; otherwise the layer's last pass of a
        step does.
        """
        is_first, self._done[layer] = layer not in self._done, self._done.get(layer, 0) + 1
        is_last, offloaded = self._done[layer] == self.num_backwards, self.offloaded
        if offloaded.sums_on_host and not (is_last and offloaded.is_shared):
            layer_slot = self._free_slot()
            leaving = layer_slot.flat.view(self.dtype)[: self.weight_slots[0].flat.numel()]
            add_to(leaving, offloaded.kind_offsets, grads, (), over=True)
            for done in offloaded.add(layer, leaving, arrived, is_first, is_last):
                layer_slot.users.add(done)
            return
        held = next((layer_slot for layer_slot in self.grad_slots if layer_slot.layer == layer), None)
        layer_slot = held or self._free_slot()
        layer_slot.layer = layer
        if held is None and offloaded.sums_on_host and not is_first:
            for done in offloaded.sum_to(layer, layer_slot.flat, (Completion.so_far(self._device),)):
                done.order()
        add_to(layer_slot.flat, offloaded.kind_offsets, grads, arrived, over=is_first)
        if is_last:
            for done in offloaded.finish(layer, layer_slot.flat):
                layer_slot.users.add(done)
            layer_slot.layer = None

    def _free_slot(self) -> LayerSlot:
        """Return the gradient slot that becomes free first, and make later computation wait for its former users."""
        layer_slot = min(self.grad_slots, key=lambda layer_slot: (layer_slot.layer is not None, layer_slot.users.last))
        for done in layer_slot.users.all():
            done.order()
        return layer_slot


def add_to(
    flat: torch.Tensor, first: Sequence[int], grads: Sequence[torch.Tensor], arrived: Arrived, over: bool
) -> None:
    """Add `grads`, one tensor per kind of weight, to a flat slot; then add the gradients `arrived` from replicas.

    `first`: the offset of each kind in the slot. `over`: `grads` overwrite the slot.
    """
    for start, grad in zip(first, grads, strict=True):
        view = flat[start : start + grad.numel()].view(grad.shape)
        view.copy_(grad) if over else view.add_(grad)
    for expert, record in arrived:
        begin = 0
        for start, grad in zip(first, grads, strict=True):
            numel = grad[0].numel()
            flat[start + expert * numel :][:numel] += record[begin : begin + numel]
            begin += numel


class StreamedExperts:
    """One layer's offloaded experts for its schedule: fetch, wait for and release weights, and store gradients."""

    def __init__(self, stream: ExpertStream, layer: int, shapes: Sequence[torch.Size], activation: str):
        """`layer`: the layer's number on this rank. `shapes`: the shape [experts, ...] of each kind of weight."""
        self._stream, self._layer, self._shapes, self._activation = stream, layer, shapes, activation
        self._layer_slot: LayerSlot | None = None

    @torch.no_grad()
    def open(self) -> Slab:
        """Return the layer's weights as views of its slot; their content is valid after `wait`."""
        layer_slot = self._layer_slot = self._stream.enter(self._layer)
        tensors = [
            layer_slot.flat[start : start + shape.numel()].view(shape).requires_grad_()
            for start, shape in zip(self._stream.offloaded.kind_offsets, self._shapes, strict=True)
        ]
        fc1, fc2, fc1_bias, fc2_bias = (*tensors, None, None)[:4]
        assert fc1 is not None and fc2 is not None
        return Slab(fc1, fc2, fc1_bias, fc2_bias, self._activation)

    def forget(self) -> None:
        """Empty all slots, since weights may have changed."""
        self._stream.begin_passes(0, forward_only=True)

    def fetch(self) -> None:
        """Start copying the next layers' weights to the device."""
        self._stream.prefetch()

    def wait(self) -> None:
        """Make later computation wait for the copy of this layer's weights. Raises the copy's error if it failed."""
        assert self._layer_slot is not None and self._layer_slot.layer == self._layer
        with self._stream.counts.wait(self._layer_slot.flat.device):
            for done in self._layer_slot.there:
                done.follow()

    def leave(self) -> None:
        """Release the layer's slot: no computation reads these weights before the next `open`."""
        assert self._layer_slot is not None
        self._layer_slot.used = (Completion.so_far(self._layer_slot.flat.device),)

    def store(self, grads: Sequence[torch.Tensor | None], arrived: Arrived) -> None:
        """Add the layer's gradients of one backward pass, and the gradients `arrived` from replicas."""
        self._stream.store(self._layer, [each for each in grads if each is not None], arrived)
