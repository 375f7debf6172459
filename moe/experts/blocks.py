"""Experts on the host, computed in blocks of rows that stay in the cache, with torch's operations or compiled kernels.

Shapes: n assignments of a block, H hidden size, F width of this rank's shard of an expert, G = 2 F for SwiGLU
([gate | up]) else F.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from memory.pool import WORKSPACE
from moe import kernels
from moe.experts.sizes import BLOCK_ROWS, SPARE_ROWS, STEP_ROWS
from moe.experts.weights import Slab, SlabGrads, SlabInputs, SlabWork, WeightGrads, Weights, wide


class ExpertBlock(NamedTuple):
    """A block of work: the consecutive assignments [start, end) of one expert."""

    expert: int
    start: int
    end: int


def cut(counts: list[int]) -> Iterator[ExpertBlock]:
    """Split each expert's assignments into consecutive blocks of about equal size, at most BLOCK_ROWS each.

    `counts`: the number of assignments of each expert.
    """
    start = 0
    for expert, count in enumerate(counts):
        num_blocks = -(-count // BLOCK_ROWS)
        for i in range(num_blocks):
            yield ExpertBlock(expert, start + count * i // num_blocks, start + count * (i + 1) // num_blocks)
        start += count


def cut_groups(counts: list[int], num_experts: int, block_rows: int) -> Iterator[ExpertBlock]:
    """Split each group's assignments into blocks of `block_rows`; a group's last block may be shorter.

    A group is the assignments of one expert from one source rank; all experts have the same number of groups. `counts`:
    the number of assignments of each group.
    """
    start = 0
    for group, count in enumerate(counts):
        for first in range(start, start + count, block_rows):
            yield ExpertBlock(group * num_experts // len(counts), first, min(first + block_rows, start + count))
        start += count


def padded(count: int, dtype: torch.dtype) -> int:
    """Return the number of rows to compute for a block of `count` rows: a multiple of STEP_ROWS in half precision.

    For each new size oneDNN compiles a kernel, in 1.7 to 2.3 ms; the matmul itself takes 0.2 to 0.5 ms (512 x 512
    bf16). Counts change with every step, so that without padding a layer would mostly compile. With padding there are
    only 64 sizes up to 1024 rows.
    """
    return -(-count // STEP_ROWS) * STEP_ROWS if dtype in (torch.bfloat16, torch.float16) else count


def hidden_factor(activation: str) -> int:
    """Return an activation's number of input columns per output column: 2 for SwiGLU (gate and value), else 1."""
    return 2 if activation == "swiglu" else 1


def approximate(activation: str) -> str:
    """Return the `approximate` argument of torch's GELU for the activation "gelu" or "gelu_tanh"."""
    return "tanh" if activation == "gelu_tanh" else "none"


def activate(activation: str, preactivation: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Apply an activation function to `preactivation` [n, G]; write the result to `out` [n, F] and return it."""
    if kernels.has(out):
        kernels.activate(activation, preactivation, out)
        return out
    if activation == "swiglu":
        gate, up = preactivation.chunk(2, dim=1)
        return torch.ops.aten.silu.out(gate, out=out).mul_(up)
    return torch.ops.aten.gelu.out(preactivation, approximate=approximate(activation), out=out)


def activate_backward(
    activation: str,
    preactivation: torch.Tensor,
    grad: torch.Tensor,
    probs: torch.Tensor,
    out: torch.Tensor,
    activated: torch.Tensor,
) -> torch.Tensor:
    """Compute the backward pass of an activation whose output is multiplied by each assignment's probability.

    `grad` [n, F] is the gradient of the product; it may be overwritten. Fills `out` [n, G] with the gradient of
    `preactivation` and `activated` [n, F] with the product. Returns the gradient of `probs` [n], in fp32 or wider.
    """
    if kernels.has(out):
        return kernels.activate_backward(activation, preactivation, grad, probs, out, activated)
    column = probs.to(grad.dtype).unsqueeze(1)
    wide_dtype = wide(grad.dtype)
    if activation == "swiglu":
        gate, up = preactivation.chunk(2, dim=1)
        gate_grad, up_grad = out.chunk(2, dim=1)
        torch.ops.aten.silu.out(gate, out=up_grad)
        torch.mul(up_grad, up, out=activated)
        probs_grad = torch.mul(grad, activated, out=gate_grad).sum(dim=1, dtype=wide_dtype)
        grad.mul_(column)
        up_grad.mul_(grad)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=gate_grad)
    else:
        kind = approximate(activation)
        torch.ops.aten.gelu.out(preactivation, approximate=kind, out=activated)
        probs_grad = torch.mul(grad, activated, out=out).sum(dim=1, dtype=wide_dtype)
        torch.ops.aten.gelu_backward.grad_input(grad.mul_(column), preactivation, approximate=kind, grad_input=out)
    activated.mul_(column)
    return probs_grad


def are_tiled(device: str, dtype: torch.dtype, hidden_size: int, width: int) -> bool:
    """Return whether the compiled kernels compute experts of these sizes in bf16 tiles (AMX, or AVX-512 with bf16)."""
    return device == "cpu" and kernels.has_tiles(torch.empty(0, dtype=dtype), hidden_size, width)


def of(inputs: SlabInputs) -> Blocks:
    """Return a context manager that computes a slab's experts block by block, and frees scratch memory at exit."""
    slab, counts = inputs.slab, inputs.assignments.host_counts
    each = cut(counts) if slab.block_rows is None else cut_groups(counts, len(slab), slab.block_rows)
    return of_blocks(slab, inputs.source_NH, list(each))


def of_blocks(weights: Slab, source: torch.Tensor, blocks: list[ExpertBlock]) -> Blocks:
    """Return a context manager whose value computes blocks of token-expert pairs, with the compiled kernels if they
    accept the tensors, else with torch."""
    same = weights.fc1.dtype is source.dtype and weights.fc1.is_contiguous() and weights.fc2.is_contiguous()
    kind = CompiledBlocks if same and kernels.has_blocks(source, source.size(1), weights.fc2.size(2)) else TorchBlocks
    return kind(weights, source, blocks)


class Blocks(ABC):
    """A context manager that computes blocks of assignments with a slab's experts, and frees scratch memory at exit."""

    def __init__(self, weights: Slab, source: torch.Tensor, blocks: list[ExpertBlock]) -> None:
        self.weights, self.source, self._blocks = weights, source, blocks
        self.longest = max((padded(block.end - block.start, source.dtype) for block in blocks), default=0)
        self._scratch: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        WORKSPACE.give(*self._scratch.values())
        self._scratch.clear()

    @abstractmethod
    def forward(self, token_rows: torch.Tensor, preactivation: torch.Tensor | None, output: torch.Tensor) -> None:
        """Compute the outputs of all blocks; write them to `output` and, if given, preactivations to `preactivation`.

        `token_rows` [n]: the row of the source that each assignment reads.
        """

    @abstractmethod
    def input_grads(
        self,
        work: SlabWork,
        preactivation: torch.Tensor | None,
        probs_grad: torch.Tensor,
        input_grad: torch.Tensor,
        grads: SlabGrads | None,
    ) -> None:
        """Write the gradients of the probabilities to `probs_grad`, and those of the inputs to `input_grad`.

        `preactivation`: the preactivations that `forward` wrote; None: recompute them. With `grads`, weight gradients
        are added to it at once, and `work` has memory for one block. Without `grads`, this fills `work` for
        `weight_grads`.
        """

    @abstractmethod
    def weight_grads(self, work: SlabWork, grads: SlabGrads) -> None:
        """Add the weight gradients of all blocks to `grads`. `input_grads` must have filled `work`."""

    def __iter__(self) -> Iterator[ExpertBlock]:
        return iter(self._blocks)

    def rows_of_work(self, later: bool) -> int:
        """Return the number of rows that the buffers of a `SlabWork` need.

        `later`: `weight_grads` is called separately, and reads the rows of all blocks.
        """
        return sum(block.end - block.start for block in self._blocks) + SPARE_ROWS if later else self.longest

    def _scratch_rows(self, name: str, columns: int) -> torch.Tensor:
        """Return the scratch buffer [longest block, columns] with this name, allocated at its first use."""
        if name not in self._scratch:
            self._scratch[name] = WORKSPACE.take((self.longest, columns), self.source)
        return self._scratch[name]


def _linear(
    x: torch.Tensor, weight: torch.Tensor, biases: torch.Tensor | None, expert: int, out: torch.Tensor
) -> torch.Tensor:
    if biases is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(biases[expert], x, weight.t(), out=out)


class TorchBlocks(Blocks):
    """Blocks that torch's operations compute, on any host and in any precision."""

    def __init__(self, weights: Slab, source: torch.Tensor, blocks: list[ExpertBlock]) -> None:
        super().__init__(weights, source, blocks)
        self._fc1, self._fc2 = weights.fc1.unbind(0), weights.fc2.unbind(0)

    def _gather(self, name: str, source: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
        """Gather rows of `source` into the scratch buffer `name`, and pad them with zero rows."""
        scratch, length = self._scratch_rows(name, source.size(1)), padded(len(token_rows), source.dtype)
        torch.index_select(source, 0, token_rows, out=scratch[: len(token_rows)])
        if length > len(token_rows):
            scratch[len(token_rows) : length].zero_()
        return scratch[:length]

    def _preactivation(self, x_nH: torch.Tensor, expert: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Write a block's preactivations to the first rows of `out`, by default scratch memory, and return them."""
        out = self._scratch_rows("preactivation", self.weights.fc1.size(1)) if out is None else out
        return _linear(x_nH, self._fc1[expert], self.weights.fc1_bias, expert, out[: len(x_nH)])

    def forward(self, token_rows: torch.Tensor, preactivation: torch.Tensor | None, output: torch.Tensor) -> None:
        for expert, start, end in self._blocks:
            # The next block overwrites the padding that this block writes beyond its end.
            x_nH = self._gather("x", self.source, token_rows[start:end])
            h_nG = self._preactivation(x_nH, expert, None if preactivation is None else preactivation[start:])
            out_nF = self._scratch_rows("activated", self.weights.fc2.size(2))[: len(x_nH)]
            activated_nF = activate(self.weights.activation, h_nG, out_nF)
            out_nH = output[start : start + len(x_nH)]
            _linear(activated_nF, self._fc2[expert], self.weights.fc2_bias, expert, out_nH)

    def input_grads(
        self,
        work: SlabWork,
        preactivation: torch.Tensor | None,
        probs_grad: torch.Tensor,
        input_grad: torch.Tensor,
        grads: SlabGrads | None,
    ) -> None:
        for expert, start, end in self._blocks:
            count, length = end - start, padded(end - start, self.source.dtype)
            first = start if grads is None else 0
            dh_nG, a_nF = work.preactivation_grad[first : first + length], work.activated[first : first + length]
            if length > count:  # the matmuls with zero rows must add zero, not NaN
                dh_nG[count:].zero_()
                a_nF[count:].zero_()
            if preactivation is None or grads is not None:
                x_nH = self._gather("x", self.source, work.inputs.assignments.token_rows[start:end])
            h_nG = self._preactivation(x_nH, expert)[:count] if preactivation is None else preactivation[start:end]
            dy_nH = self._gather("dy", work.sums_grad_RH, work.sums_rows_n[start:end])
            grad_nF = torch.mm(dy_nH, self._fc2[expert], out=self._scratch_rows("grad", a_nF.size(1))[:length])
            probs = work.inputs.assignments.probs[start:end]
            probs_grad[start:end] = activate_backward(
                self.weights.activation, h_nG, grad_nF[:count], probs, dh_nG[:count], a_nF[:count]
            )
            if self.weights.fc2_bias is not None:
                # The weight also multiplies the bias.
                probs_grad[start:end] += torch.mv(dy_nH[:count], self.weights.fc2_bias[expert])
            torch.mm(dh_nG, self._fc1[expert], out=input_grad[start : start + length])
            if grads is not None:
                grads.add(expert, dh_nG, x_nH, dy_nH, a_nF)
                grads.add_biases(expert, dh_nG[:count], dy_nH[:count], probs)

    def weight_grads(self, work: SlabWork, grads: SlabGrads) -> None:
        for expert, start, end in self._blocks:
            x_nH = self._gather("x", self.source, work.inputs.assignments.token_rows[start:end])
            dy_nH = self._gather("dy", work.sums_grad_RH, work.sums_rows_n[start:end])
            # Rows beyond the block's end belong to the next block; they are multiplied by zeros.
            dh_nG, a_nF = work.preactivation_grad[start : start + len(x_nH)], work.activated[start : start + len(x_nH)]
            grads.add(expert, dh_nG, x_nH, dy_nH, a_nF)
            count, probs = end - start, work.inputs.assignments.probs[start:end]
            grads.add_biases(expert, dh_nG[:count], dy_nH[:count], probs)


class CompiledBlocks(Blocks):
    """Blocks that the compiled kernels compute, all in one call unless experts have biases."""

    def __init__(self, weights: Slab, source: torch.Tensor, blocks: list[ExpertBlock]) -> None:
        super().__init__(weights, source, blocks)
        self._tiled = kernels.has_tiles(source, source.size(1), weights.fc2.size(2))
        self._tile = STEP_ROWS if self._tiled else 1
        self._matrices = weights.fc1, weights.fc1_bias, weights.fc2, weights.fc2_bias, weights.activation
        self._sizes = source.size(1), weights.fc2.size(2), weights.fc1.size(1)  # H, F, G

    def rows_of_work(self, later: bool) -> int:
        """Return the rows that the buffers of a `SlabWork` need: 0 with tiles, without biases and without `later`."""
        return super().rows_of_work(later) if later or not self._tiled or self.weights.fc1_bias is not None else 0

    def _memory(self, columns: int, num_bytes: Callable[..., int], *variant: bool) -> torch.Tensor:
        """Return scratch memory for a block: [rows of the longest block, columns]; for kernels with tiles, flat uint8,
        whose size `num_bytes` returns."""
        if not self._tiled:
            return self._scratch_rows("memory", columns)
        size = num_bytes(self.longest, *self._sizes, *variant)
        self._scratch["memory"] = WORKSPACE.take((size,), self.source, torch.uint8)
        return self._scratch["memory"]

    def forward(self, token_rows: torch.Tensor, preactivation: torch.Tensor | None, output: torch.Tensor) -> None:
        size, width, outer = self._sizes
        memory = self._memory(size + width + outer * (preactivation is None), kernels.forward_bytes)
        inputs = self.source, token_rows, *self._matrices
        kernels.forward_blocks(_numbers(self._blocks), self._tile, *inputs, preactivation, output, memory)

    def input_grads(
        self,
        work: SlabWork,
        preactivation: torch.Tensor | None,
        probs_grad: torch.Tensor,
        input_grad: torch.Tensor,
        grads: SlabGrads | None,
    ) -> None:
        again, now = preactivation is None, grads is not None
        size, width, outer = self._sizes
        memory = self._memory(size * (1 + (again or now)) + width + outer * again, kernels.backward_bytes, again, now)
        given = work.inputs.assignments
        read = self.source, given.token_rows, work.sums_grad_RH, work.sums_rows_n, given.probs
        inputs = *read, *self._matrices, preactivation
        kept = (work.preactivation_grad, work.activated) if len(work.preactivation_grad) else (None, None)
        outputs = *kept, probs_grad, input_grad, *((None, None) if grads is None else (grads.fc1, grads.fc2)), memory
        if grads is None or grads.fc1_bias is None:
            kernels.backward_blocks(_numbers(self._blocks, grads), self._tile, *inputs, *outputs)
            return
        for block in self._blocks:
            kernels.backward_blocks(_numbers([block], grads), self._tile, *inputs, *outputs)
            self._add_biases(block, work, work.preactivation_grad, grads)

    def weight_grads(self, work: SlabWork, grads: SlabGrads) -> None:
        inputs = self.source, work.inputs.assignments.token_rows, work.sums_grad_RH, work.sums_rows_n
        memory = self._memory(2 * self.source.size(1), kernels.weights_bytes)
        factors = work.preactivation_grad, work.activated, grads.fc1, grads.fc2, memory
        kernels.weights_blocks(_numbers(self._blocks, grads), self._tile, *inputs, *factors)
        for block in self._blocks if grads.fc1_bias is not None else ():
            self._add_biases(block, work, work.preactivation_grad[block.start :], grads)

    @staticmethod
    def _add_biases(block: ExpertBlock, work: SlabWork, preactivation_grad: torch.Tensor, grads: SlabGrads) -> None:
        expert, start, end = block
        output_grad = work.sums_grad_RH.index_select(0, work.sums_rows_n[start:end])
        probs = work.inputs.assignments.probs[start:end]
        grads.add_biases(expert, preactivation_grad[: end - start], output_grad, probs)


def _numbers(blocks: list[ExpertBlock], grads: SlabGrads | None = None) -> list[int]:
    """Return the blocks as a flat list for the kernels: expert, start, end, and whether to add to earlier gradients.

    With `grads`, the experts' gradients are marked as written.
    """
    return [number for block in blocks for number in (*block, 0 if grads is None else int(grads.mark(block.expert)))]


Partial = list[torch.Tensor]  # one block's gradients of one expert's fc1, fc2 and biases, if there are any


class BlockGrads(WeightGrads):
    """Weight gradients that are added block by block: bitwise the same, whichever ranks compute the blocks.

    Sums are in fp32 or wider. If other ranks compute blocks of an expert, its gradients are stored per block until all
    are received.
    """

    def __init__(self, weights: Weights, shared: Collection[int] = ()) -> None:
        """`shared`: experts with blocks on other ranks; their gradients are stored per block."""
        self._weights, self._tensors = weights, weights.primaries.tensors
        self._sums = [torch.zeros_like(each, dtype=wide(each.dtype)) for each in self._tensors]
        self.partials: dict[int, list[Partial]] = {expert: [] for expert in shared}

    def add_blocks(self, work: SlabWork) -> None:
        """Compute the weight gradients of each block of a slab in one chunk; add them to the sums, or store them."""
        inputs = work.inputs
        first = sum(map(len, self._weights.slabs[: inputs.index]))
        slab = replace(inputs.slab, block_rows=None)
        for index, start, end in of(inputs):
            one = slab.like(*(each[index : index + 1] for each in slab.tensors))
            grads, expert = SlabGrads(one, at_once=False), first + index
            with of_blocks(one, inputs.source_NH, [ExpertBlock(0, start, end)]) as of_block:
                of_block.weight_grads(work, grads)
            partial = [each[0] for each in grads.finish() if each is not None]
            if expert in self.partials:
                self.partials[expert].append(partial)
            else:
                self.add_partial(expert, partial)

    def empty_partial(self) -> Partial:
        """Return uninitialized tensors for the gradients that one block contributes to an expert's weights."""
        return [torch.empty_like(each[0]) for each in self._tensors]

    def add_partial(self, expert: int, partial: Partial) -> None:
        """Add one block's gradients to the sums of an expert whose primary is on this rank."""
        for total, grad in zip(self._sums, partial, strict=True):
            total[expert] += grad

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        fc1, fc2, *biases = (total.to(each.dtype) for total, each in zip(self._sums, self._tensors, strict=True))
        fc1_bias, fc2_bias = biases or (None, None)
        return fc1, fc2, fc1_bias, fc2_bias
