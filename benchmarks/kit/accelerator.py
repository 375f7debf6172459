"""A virtual accelerator: experts that take the time they would take at a given rate, without using a core and without a
result.

So two to four ranks on two cores have what they would have on a cluster of accelerators: a computation that leaves the
host free while it runs. Gathers, sums and communication around the experts are real. What comes out is meaningless as
numbers; whatever prints times measured with it says "virtual accelerator".
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any

import torch

from memory.pool import WORKSPACE
from moe.experts.compute import ExpertCompute
from moe.experts.sizes import SPARE_ROWS
from moe.experts.weights import ChunkInputs, GradInputs, Slab, SlabWork, WeightGrads, WeightWork

PR_SET_TIMERSLACK = 29  # <linux/prctl.h>; by default the kernel may wake us 50 microseconds late to save power


class Clock:
    """Sleeps for the time that work takes; what one sleep is late, later ones are shorter, so that the sum is right."""

    def __init__(self, flops_per_second: float) -> None:
        if not flops_per_second > 0:
            raise ValueError(f"flops_per_second={flops_per_second}: must be positive, such as 1e11")
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self.flops_per_second = flops_per_second
        self.busy_seconds = 0.0  # of work so far
        self._late = 0.0

    def work(self, flops: float) -> None:
        """Return when this number of floating-point operations would be finished."""
        seconds = flops / self.flops_per_second
        self.busy_seconds += seconds
        before = time.perf_counter()
        if seconds > self._late:
            time.sleep(seconds - self._late)
        self._late += time.perf_counter() - before - seconds


def _products(assignments: int, weights: Slab) -> float:
    """Floating-point operations of both matrix products for so many pairs."""
    return 2.0 * assignments * (weights.fc1[0].numel() + weights.fc2[0].numel())


def step_flops(assignments: int, hidden: int, width: int) -> float:
    """Return the FLOPs of the experts' forward and backward pass with SwiGLU, without recomputation."""
    return 3 * 2.0 * assignments * hidden * 3 * width


class VirtualAccelerator(ExpertCompute):
    """Takes the same buffers as the experts that compute."""

    def __init__(self, flops_per_second: float = math.inf) -> None:
        self.clock = Clock(flops_per_second)

    def forward(
        self, inputs: ChunkInputs, preactivation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        n, source = len(inputs.assignments.token_rows), inputs.source_NH
        output = WORKSPACE.take((n + SPARE_ROWS, source.size(1)), source)
        self.clock.work(_products(n, inputs.weights.primaries))
        return output, preactivation

    def input_grads(
        self, inputs: GradInputs, preactivation: torch.Tensor | None, grads: WeightGrads | None
    ) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]:
        weights, source, n = (
            inputs.chunk.weights.primaries,
            inputs.chunk.source_NH,
            len(inputs.chunk.assignments.token_rows),
        )
        input_grad = WORKSPACE.take((n + SPARE_ROWS, source.size(1)), source)
        probs_grad = WORKSPACE.take((n,), source, torch.promote_types(source.dtype, torch.float32))
        flops = _products(n, weights)
        if preactivation is None:
            flops += 2.0 * n * weights.fc1[0].numel()
        if grads is not None:
            self.clock.work(flops + _products(n, weights))
            return input_grad, probs_grad, None
        columns = weights.fc1.size(1), weights.fc2.size(2)
        buffers = [WORKSPACE.take((n + SPARE_ROWS, number), source) for number in columns]
        given = inputs.sums_grad_RH, inputs.sums_rows_n
        of_slabs = [SlabWork(slab, *given, *(each[slab.span] for each in buffers)) for slab in inputs.chunk.by_slab()]
        work = WeightWork(of_slabs, buffers)
        self.clock.work(flops)
        return input_grad, probs_grad, work

    def weight_grads(self, work: WeightWork, grads: WeightGrads) -> None:
        for slab in work.of_slabs:
            columns = slab.preactivation_grad.size(1) + slab.activated.size(1)
            self.clock.work(2.0 * len(slab.inputs.assignments.token_rows) * slab.inputs.source_NH.size(1) * columns)
            of_slab = grads.of(slab.inputs.index)
            for expert in range(len(slab.inputs.slab)):
                of_slab.mark(expert)
        work.free()


class VirtualExperts(torch.nn.Module):
    """Replaces the experts of Megatron-core's layer, with the same time for the same rows."""

    def __init__(self, flops_per_second: float, experts: Any) -> None:
        super().__init__()
        self.clock = Clock(flops_per_second)
        self.experts = experts
        # Of one row: both products, as its weights count.
        self.flops_per_row = 2.0 * sum(parameter.numel() for parameter in experts.local_experts[0].parameters())

    def forward(
        self, token_rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """See megatron.core.transformer.moe.experts.SequentialMLP."""
        return _Virtual.apply(self, token_rows, probs), None


class _Virtual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: VirtualExperts, token_rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.probs = module, probs
        output = torch.empty_like(token_rows)
        module.clock.work(module.flops_per_row * len(token_rows))
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.module.clock.work(2 * ctx.module.flops_per_row * len(output_grad))
        return None, torch.empty_like(output_grad), torch.zeros_like(ctx.probs)
