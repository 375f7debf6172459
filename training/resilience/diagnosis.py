"""Where a number that is not finite comes from: a second pass over the same batch with every module watched."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from optim.state import named_state
from optim.tiers.buckets import WEIGHT
from parallel.megatron.random_state import place
from parallel.owned import is_off_device
from training.engine import Engine
from training.step import Batch, run_again

# What is wrong first, from cause to effect.
WEIGHTS, FORWARD, BACKWARD, LOSS = range(4)
PHASES = (
    "in the weights or the optimizer's state",
    "in the forward pass",
    "in the backward pass",
    "in its share of the loss, but not in a second pass",
)


@dataclass(frozen=True)
class Finding:
    """The first thing on a rank that is not finite. Findings are ordered by what came first; `order` counts the watched
    events."""

    phase: int
    micro_batch: int
    layer_order: int  # 0-based layer of the model, counted from the end in the backward pass
    order: int
    rank: int
    host: str
    what: str

    def __str__(self) -> str:
        when = "" if self.phase == WEIGHTS else f", micro-batch {self.micro_batch + 1}"
        return f"{self.what} on rank {self.rank} ({self.host}), {PHASES[self.phase]}{when}"

    @property
    def key(self) -> tuple[int, ...]:
        return self.phase, self.micro_batch, self.layer_order, self.order, self.rank


def find_first(engine: Engine, batches: Sequence[Batch], own_losses: torch.Tensor) -> Finding | None:
    """The first layer and rank at which a step on these batches is not finite, the same on every rank. A collective
    call.

    `own_losses`: what this rank had as its part of the step's loss. None: the second pass was fine, as after a fault of
    the hardware. Leaves gradients behind, no other trace.
    """
    found = damage(engine)
    if found is not None:
        return found
    mine = _in_passes(engine, batches)
    if mine is None and not _is_finite(own_losses):
        mine = _finding(LOSS, 0, 0, 0, "the loss")
    return _first_of_all(mine)


def damage(engine: Engine) -> Finding | None:
    """The first parameter, or part of the optimizer's state, that is not finite, the same on every rank. A collective
    call."""
    return _first_of_all(_in_weights(engine))


def _first_of_all(mine: Finding | None) -> Finding | None:
    findings: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, mine)
    found = [finding for finding in findings if finding is not None]
    return min(found, key=lambda finding: finding.key) if found else None


def _finding(phase: int, micro_batch: int, layer: int, order: int, what: str) -> Finding:
    return Finding(phase, micro_batch, layer, order, dist.get_rank(), socket.gethostname(), what)


def _in_weights(engine: Engine) -> Finding | None:
    with engine.frozen_weights():
        for chunk in engine.bare_chunks:
            for name, parameter in chunk.named_parameters():
                if not is_off_device(parameter) and not _is_finite(parameter):
                    layer, what = _name(chunk, name, engine.config.model.num_layers)
                    return _finding(WEIGHTS, 0, layer, 0, what)
    for i, name, kind, value in named_state(engine.optimizer, engine.chunks):
        if not _is_finite(value):
            chunk = engine.bare_chunks[i]
            layer, what = _name(chunk, _inside(chunk, name), engine.config.model.num_layers)
            if kind == WEIGHT:
                return _finding(WEIGHTS, 0, layer, 0, what)
            return _finding(WEIGHTS, 0, layer, 1, f"the optimizer's {kind} of {what}")
    return None


def _inside(chunk: torch.nn.Module, name: str) -> str:
    """The name in the bare chunk of a parameter that its wrappers call `module.module.NAME`."""
    own = dict(chunk.named_parameters())
    while name not in own:
        name = name.partition(".")[2]
    return name


def _in_passes(engine: Engine, batches: Sequence[Batch]) -> Finding | None:
    watch = _Watch(engine, len(batches))
    try:
        run_again(engine, batches)
    finally:
        watch.remove()
    return watch.found


class _Watch:
    """Hooks on all modules of this rank; keeps the first output or gradient that is not finite."""

    def __init__(self, engine: Engine, num_micro_batches: int):
        self._count, self._data = num_micro_batches, engine.topology.data
        self.found: Finding | None = None
        self._order = 0
        self._num_layers = engine.config.model.num_layers
        self._handles: list[Any] = []
        for chunk in engine.bare_chunks:
            for name, module in chunk.named_modules():
                self._handles.append(module.register_forward_hook(partial(self._forward, chunk, name)))
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    hook = partial(self._parameter, chunk, f"the gradient of {name}", [-1])
                    self._handles.append(parameter.register_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forward(self, chunk: torch.nn.Module, name: str, module: Any, inputs: Any, output: Any) -> None:
        self._order += 1
        going_on = place()
        assert going_on is not None, "each forward step says whose it is"
        micro_batch = going_on[1] // self._data.size
        for tensor in _tensors(output):
            if not _is_finite(tensor):
                self._keep(FORWARD, micro_batch, chunk, name or "the output", 1)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._backward, chunk, name or "the output", micro_batch))

    def _backward(self, chunk: torch.nn.Module, name: str, micro_batch: int, gradient: torch.Tensor) -> None:
        self._order += 1
        if not _is_finite(gradient):
            self._keep(BACKWARD, micro_batch, chunk, name, -1)

    def _parameter(self, chunk: torch.nn.Module, name: str, passes: list[int], gradient: torch.Tensor) -> None:
        passes[0] += 1  # by layer a shared table has a gradient from all heads before those from the embedding
        self._backward(chunk, name, passes[0] % self._count, gradient)

    def _keep(self, phase: int, micro_batch: int, chunk: torch.nn.Module, name: str, direction: int) -> None:
        if self.found is None:
            layer, what = _name(chunk, name, self._num_layers)
            self.found = _finding(phase, micro_batch, direction * layer, self._order, what)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)


def _name(chunk: torch.nn.Module, name: str, num_layers: int) -> tuple[int, str]:
    """The 0-based layer that a module or parameter is in (before all layers: -1, after them: num_layers), and it in
    words."""
    found = re.search(r"\blayers\.(\d+)\b", name)
    if found is None:
        return (-1 if "embedding" in name else num_layers), name
    layer = chunk.get_submodule(name[name.rindex(" ") + 1 if " " in name else 0 : found.end()])
    number = int(layer.layer_number)  # from 1, over the whole model
    inside = name[found.end() + 1 :]
    start = name[: name.rindex(" ") + 1] if " " in name else ""
    return number - 1, f"{start}layer {number} of {num_layers}" + (f" ({inside})" if inside else "")
