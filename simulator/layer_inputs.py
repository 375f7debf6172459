"""Bytes of layer inputs on device and host under training.activation_offload, by counting the copies of
memory/layer_inputs.py in a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from parallel.pipeline import LayerPass, layer_passes, layers_of_stage, offloaded_layer_inputs, passes


@dataclass(frozen=True)
class LayerInputPlan:
    """Memory of one rank's layer inputs: bytes on the host, peak device bytes, and copies of `size` bytes per step.

    `leaving`: number of layer inputs that each forward pass copies to the host. In a layer-wise schedule the counts
    include the gradients between layers, and `during` has the bytes on the device during each layer's pass.
    """

    host: int
    device_peak: int
    copies_out: int
    copies_back: int
    leaving: tuple[int, ...]
    during: tuple[int, ...] = ()
    size: int = 0

    @property
    def link_bytes(self) -> tuple[int, int]:
        """Bytes that a step copies to the host, and bytes that it copies back."""
        return self.copies_out * self.size, self.copies_back * self.size


@dataclass(eq=False)
class _PlannedInput:
    has_buffer: bool
    is_here: bool = True
    next: _PlannedInput | None = None  # in the order of the backward pass
    is_read_again: bool = False  # by a later pass than the one that reads it now


class _Step:
    """Simulates the layer inputs of a step: counts those on the device, and their copies to and from the host."""

    def __init__(self, buffers: int):
        self.free = buffers
        self.device = self.peak = self.copies_out = self.copies_back = 0
        self._leaving: _PlannedInput | None = None
        self._in_use: list[_PlannedInput] = []

    def forward(self, layers: int, before: _PlannedInput | None) -> list[_PlannedInput]:
        """Simulate a model chunk's forward pass, and return the inputs of its layers.

        `before`: input of the chunk's first layer in the previous micro-batch.
        """
        inputs: list[_PlannedInput] = []
        for _ in range(layers):
            kept = self.put()
            kept.next = inputs[-1] if inputs else None
            inputs.append(kept)
        if before is not None:
            before.next = inputs[-1]
        return inputs

    def backward(self, inputs: list[_PlannedInput]) -> None:
        """Simulate a backward pass through the layers that have these inputs."""
        for kept in reversed(inputs):
            self._drop_used()
            self._stay(kept)
            self._leave()
            self._read(kept)
            if kept.next is not None:
                self._fetch(kept.next)

    def put(self) -> _PlannedInput:
        """Simulate the output of a pass, which is copied to the host if a buffer is free, and read by a later pass."""
        self._drop_used()
        self._leave()
        self._add()
        kept = _PlannedInput(self.free > 0)
        if kept.has_buffer:
            self.free -= 1
            self.copies_out += 1
            self._leaving = kept
        return kept

    def take(self, wanted: Sequence[_PlannedInput], again: bool, then: Sequence[_PlannedInput]) -> None:
        """Simulate a pass that reads the tensors `wanted`, and the prefetch of `then`, which the next pass reads.

        `again`: whether a later pass reads `wanted` once more.
        """
        self._drop_used()
        for kept in wanted:
            self._stay(kept)
            self._read(kept, again)
        for kept in then:
            self._stay(kept)
            self._fetch(kept)

    def _read(self, kept: _PlannedInput, again: bool = False) -> None:
        self._fetch(kept)
        self.free += kept.has_buffer and not again
        kept.is_read_again = again
        self._in_use.append(kept)

    def _stay(self, kept: _PlannedInput) -> None:
        if self._leaving is kept:
            self._leaving = None

    def _drop_used(self) -> None:
        while self._in_use:
            used = self._in_use.pop()
            if used.has_buffer or not used.is_read_again:
                used.is_here = False
                self.device -= 1

    def _leave(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.is_here = False
            self.device -= 1

    def _fetch(self, kept: _PlannedInput) -> None:
        if not kept.is_here:
            kept.is_here = True
            self.copies_back += 1
            self._add()

    def _add(self) -> None:
        self.device += 1
        self.peak = max(self.peak, self.device)


def layer_inputs(config: Config, world_size: int, stage: int, capacity: float | None = None) -> LayerInputPlan:
    """Return the planned memory of layer inputs on a rank of this pipeline stage.

    `capacity`: host bytes; by default the config's host budget, or unlimited.
    """
    budget = config.memory.host_budget
    if capacity is None:
        capacity = math.inf if budget is None else budget * 2**20
    buffers = offloaded_layer_inputs(config, world_size, stage, capacity)
    size, layers = derived.layer_input_bytes(config), [len(chunk) for chunk in layers_of_stage(config, stage)]
    step, leaving, during = _Step(buffers), list[int](), list[int]()
    if config.training.pass_order == "by_layer":
        during = [size * n for n in _layer_wise(step, layers[0], derived.num_micro_batches(config, world_size))]
    else:
        order = passes(config, derived.num_micro_batches(config, world_size), stage)
        leaving = _micro_batch_wise(step, layers, order)
    counts = step.copies_out, step.copies_back
    return LayerInputPlan(buffers * size, step.peak * size, *counts, tuple(leaving), tuple(during), size)


def _micro_batch_wise(step: _Step, layers: Sequence[int], order: Iterable[tuple[bool, int]]) -> list[int]:
    """Simulate all passes in Megatron-core's order; return the number of inputs that each forward pass copies out."""
    leaving = []
    waiting: list[deque[list[_PlannedInput]]] = [deque() for _ in layers]
    first: dict[int, _PlannedInput] = {}
    for is_forward, chunk in order:
        if is_forward:
            inputs = step.forward(layers[chunk], first.get(chunk))
            first[chunk] = inputs[0]
            waiting[chunk].append(inputs)
            leaving.append(sum(kept.has_buffer for kept in inputs))
        else:
            step.backward(waiting[chunk].popleft())
    return leaving


def _layer_wise(step: _Step, layers: int, micro_batches: int) -> list[int]:
    """Simulate all passes in layer-wise order; return the number of tensors on the device during each pass."""
    inputs: dict[tuple[int, int], _PlannedInput] = {}
    gradients: dict[tuple[int, int], _PlannedInput] = {}
    found: list[int] = []

    def read(each: LayerPass | None) -> list[_PlannedInput]:
        of = [] if each is None else [inputs] if each.is_forward else [gradients, inputs]
        return [kept[each[1:]] for kept in of if each is not None and each[1:] in kept]

    order = [*layer_passes(layers, micro_batches)]
    for now, following in zip(order, [*order[1:], None], strict=True):
        layer, number = now[1:]
        if now.is_forward and layer == 0:
            inputs[now[1:]] = step.put()
        step.take(read(now), now.is_forward, read(following))
        found.append(step.device)
        if now.is_forward and layer + 1 < layers:
            inputs[layer + 1, number] = step.put()
        elif now.is_forward:
            gradients[now[1:]] = step.put()
        elif layer > 0:
            del inputs[now[1:]], gradients[now[1:]]
            gradients[layer - 1, number] = step.put()
    return found
