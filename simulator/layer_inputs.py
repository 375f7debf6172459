"""What layer inputs take on the device and on the host where training.activation_offload has them leave: what
memory/layer_inputs.py does in a step, counted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from parallel.pipeline import layers_of_stage, offloaded_layer_inputs, passes


@dataclass(frozen=True)
class LayerInputPlan:
    """What one rank's layer inputs take: bytes on the host, the most on the device, and copies in a step. `leaving`
    says of each forward pass of a step how many of its layers' inputs leave."""

    host: int
    device_peak: int
    copies_out: int
    copies_back: int
    leaving: tuple[int, ...]


@dataclass(eq=False)
class _PlannedInput:
    has_buffer: bool
    is_here: bool = True
    next: _PlannedInput | None = None  # whose turn in the backward pass is next


class _Step:
    """Layer inputs by number, step by step."""

    def __init__(self, buffers: int):
        self.free = buffers
        self.device = self.peak = self.copies_out = self.copies_back = 0
        self._leaving: _PlannedInput | None = None
        self._in_use = 0

    def forward(self, layers: int, before: _PlannedInput | None) -> list[_PlannedInput]:
        """A pass through the layers of a chunk; `before`: the first layer's of the micro-batch before."""
        inputs: list[_PlannedInput] = []
        for _ in range(layers):
            self._settle()
            self._add()
            kept = _PlannedInput(self.free > 0, next=inputs[-1] if inputs else None)
            inputs.append(kept)
            if kept.has_buffer:
                self.free -= 1
                self.copies_out += 1
                self._leaving = kept
        if before is not None:
            before.next = inputs[-1]
        return inputs

    def backward(self, inputs: list[_PlannedInput]) -> None:
        for kept in reversed(inputs):
            self._settle(kept)
            self._fetch(kept)
            self.free += kept.has_buffer
            self._in_use = 1
            if kept.next is not None:
                self._fetch(kept.next)

    def _settle(self, current: _PlannedInput | None = None) -> None:
        self.device -= self._in_use
        self._in_use = 0
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving is not current:
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


def layer_inputs(config: Config, world_size: int, stage: int, room: float | None = None) -> LayerInputPlan:
    """The plan of a rank of this stage. `room`: bytes of the host; by default the budget, or enough for all."""
    budget = config.memory.host_budget
    if room is None:
        room = math.inf if budget is None else budget * 2**20
    buffers = offloaded_layer_inputs(config, world_size, stage, room)
    size, layers = derived.layer_input_bytes(config), [len(chunk) for chunk in layers_of_stage(config, stage)]
    step, leaving = _Step(buffers), []
    waiting: list[deque[list[_PlannedInput]]] = [deque() for _ in layers]
    first: dict[int, _PlannedInput] = {}
    for is_forward, chunk in _passes(config, world_size, stage):
        if is_forward:
            inputs = step.forward(layers[chunk], first.get(chunk))
            first[chunk] = inputs[0]
            waiting[chunk].append(inputs)
            leaving.append(sum(kept.has_buffer for kept in inputs))
        else:
            step.backward(waiting[chunk].popleft())
    return LayerInputPlan(buffers * size, step.peak * size, step.copies_out, step.copies_back, tuple(leaving))


def _passes(config: Config, world_size: int, stage: int) -> Iterator[tuple[bool, int]]:
    return passes(config, derived.num_micro_batches(config, world_size), stage)
