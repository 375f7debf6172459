"""What a layer's experts compute with: their stacked weights, the assignments that they get, and their gradients.

Shapes: N rows of a buffer, n assignments of a row and an expert, R rows of weighted sums, H hidden size, F width of
this rank's part of an expert, G = 2 F for SwiGLU ([gate | up]) else F, E experts of this rank, n also those of a slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from memory.pool import WORKSPACE


def wide(dtype: torch.dtype) -> torch.dtype:
    """What gradients of weights of this kind are added up in: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Slab:
    """Stacked weights of some experts that lie together, and the activation between them (swiglu, gelu or gelu_tanh).

    With `block_rows` an expert computes so many assignments of one source rank at once, and each such block's weight
    gradient is added by itself (bitwise.py): then no sum depends on which rank computes which block. Its assignments
    come in groups, one of each source rank for each expert.
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
        """The matrices and biases as they are, None for what there is not."""
        return self.fc1, self.fc2, self.fc1_bias, self.fc2_bias

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The matrices and biases that there are, each by expert, without their graph."""
        return [each.detach() for each in self.given]

    @property
    def given(self) -> list[torch.Tensor]:
        """The matrices and biases that there are, as they are."""
        return [each for each in self.parameters if each is not None]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return sum(each[0].nbytes for each in self.tensors)

    @property
    def grad_bytes(self) -> int:
        """Bytes of its gradient where it travels: added up in fp32 or wider, or block by block as weights are."""
        size = wide(self.fc1.dtype).itemsize
        return self.expert_bytes if self.block_rows is not None else self.expert_bytes // self.fc1.itemsize * size

    def like(self, fc1: torch.Tensor, fc2: torch.Tensor, *biases: torch.Tensor) -> Slab:
        """The same with other `tensors`."""
        fc1_bias, fc2_bias = biases or (None, None)
        return replace(self, fc1=fc1, fc2=fc2, fc1_bias=fc1_bias, fc2_bias=fc2_bias)


@dataclass(frozen=True)
class Weights:
    """A layer's expert weights on this rank: a few slabs, those at home first, whose experts are numbered one after the
    other."""

    slabs: tuple[Slab, ...]

    @property
    def home(self) -> Slab:
        return self.slabs[0]

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.slabs))

    def slot(self, expert: int) -> tuple[Slab, int]:
        """The slab that an expert of this rank lies in, and its place there."""
        for slab in self.slabs:
            if expert < len(slab):
                return slab, expert
            expert -= len(slab)
        raise AssertionError(f"{self.num_experts} experts have no number {expert}")


@dataclass(frozen=True)
class Assignments:
    """Assignments of a row and an expert, sorted by expert, or by group where `Slab.block_rows` is set."""

    rows: torch.Tensor  # [n] int64: which row of the source an assignment reads
    probs: torch.Tensor  # [n] fp32 or wider: what its output is multiplied with
    ends: torch.Tensor  # [E] int32: where each expert's end, on the device
    host_ends: list[int] | None  # the same on the host; None where the products need no host
    num_home: int | None = None  # those of experts at home, where the host knows that alone

    @property
    def experts(self) -> torch.Tensor:
        """[n] int32: each one's expert of this slab."""
        numbers = torch.arange(len(self.rows), dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, numbers, right=True, out_int32=True)

    @property
    def host_counts(self) -> list[int]:
        """How many each expert has."""
        assert self.host_ends is not None
        return [end - start for start, end in pairwise([0, *self.host_ends])]

    def of_groups(self, groups: slice, start: int, end: int) -> Assignments:
        """The assignments of consecutive experts (or groups), which stand in [start, end)."""
        if end - start == len(self.rows) and groups.stop - groups.start == len(self.ends):
            return self
        ends, host = self.ends[groups], None
        if self.host_ends is not None:
            host = [each - start for each in self.host_ends[groups]]
        return Assignments(self.rows[start:end], self.probs[start:end], ends - start if start else ends, host)


@dataclass(frozen=True)
class SlabInputs:
    """What a slab's experts read of a chunk."""

    index: int  # of the slab
    slab: Slab
    source_NH: torch.Tensor
    assignments: Assignments
    part: slice  # the assignments' among all of the chunk's


@dataclass(frozen=True)
class ChunkInputs:
    """What the experts of a chunk read."""

    weights: Weights
    source_NH: torch.Tensor
    assignments: Assignments

    def by_slab(self) -> list[SlabInputs]:
        """The same for each slab that has assignments, and for the first in any case."""
        slabs, given = self.weights.slabs, self.assignments
        each = len(given.ends) // self.weights.num_experts  # groups of an expert
        last = list(accumulate(each * len(slab) for slab in slabs))  # groups up to each slab's end
        if given.host_ends is not None:
            ends = [given.host_ends[group - 1] if group else 0 for group in last]
        elif len(slabs) == 1:
            ends = [len(given.rows)]
        else:
            assert given.num_home is not None and len(slabs) == 2, "only what lies at home is known apart"
            ends = [given.num_home, len(given.rows)]
        found, first, start = [], 0, 0
        for index, (slab, group, end) in enumerate(zip(slabs, last, ends, strict=True)):
            if end > start or index == 0:
                part = given.of_groups(slice(first, group), start, end)
                found.append(SlabInputs(index, slab, self.source_NH, part, slice(start, end)))
            first, start = group, end
        return found


@dataclass(frozen=True)
class GradInputs:
    """What the backward pass of a chunk reads, but for the preactivations."""

    chunk: ChunkInputs
    sums_grad_RH: torch.Tensor  # gradient of the weighted sums
    sums_rows_n: torch.Tensor  # which of its rows belongs to each assignment


@dataclass
class SlabWork:
    """What is left to do for a slab's part of a chunk once its input gradients are out."""

    inputs: SlabInputs
    sums_grad_RH: torch.Tensor
    sums_rows_n: torch.Tensor
    preactivation_grad: torch.Tensor  # [at least n, G]
    activated: torch.Tensor  # [at least n, F] times the assignment's probability


@dataclass
class WeightWork:
    """The same for a chunk: see `ExpertCompute.weight_grads`."""

    parts: list[SlabWork]
    buffers: Sequence[torch.Tensor]  # that all parts lie in

    def free(self) -> None:
        """Hand back the memory; `weight_grads` does so itself."""
        WORKSPACE.give(*self.buffers)


class SlabGrads:
    """Gradients of one slab's weights; the first contribution to an expert is written, later ones are added."""

    def __init__(self, weights: Slab, at_once: bool = True) -> None:
        """at_once: where experts are grouped, one product makes the gradients of all."""
        matrices = weights.fc1, weights.fc2
        if weights.fc1.device.type == "cpu" or not at_once:
            self.fc1, self.fc2 = (WORKSPACE.lend(matrix.shape, matrix) for matrix in matrices)
        else:  # the first product makes them, if there is one
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
        """Add `preactivation_grad^T x` and `output_grad^T activated` to an expert's gradients."""
        written, gradients = self.mark(expert), (views[expert] for views in self._views)
        for gradient, left, right in zip(gradients, (preactivation_grad, output_grad), (x, activated), strict=True):
            if written:
                torch.addmm(gradient, left.t(), right, out=gradient)
            else:
                torch.mm(left.t(), right, out=gradient)

    def add_biases(
        self, expert: int, preactivation_grad: torch.Tensor, output_grad: torch.Tensor, probs: torch.Tensor
    ) -> None:
        """The same for the biases, where there are any."""
        if self.fc1_bias is not None and self.fc2_bias is not None:
            self.fc1_bias[expert] += preactivation_grad.sum(dim=0)
            self.fc2_bias[expert] += torch.mv(output_grad.t(), probs.to(output_grad.dtype))

    def mark(self, expert: int) -> bool:
        """Note a contribution to an expert's gradients that is made now; whether it is to be added to what is there."""
        written, self._written[expert] = self._written[expert], True
        return written

    def add_all(self, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
        """Add gradients of all experts."""
        if self._written[0]:
            self.fc1 += fc1
            self.fc2 += fc2
        else:
            self.fc1, self.fc2 = fc1, fc2
        self._written = [True] * len(self._written)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """All gradients (fc1, fc2 and their biases); those of experts without rows are zero."""
        if not any(self._written):
            fc1, fc2 = (torch.zeros_like(matrix) for matrix in self._matrices)
            return fc1, fc2, self.fc1_bias, self.fc2_bias
        for expert, written in enumerate(self._written):
            if not written:
                self.fc1[expert].zero_()
                self.fc2[expert].zero_()
        return self.fc1, self.fc2, self.fc1_bias, self.fc2_bias


class WeightGrads:
    """Gradients of a call's weights, slab by slab; those of a slab without assignments are none."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._home = SlabGrads(weights.home)
        self._others: dict[int, SlabGrads] = {}

    def of(self, index: int) -> SlabGrads:
        """The gradients of a slab, to be added to."""
        if index == 0:
            return self._home
        if index not in self._others:
            self._others[index] = SlabGrads(self._weights.slabs[index])
        return self._others[index]

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of what is at home (fc1, fc2 and their biases)."""
        return self._home.finish()

    def take_others(self) -> dict[int, SlabGrads]:
        """Hand out the other slabs' gradients, by index; their memory is free when nobody refers to them."""
        others, self._others = self._others, {}
        return others
