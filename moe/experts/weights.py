"""Inputs and results of a layer's experts: stacked weights, assignments, and gradients.

Shapes: N rows of a buffer, n assignments of a row and an expert, R rows of weighted sums, H hidden size, F width of
this rank's shard of an expert, G = 2 F for SwiGLU ([gate | up]) else F, E experts of this rank, n also experts of a
slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from memory.pool import WORKSPACE


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of weight gradients: fp32 or, for wider weights, the weights' `dtype`."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Slab:
    """A slab: the stacked weights of several experts, and their activation function (swiglu, gelu or gelu_tanh).

    With `block_rows`, an expert computes blocks of this many assignments from one source rank. The weight gradients of
    each block are added separately (BlockGrads), so that no sum depends on which rank computes a block. Assignments are
    then sorted by group; a group is the assignments of one expert from one source rank.
    """

    fc1: torch.Tensor  # [n, G, H]
    fc2: torch.Tensor  # [n, H, F]
    fc1_bias: torch.Tensor | None  # [n, G]
    fc2_bias: torch.Tensor | None  # [n, H]
    activation: str
    block_rows: int | None = None

    def __len__(self) -> int:
        return len(self.fc1)

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Both matrices and both biases, with their autograd graph; None for a missing bias."""
        return self.fc1, self.fc2, self.fc1_bias, self.fc2_bias

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The matrices and existing biases, stacked over experts, without their autograd graph."""
        return [each.detach() for each in self.given]

    @property
    def given(self) -> list[torch.Tensor]:
        """The matrices and existing biases, with their autograd graph."""
        return [each for each in self.parameters if each is not None]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return sum(each[0].nbytes for each in self.tensors)

    @property
    def grad_bytes(self) -> int:
        """Bytes of one expert's gradient in a message: in fp32 or wider; with `block_rows`, in the weights' dtype."""
        size = wide(self.fc1.dtype).itemsize
        return self.expert_bytes if self.block_rows is not None else self.expert_bytes // self.fc1.itemsize * size

    def like(self, fc1: torch.Tensor, fc2: torch.Tensor, *biases: torch.Tensor) -> Slab:
        """Return a copy of this slab with different matrices and biases."""
        fc1_bias, fc2_bias = biases or (None, None)
        return replace(self, fc1=fc1, fc2=fc2, fc1_bias=fc1_bias, fc2_bias=fc2_bias)


@dataclass(frozen=True)
class Weights:
    """A layer's expert weights on this rank: slabs with consecutive expert numbers, the primaries' slab first."""

    slabs: tuple[Slab, ...]

    @property
    def primaries(self) -> Slab:
        return self.slabs[0]

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.slabs))


@dataclass(frozen=True)
class Assignments:
    """Assignments of token rows to experts, sorted by expert, or by group if `Slab.block_rows` is set."""

    token_rows: torch.Tensor  # [n] int64: the row of the source that an assignment reads
    probs: torch.Tensor  # [n] fp32 or wider: the factor of its output
    ends: torch.Tensor  # [E] int32 on the device: the end of each expert's assignments
    host_ends: list[int] | None  # `ends` on the host; None if the matmuls do not need it
    num_primary_assignments: int | None = None  # assignments of primaries, if the host knows only this number

    @property
    def experts(self) -> torch.Tensor:
        """The expert of each assignment, numbered in its slab: int32 [n]."""
        numbers = torch.arange(len(self.token_rows), dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, numbers, right=True, out_int32=True)

    @property
    def host_counts(self) -> list[int]:
        """The number of assignments of each expert (or group)."""
        assert self.host_ends is not None
        return [end - start for start, end in pairwise([0, *self.host_ends])]

    def of_groups(self, groups: slice, start: int, end: int) -> Assignments:
        """Return the assignments [start, end), which belong to the consecutive experts (or groups) `groups`."""
        if end - start == len(self.token_rows) and groups.stop - groups.start == len(self.ends):
            return self
        ends = self.ends[groups]
        host = None if self.host_ends is None else [each - start for each in self.host_ends[groups]]
        return Assignments(self.token_rows[start:end], self.probs[start:end], ends - start if start else ends, host)


@dataclass(frozen=True)
class SlabInputs:
    """The inputs of one slab's experts in a chunk."""

    index: int  # of the slab
    slab: Slab
    source_NH: torch.Tensor
    assignments: Assignments
    span: slice  # the range of these assignments in the chunk


@dataclass(frozen=True)
class ChunkInputs:
    """The inputs of all experts of a chunk: weights, source rows and assignments."""

    weights: Weights
    source_NH: torch.Tensor
    assignments: Assignments

    def by_slab(self) -> list[SlabInputs]:
        """Return the inputs of the first slab, and of each later slab that has assignments."""
        slabs, given = self.weights.slabs, self.assignments
        each = len(given.ends) // self.weights.num_experts  # groups of an expert
        last = list(accumulate(each * len(slab) for slab in slabs))  # groups up to each slab's end
        if given.host_ends is not None:
            ends = [given.host_ends[group - 1] if group else 0 for group in last]
        elif len(slabs) == 1:
            ends = [len(given.token_rows)]
        else:
            assert given.num_primary_assignments is not None and len(slabs) == 2, (
                "the host knows only the number of the primaries' assignments"
            )
            ends = [given.num_primary_assignments, len(given.token_rows)]
        found, first, start = [], 0, 0
        for index, (slab, group, end) in enumerate(zip(slabs, last, ends, strict=True)):
            if end > start or index == 0:
                assignments = given.of_groups(slice(first, group), start, end)
                found.append(SlabInputs(index, slab, self.source_NH, assignments, slice(start, end)))
            first, start = group, end
        return found


@dataclass(frozen=True)
class GradInputs:
    """The inputs of a chunk's backward pass, except the preactivations."""

    chunk: ChunkInputs
    sums_grad_RH: torch.Tensor  # gradients of the weighted sums
    sums_rows_n: torch.Tensor  # each assignment's row of `sums_grad_RH`


@dataclass
class SlabWork:
    """The inputs of one slab's weight gradients in a chunk, stored until the gradients are computed."""

    inputs: SlabInputs
    sums_grad_RH: torch.Tensor
    sums_rows_n: torch.Tensor
    preactivation_grad: torch.Tensor  # [at least n, G]
    activated: torch.Tensor  # [at least n, F] times the assignment's probability


@dataclass
class WeightWork:
    """The inputs of a chunk's weight gradients, and their buffers, stored until the gradients are computed."""

    of_slabs: list[SlabWork]
    buffers: Sequence[torch.Tensor]  # the memory of the slabs' tensors

    def free(self) -> None:
        """Return the buffers to the workspace. `ExpertCompute.weight_grads` does this itself."""
        WORKSPACE.give(*self.buffers)


class SlabGrads:
    """Sums of one slab's weight gradients: an expert's first contribution is written, and later ones are added."""

    def __init__(self, weights: Slab, at_once: bool = True) -> None:
        """`at_once`: on a GPU, one grouped matmul computes the gradients of all experts, and allocates their memory."""
        matrices = weights.fc1, weights.fc2
        if weights.fc1.device.type == "cpu" or not at_once:
            self.fc1, self.fc2 = (WORKSPACE.lend(matrix.shape, matrix) for matrix in matrices)
        else:  # the first matmul allocates them, if there is one
            self.fc1, self.fc2 = (matrix.new_empty(0) for matrix in matrices)
        self._matrices = matrices
        self.fc1_bias = None if weights.fc1_bias is None else torch.zeros_like(weights.fc1_bias)
        self.fc2_bias = None if weights.fc2_bias is None else torch.zeros_like(weights.fc2_bias)
        self._written = [False] * len(weights.fc1)
        self._views = (self.fc1.unbind(0), self.fc2.unbind(0)) if len(self.fc1) else ((), ())

    def add(
        self,
        expert: int,
        preactivation_grad: torch.Tensor,
        x: torch.Tensor,
        output_grad: torch.Tensor,
        activated: torch.Tensor,
    ) -> None:
        """Add `preactivation_grad^T x` and `output_grad^T activated` to an expert's gradients of fc1 and fc2."""
        written, gradients = self.mark(expert), (views[expert] for views in self._views)
        for gradient, left, right in zip(gradients, (preactivation_grad, output_grad), (x, activated), strict=True):
            if written:
                torch.addmm(gradient, left.t(), right, out=gradient)
            else:
                torch.mm(left.t(), right, out=gradient)

    def add_biases(
        self, expert: int, preactivation_grad: torch.Tensor, output_grad: torch.Tensor, probs: torch.Tensor
    ) -> None:
        """Add one block's gradients to an expert's bias gradients, if experts have biases."""
        if self.fc1_bias is not None and self.fc2_bias is not None:
            self.fc1_bias[expert] += preactivation_grad.sum(dim=0)
            self.fc2_bias[expert] += torch.mv(output_grad.t(), probs.to(output_grad.dtype))

    def mark(self, expert: int) -> bool:
        """Register a contribution to an expert's gradients; return whether it must be added to an earlier one."""
        written, self._written[expert] = self._written[expert], True
        return written

    def add_all(self, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
        """Add the gradients of the fc1 and fc2 matrices of all experts in the slab."""
        if self._written[0]:
            self.fc1 += fc1
            self.fc2 += fc2
        else:
            self.fc1, self.fc2 = fc1, fc2
        self._written = [True] * len(self._written)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of all experts: fc1, fc2 and their biases. They are zero for experts without rows."""
        if not any(self._written):
            fc1, fc2 = (torch.zeros_like(matrix) for matrix in self._matrices)
            return fc1, fc2, self.fc1_bias, self.fc2_bias
        for expert, written in enumerate(self._written):
            if not written:
                self.fc1[expert].zero_()
                self.fc2[expert].zero_()
        return self.fc1, self.fc2, self.fc1_bias, self.fc2_bias


class WeightGrads:
    """Sums of a call's weight gradients by slab. A slab of replicas has sums only if it has assignments."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._primaries = SlabGrads(weights.primaries)
        self._others: dict[int, SlabGrads] = {}

    def of(self, index: int) -> SlabGrads:
        """Return the gradient sums of the slab with this index; they are created at the first use."""
        if index == 0:
            return self._primaries
        if index not in self._others:
            self._others[index] = SlabGrads(self._weights.slabs[index])
        return self._others[index]

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the primaries: fc1, fc2 and their biases."""
        return self._primaries.finish()

    def take_others(self) -> dict[int, SlabGrads]:
        """Return the gradient sums of the replicas' slabs by slab index, and drop the references to them."""
        others, self._others = self._others, {}
        return others
