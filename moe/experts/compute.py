"""Routed experts with stacked weights: forward, and a backward pass in two parts.

Input gradients come first, weight gradients separately, so that a schedule can send the former before it computes the
latter. Rows come sorted by expert; nothing is padded, an expert without rows costs nothing.

Shapes: N rows of a buffer, n assignments of a row and an expert, R rows of weighted sums, H hidden size, F width of
this rank's part of an expert, G = 2 F for SwiGLU ([gate | up]) else F, E experts of this rank.
"""

from __future__ import annotations

import torch

from memory.pool import WORKSPACE
from moe.experts import blocks
from moe.experts.blocks import SPARE_ROWS, activate, activate_backward
from moe.experts.weights import Assignments, ChunkInputs, GradInputs, WeightGrads, Weights, WeightWork

# ---------------------------------------------------------------------------------------------------------------------
# Grouped products
# ---------------------------------------------------------------------------------------------------------------------


def grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One matrix product per group on a GPU; group i ends at row `ends[i]` (int32, on the device)."""
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return function(left, right, offs=ends)


def uses_grouped_mm(device: torch.device, dtype: torch.dtype, hidden_size: int, width: int) -> bool:
    """Whether all experts go through one grouped product, else one after the other in blocks of rows.

    torch's grouped product is a single kernel on CUDA for bf16 with rows of a multiple of 16 bytes; elsewhere it is a
    loop itself. On the host a loop over blocks that stay in the cache is faster than any one call over all rows: bf16,
    32 experts of width 256 and 4096 tokens, top 4, one thread: grouped_mm 10.2 ms, one mm per expert 11.2 ms, bmm
    (equal counts only) 9.3 ms for the first product alone; but it leaves the activations in main memory (see
    BLOCK_ROWS).
    """
    aligned = hidden_size * dtype.itemsize % 16 == 0 and width * dtype.itemsize % 16 == 0
    return device.type == "cuda" and dtype is torch.bfloat16 and aligned


def make_assignments(rows_n: torch.Tensor, counts_E: torch.Tensor, weights: Weights) -> Assignments:
    """Assignments that read these rows of a source, sorted by expert, and their number for each expert."""
    on_gpu = uses_grouped_mm(weights.fc1.device, weights.fc1.dtype, weights.fc1.size(2), weights.fc2.size(2))
    return Assignments(rows_n, counts_E, None if on_gpu else counts_E.tolist())


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward
# ---------------------------------------------------------------------------------------------------------------------


class ExpertCompute:
    """What computes a chunk's experts. A benchmark puts its own in the place of this one."""

    def forward(self, inputs: ChunkInputs, preactivation: torch.Tensor | None) -> torch.Tensor:
        """Each assignment's expert output, not yet weighted, in the first n rows of a tensor [at least n, H] from the
        workspace. `preactivation` [n + SPARE_ROWS, G], if given, receives what goes into the activation."""
        assignments, source_NH = inputs.assignments, inputs.source_NH
        if assignments.host_counts is None:
            return _forward_grouped(inputs, preactivation)
        output = WORKSPACE.take((len(assignments.rows) + SPARE_ROWS, source_NH.size(1)), source_NH)
        with blocks.of(inputs.weights, source_NH, assignments.host_counts) as of_experts:
            of_experts.forward(assignments.rows, preactivation, output)
        return output

    def input_grads(
        self, inputs: GradInputs, preactivation: torch.Tensor | None, grads: WeightGrads | None
    ) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]:
        """Gradients of each assignment's input [at least n, H] and probability [n, fp32 or wider], both from the
        workspace.

        `preactivation` is what `forward` stored; None computes it again. With `grads` the weight gradients are added at
        once, while everything is in the cache; without, the third result is the work that `weight_grads` does later.
        """
        assignments, source, weights = inputs.chunk.assignments, inputs.chunk.source_NH, inputs.chunk.weights
        if assignments.host_counts is None:
            return _input_grads_grouped(inputs, preactivation, grads)
        n = len(assignments.rows)
        input_grad = WORKSPACE.take((n + SPARE_ROWS, source.size(1)), source)
        probs_grad = WORKSPACE.take((n,), source, torch.promote_types(source.dtype, torch.float32))
        with blocks.of(weights, source, assignments.host_counts) as of_experts:
            rows = of_experts.rows_of_work(later=grads is None)
            columns = weights.fc1.size(1), weights.fc2.size(2)
            work = WeightWork(inputs, *(WORKSPACE.take((rows, number), source) for number in columns))
            of_experts.input_grads(work, preactivation, probs_grad, input_grad, grads)
        if grads is None:
            return input_grad, probs_grad, work
        work.free()
        return input_grad, probs_grad, None

    def weight_grads(self, work: WeightWork, grads: WeightGrads) -> None:
        """Add one chunk's part to the weight gradients, and free what the chunk held."""
        chunk = work.inputs.chunk
        if chunk.assignments.host_counts is None:
            _weight_grads_grouped(work, grads)
            return
        with blocks.of(chunk.weights, chunk.source_NH, chunk.assignments.host_counts) as of_experts:
            of_experts.weight_grads(work, grads)
        work.free()


def _ends(assignments: Assignments) -> torch.Tensor:
    return assignments.counts.cumsum(0).int()


def _experts_of(assignments: Assignments) -> torch.Tensor:
    experts = torch.arange(len(assignments.counts), device=assignments.rows.device)
    return torch.repeat_interleave(experts, assignments.counts, output_size=len(assignments.rows))


def _preactivation_grouped(inputs: ChunkInputs) -> torch.Tensor:
    weights, assignments = inputs.weights, inputs.assignments
    x_nH = inputs.source_NH.index_select(0, assignments.rows)
    preactivation_nG = grouped_mm(x_nH, weights.fc1.transpose(1, 2), _ends(assignments))
    if weights.fc1_bias is None:
        return preactivation_nG
    return preactivation_nG.add_(weights.fc1_bias.index_select(0, _experts_of(assignments)))


def _forward_grouped(inputs: ChunkInputs, preactivation: torch.Tensor | None) -> torch.Tensor:
    weights, source_NH, assignments = inputs.weights, inputs.source_NH, inputs.assignments
    if len(assignments.rows) == 0:
        return source_NH.new_empty(0, source_NH.size(1))
    h_nG = _preactivation_grouped(inputs)
    if preactivation is not None:
        preactivation[: len(h_nG)].copy_(h_nG)
    activated_nF = activate(weights.activation, h_nG, h_nG.new_empty(len(h_nG), weights.fc2.size(2)))
    output_nH = grouped_mm(activated_nF, weights.fc2.transpose(1, 2), _ends(assignments))
    if weights.fc2_bias is None:
        return output_nH
    return output_nH.add_(weights.fc2_bias.index_select(0, _experts_of(assignments)))


def _input_grads_grouped(
    inputs: GradInputs, preactivation: torch.Tensor | None, grads: WeightGrads | None
) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]:
    weights, source, assignments = inputs.chunk.weights, inputs.chunk.source_NH, inputs.chunk.assignments
    if len(assignments.rows) == 0:
        return source.new_empty(0, source.size(1)), source.new_empty(0, dtype=torch.float32), None
    if preactivation is None:
        preactivation = _preactivation_grouped(inputs.chunk)
    h_nG = preactivation[: len(assignments.rows)]
    dy_nH = inputs.sums_grad_RH.index_select(0, inputs.sums_rows_n)
    grad_nF = grouped_mm(dy_nH, weights.fc2, _ends(assignments))
    h_grad_nG, activated_nF = torch.empty_like(h_nG), torch.empty_like(grad_nF)
    probs_grad_n = activate_backward(weights.activation, h_nG, grad_nF, inputs.probs_n, h_grad_nG, activated_nF)
    if weights.fc2_bias is not None:
        bias_nH = weights.fc2_bias.index_select(0, _experts_of(assignments))
        probs_grad_n += (dy_nH * bias_nH).sum(dim=1, dtype=probs_grad_n.dtype)
    input_grad_nH = grouped_mm(h_grad_nG, weights.fc1, _ends(assignments))
    work = WeightWork(inputs, h_grad_nG, activated_nF)
    if grads is not None:
        _weight_grads_grouped(work, grads)
        return input_grad_nH, probs_grad_n, None
    return input_grad_nH, probs_grad_n, work


def _weight_grads_grouped(work: WeightWork, grads: WeightGrads) -> None:
    inputs, assignments = work.inputs, work.inputs.chunk.assignments
    x_nH = inputs.chunk.source_NH.index_select(0, assignments.rows)
    dy_nH = inputs.sums_grad_RH.index_select(0, inputs.sums_rows_n)
    ends = _ends(assignments)
    grads.add_all(grouped_mm(work.preactivation_grad.t(), x_nH, ends), grouped_mm(dy_nH.t(), work.activated, ends))
    if grads.fc1_bias is not None and grads.fc2_bias is not None:
        experts = _experts_of(assignments)
        grads.fc1_bias.index_add_(0, experts, work.preactivation_grad)
        grads.fc2_bias.index_add_(0, experts, dy_nH * inputs.probs_n.to(dy_nH.dtype).unsqueeze(1))
