"""Routed experts with stacked weights: a forward pass, and a backward pass in two steps.

Input gradients and weight gradients are separate steps, so that a schedule can send input gradients before it computes
weight gradients. Assignments are sorted by expert. No expert has a fixed number of rows, and an expert without rows
costs nothing.

Shapes: N rows of a buffer, n assignments of a row and an expert, R rows of weighted sums, H hidden size, F width of
this rank's shard of an expert, G = 2 F for SwiGLU ([gate | up]) else F, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from memory.host_link import HostLink
from memory.pool import WORKSPACE
from moe.experts import blocks
from moe.experts.blocks import SPARE_ROWS, BlockGrads, approximate
from moe.experts.streamed import StreamedExperts
from moe.experts.weights import (
    Assignments,
    ChunkInputs,
    GradInputs,
    Slab,
    SlabGrads,
    SlabInputs,
    SlabWork,
    WeightGrads,
    WeightWork,
)
from parallel.fused import fused

# Major compute capabilities of the GPUs on which torch's grouped_mm is one kernel.
GROUPED_CAPABILITIES = (9, 10)


def grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute one matmul per group in a single call on a GPU. Group i ends at row `ends[i]` (int32, on the device)."""
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return function(left, right, offs=ends)


def is_grouped(weights: Slab) -> bool:
    """Return whether one grouped matmul computes all experts, instead of one matmul per block of an expert's rows.

    True on a GPU, except with `block_rows`. On the host a loop over blocks that stay in the cache is faster than one
    call over all rows, which leaves the activations in main memory (see BLOCK_ROWS). The first matmul alone takes 10.2
    ms with grouped_mm, 11.2 ms with one mm per expert, and 9.3 ms with bmm (equal counts only): bf16, 32 experts of
    width 256, 4096 tokens, top 4, one thread.
    """
    return weights.fc1.device.type != "cpu" and weights.block_rows is None


def needs_host_ends(weights: Slab) -> bool:
    """Return whether the host must know each expert's number of assignments.

    False on a GPU whose grouped matmul is a single kernel: in bf16, with rows of a multiple of 16 bytes. Otherwise
    torch's own loop would wait for the device in each matmul.
    """
    weight = weights.fc1
    if weight.device.type == "cpu" or weights.block_rows is not None:
        return not is_grouped(weights)
    aligned = all(size * weight.itemsize % 16 == 0 for size in (weight.size(2), weights.fc2.size(2)))
    is_one = torch.cuda.get_device_capability(weight.device)[0] in GROUPED_CAPABILITIES
    return not (is_one and aligned and weight.dtype is torch.bfloat16)


def _expert_matmul(left: torch.Tensor, right: torch.Tensor, assignments: Assignments) -> torch.Tensor:
    """Multiply each row of `left` [n, K] by its expert's matrix in `right` [E, K, M]; return [n, M]."""
    if assignments.host_ends is None:
        return grouped_mm(left, right, assignments.ends)
    result = left.new_empty(len(left), right.size(2))
    for matrix, (start, end) in zip(right, pairwise([0, *assignments.host_ends]), strict=True):
        if end > start:
            torch.mm(left[start:end], matrix, out=result[start:end])
    return result


def _outer_products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], assignments: Assignments) -> list[torch.Tensor]:
    """Return `left^T right` of each expert's rows, [E, K, M], for each pair (`left` [n, K], `right` [n, M]).

    The result of an expert without rows is zero.
    """
    if assignments.host_ends is None:
        # Some cards do not write the result of a group without rows.
        empty = _without_rows(assignments.ends)[:, None, None]
        return [grouped_mm(left.t(), right, assignments.ends).masked_fill_(empty, 0) for left, right in pairs]
    results = []
    for left, right in pairs:
        results.append(left.new_zeros(len(assignments.host_ends), left.size(1), right.size(1)))
        for out, (start, end) in zip(results[-1], pairwise([0, *assignments.host_ends]), strict=True):
            if end > start:
                torch.mm(left[start:end].t(), right[start:end], out=out)
    return results


@fused
def _without_rows(ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ends[:-1], (1, 0)) == ends


# Activation functions for the assignments of all experts, times their probabilities; in fp32 for rows of any dtype


def _activated(activation: str, wide: torch.Tensor) -> torch.Tensor:
    if activation == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(wide, approximate=approximate(activation))


@fused
def weighted_activation(activation: str, preactivation: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return the activation of `preactivation` [n, G] times each assignment's probability in `probs` [n]: [n, F]."""
    wide = preactivation.to(probs.dtype)
    return (_activated(activation, wide) * probs.unsqueeze(1)).to(preactivation.dtype)


@fused
def weighted_activation_backward(
    activation: str, preactivation: torch.Tensor, grad: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `preactivation` [n, G] and `probs` [n], and the output of `weighted_activation` [n, F].

    `grad` [n, F] is the gradient of this output.
    """
    wide, grad, column = preactivation.to(probs.dtype), grad.to(probs.dtype), probs.unsqueeze(1)
    activated = _activated(activation, wide)
    probs_grad, grad = (grad * activated).sum(dim=1), grad * column
    if activation == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        share = torch.sigmoid(gate)
        gate_grad = grad * up * share * (1 + gate * (1 - share))
        wide_grad = torch.cat([gate_grad, grad * gate * share], dim=1)
    else:
        wide_grad = torch.ops.aten.gelu_backward(grad, wide, approximate=approximate(activation))
    return wide_grad.to(preactivation.dtype), probs_grad, (activated * column).to(preactivation.dtype)


class ExpertCompute:
    """The computation of a chunk's experts, one slab (stacked weights) after the other. A benchmark may replace it.

    `link` copies offloaded activations between device and host. `streamed`: the layer's experts, if their weights are
    offloaded.
    """

    link: HostLink | None = None
    streamed: StreamedExperts | None = None

    def forward(
        self, inputs: ChunkInputs, preactivation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the expert outputs [at least n, H] and the preactivations of a chunk's n assignments.

        The first n rows of the outputs are valid; grouped experts have multiplied them by the probabilities. The caller
        returns the outputs to the workspace. The preactivations are written to `preactivation` [n + SPARE_ROWS, G] if
        it is given. Otherwise grouped experts return a new tensor [n, G], and experts in blocks return None.
        """
        source_NH, of_slabs = inputs.source_NH, inputs.by_slab()
        if is_grouped(inputs.weights.primaries):
            outputs, made = zip(*(_forward_grouped(slab, _rest(preactivation, slab)) for slab in of_slabs), strict=True)
            return _joined(outputs), _joined(made) if preactivation is None else preactivation
        output = WORKSPACE.take((len(inputs.assignments.token_rows) + SPARE_ROWS, source_NH.size(1)), source_NH)
        # A slab's first block overwrites the padding that the previous slab's last block wrote beyond its end.
        for slab in of_slabs:
            with blocks.of(slab) as of_experts:
                of_experts.forward(slab.assignments.token_rows, _rest(preactivation, slab), output[slab.span.start :])
        return output, preactivation

    def input_grads(
        self, inputs: GradInputs, preactivation: torch.Tensor | None, grads: WeightGrads | None
    ) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]:
        """Return the input gradients [at least n, H] and probability gradients [n] of a chunk's n assignments.

        The caller returns both to the workspace. The probability gradients are in fp32 or wider. `preactivation`: the
        preactivations from `forward`; None: recompute them. With `grads`, weight gradients are added to it at once,
        while everything is in the cache, and the third result is None. Without `grads`, the third result is the input
        of a later `weight_grads`.
        """
        chunk, of_slabs = inputs.chunk, inputs.chunk.by_slab()
        if is_grouped(chunk.weights.primaries):
            return _grouped_input_grads(inputs, of_slabs, preactivation, grads)
        source, n = chunk.source_NH, len(chunk.assignments.token_rows)
        input_grad = WORKSPACE.take((n + SPARE_ROWS, source.size(1)), source)
        probs_grad = WORKSPACE.take((n,), source, torch.promote_types(source.dtype, torch.float32))
        cuts = [blocks.of(slab) for slab in of_slabs]
        num_rows = n + SPARE_ROWS if grads is None else max(each.rows_of_work(later=False) for each in cuts)
        columns = chunk.weights.primaries.fc1.size(1), chunk.weights.primaries.fc2.size(2)  # G, F
        buffers = [WORKSPACE.take((num_rows, each), source) for each in columns]
        work = WeightWork([], buffers)
        for slab, cut in zip(of_slabs, cuts, strict=True):
            first, rest = slab.span.start, slice(slab.span.start, None)
            own = buffers if grads is not None else [each[first:] for each in buffers]
            work.of_slabs.append(SlabWork(slab, inputs.sums_grad_RH, inputs.sums_rows_n[slab.span], *own))
            added = None if grads is None else grads.of(slab.index)
            with cut as of_experts:
                of_experts.input_grads(
                    work.of_slabs[-1], _rest(preactivation, slab), probs_grad[slab.span], input_grad[rest], added
                )
        if grads is None:
            return input_grad, probs_grad, work
        work.free()
        return input_grad, probs_grad, None

    def weight_grads(self, work: WeightWork, grads: WeightGrads) -> None:
        """Compute one chunk's weight gradients, add them to `grads`, and free the chunk's buffers."""
        for slab_work in work.of_slabs:
            inputs = slab_work.inputs
            if is_grouped(inputs.slab):
                _weight_grads_grouped(slab_work, grads.of(inputs.index))
            elif isinstance(grads, BlockGrads):
                grads.add_blocks(slab_work)
            else:
                with blocks.of(inputs) as of_experts:
                    of_experts.weight_grads(slab_work, grads.of(inputs.index))
        work.free()


def _rest(preactivation: torch.Tensor | None, slab: SlabInputs) -> torch.Tensor | None:
    """Return a chunk's preactivations from the rows of a slab (stacked experts) on; None without preactivations."""
    return None if preactivation is None else preactivation[slab.span.start :]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def _preactivation_grouped(inputs: SlabInputs) -> torch.Tensor:
    slab, assignments = inputs.slab, inputs.assignments
    x_nH = inputs.source_NH.index_select(0, assignments.token_rows)
    preactivation_nG = _expert_matmul(x_nH, slab.fc1.transpose(1, 2), assignments)
    if slab.fc1_bias is None:
        return preactivation_nG
    return preactivation_nG.add_(slab.fc1_bias.index_select(0, assignments.experts))


def _forward_grouped(inputs: SlabInputs, preactivation: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    slab, source_NH, assignments = inputs.slab, inputs.source_NH, inputs.assignments
    if len(assignments.token_rows) == 0:
        return source_NH.new_empty(0, source_NH.size(1)), source_NH.new_empty(0, slab.fc1.size(1))
    h_nG = _preactivation_grouped(inputs)
    if preactivation is not None:
        preactivation[: len(h_nG)].copy_(h_nG)
    weighted_nF = weighted_activation(slab.activation, h_nG, assignments.probs)
    output_nH = _expert_matmul(weighted_nF, slab.fc2.transpose(1, 2), assignments)
    if slab.fc2_bias is not None:
        output_nH += slab.fc2_bias.index_select(0, assignments.experts) * assignments.probs.unsqueeze(1)
    return output_nH, h_nG


def _grouped_input_grads(
    inputs: GradInputs, of_slabs: Sequence[SlabInputs], preactivation: torch.Tensor | None, grads: WeightGrads | None
) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]:
    source, assignments = inputs.chunk.source_NH, inputs.chunk.assignments
    if len(assignments.token_rows) == 0:
        return source.new_empty(0, source.size(1)), torch.empty_like(assignments.probs), None
    with_rows = [slab for slab in of_slabs if len(slab.assignments.token_rows)]
    found = [_of_slab(inputs, slab, _rest(preactivation, slab)) for slab in with_rows]
    input_grads, probs_grads, works = zip(*found, strict=True)
    work = WeightWork(list(works), [each for slab in works for each in (slab.preactivation_grad, slab.activated)])
    if grads is not None:
        for slab_work in works:
            _weight_grads_grouped(slab_work, grads.of(slab_work.inputs.index))
        work.free()
    return _joined(input_grads), _joined(probs_grads), work if grads is None else None


def _of_slab(
    inputs: GradInputs, slab_inputs: SlabInputs, preactivation: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, SlabWork]:
    slab, assignments, rows_n = slab_inputs.slab, slab_inputs.assignments, inputs.sums_rows_n[slab_inputs.span]
    if preactivation is None:
        preactivation = _preactivation_grouped(slab_inputs)
    dy_nH = inputs.sums_grad_RH.index_select(0, rows_n)
    grad_nF = _expert_matmul(dy_nH, slab.fc2, assignments)
    h_grad_nG, probs_grad_n, weighted_nF = weighted_activation_backward(
        slab.activation, preactivation[: len(dy_nH)], grad_nF, assignments.probs
    )
    if slab.fc2_bias is not None:
        bias_nH = slab.fc2_bias.index_select(0, assignments.experts)
        probs_grad_n += (dy_nH * bias_nH).sum(dim=1, dtype=probs_grad_n.dtype)
    input_grad_nH = _expert_matmul(h_grad_nG, slab.fc1, assignments)
    return input_grad_nH, probs_grad_n, SlabWork(slab_inputs, inputs.sums_grad_RH, rows_n, h_grad_nG, weighted_nF)


def _weight_grads_grouped(work: SlabWork, grads: SlabGrads) -> None:
    assignments = work.inputs.assignments
    x_nH = work.inputs.source_NH.index_select(0, assignments.token_rows)
    dy_nH = work.sums_grad_RH.index_select(0, work.sums_rows_n)
    grads.add_all(*_outer_products([(work.preactivation_grad, x_nH), (dy_nH, work.activated)], assignments))
    if grads.fc1_bias is not None and grads.fc2_bias is not None:
        grads.fc1_bias.index_add_(0, assignments.experts, work.preactivation_grad)
        weighted_nH = dy_nH * assignments.probs.unsqueeze(1)
        grads.fc2_bias.index_add_(0, assignments.experts, weighted_nH.to(dy_nH.dtype))
