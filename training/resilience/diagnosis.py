"""Find where a non-finite number first occurs, by a second pass over the same batch with hooks on every module."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from optim.offload.records import WEIGHT
from optim.state import named_state
from parallel.megatron.random_state import current_pass
from parallel.owned import is_off_device
from training.engine import Engine
from training.step import Batch, run_again

# Phases of a step, from cause to effect.
WEIGHTS, FORWARD, BACKWARD, LOSS = range(4)
PHASES = (
    "in the weights or the optimizer's state",
    "in the forward pass",
    "in the backward pass",
    "in its share of the loss, but not in a second pass",
)


@dataclass(frozen=True)
class Finding:
    """The first non-finite tensor on a rank. `key` sorts findings by the time at which they occur in a step."""

    phase: int
    micro_batch: int
    layer_order: int  # 0-based layer of the model, counted from the end in the backward pass
    order: int  # hook calls before this one
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
    """Repeat a step's passes on these batches, and return the first layer and rank with a non-finite number, equal on
    every rank. Returns None if the second pass is finite, such as after a transient hardware fault. A collective call;
    changes only gradients. `own_losses`: this rank's contribution to the loss of the first pass."""
    found = damage(engine)
    if found is not None:
        return found
    watch = _Watch(engine, len(batches))
    try:
        run_again(engine, batches)
    finally:
        for handle in watch.handles:
            handle.remove()
    mine = watch.found
    if mine is None and not _is_finite(own_losses):
        mine = _finding(LOSS, 0, 0, 0, "the loss")
    return _first_of_all(mine)


def damage(engine: Engine) -> Finding | None:
    """Return the first parameter or optimizer state that is not finite, equal on every rank; None if all are finite. A
    collective call."""
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
            own = dict(chunk.named_parameters())
            while name not in own:  # the chunk's wrappers call it module.module.NAME
                name = name.partition(".")[2]
            layer, what = _name(chunk, name, engine.config.model.num_layers)
            order, text = (0, what) if kind == WEIGHT else (1, f"the optimizer's {kind} of {what}")
            return _finding(WEIGHTS, 0, layer, order, text)
    return None


class _Watch:
    """Hooks on all modules of this rank that record the first output or gradient that is not finite."""

    def __init__(self, engine: Engine, num_micro_batches: int):
        self._count, self._data = num_micro_batches, engine.topology.data
        self.found: Finding | None = None
        self._order = 0
        self._num_layers = engine.config.model.num_layers
        self.handles: list[Any] = []  # of the hooks, to remove them
        for chunk in engine.bare_chunks:
            for name, module in chunk.named_modules():
                self.handles.append(module.register_forward_hook(partial(self._forward, chunk, name)))
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    hook = partial(self._parameter, chunk, f"the gradient of {name}", [-1])
                    self.handles.append(parameter.register_hook(hook))

    def _forward(self, chunk: torch.nn.Module, name: str, module: Any, inputs: Any, output: Any) -> None:
        self._order += 1
        going_on = current_pass()
        assert going_on is not None, "each forward step sets its samples"
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
        passes[0] += 1  # layer-wise, a shared table gets the gradients of all heads before those of the embedding
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
    """Return the 0-based layer of a module or parameter (-1 before the first layer, num_layers after the last), and a
    phrase that describes the module or parameter."""
    found = re.search(r"\blayers\.(\d+)\b", name)
    if found is None:
        return (-1 if "embedding" in name else num_layers), name
    begin = name.rfind(" ") + 1  # of the path, after a phrase such as "the gradient of"
    number = int(chunk.get_submodule(name[begin : found.end()]).layer_number)  # from 1, over the whole model
    inside = name[found.end() + 1 :]
    return number - 1, f"{name[:begin]}layer {number} of {num_layers}" + (f" ({inside})" if inside else "")
