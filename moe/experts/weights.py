"""What a layer's experts compute with: their stacked weights, the assignments that they get, and their gradients.

Shapes: N rows of a buffer, n assignments of a row and an expert, R rows of weighted sums, H hidden size, F width of
this rank's part of an expert, G = 2 F for SwiGLU ([gate | up]) else F, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from memory.pool import WORKSPACE


@dataclass(frozen=True)
class Weights:
    """One layer's stacked expert weights on this rank, and the activation between them (swiglu, gelu or gelu_tanh).

    With `block_rows` an expert computes so many assignments of one source rank at once, and each such block's weight
    gradient is added by itself (bitwise.py): then no sum depends on which rank computes which block. Its assignments
    come in groups, one of each source rank for each expert.
    """

    fc1: torch.Tensor  # [E, G, H]
    fc2: torch.Tensor  # [E, H, F]
    fc1_bias: torch.Tensor | None  # [E, G]
    fc2_bias: torch.Tensor | None  # [E, H]
    activation: str
    block_rows: int | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that there are, each by expert, without their graph."""
        return [each.detach() for each in (self.fc1, self.fc2, self.fc1_bias, self.fc2_bias) if each is not None]

    def like(self, fc1: torch.Tensor, fc2: torch.Tensor, *biases: torch.Tensor) -> Weights:
        """The same with other `tensors`."""
        fc1_bias, fc2_bias = biases or (None, None)
        return replace(self, fc1=fc1, fc2=fc2, fc1_bias=fc1_bias, fc2_bias=fc2_bias)


@dataclass(frozen=True)
class Assignments:
    """Assignments of a row and an expert, sorted by expert, or by group where `Weights.block_rows` is set."""

    rows: torch.Tensor  # [n] int64: which row of the source an assignment reads
    probs: torch.Tensor  # [n] fp32 or wider: what its output is multiplied with
    ends: torch.Tensor  # [E] int32: where each expert's end, on the device
    host_ends: list[int] | None  # the same on the host; None where the products need no host

    @property
    def experts(self) -> torch.Tensor:
        """[n] int32: each one's expert of this rank."""
        numbers = torch.arange(len(self.rows), dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, numbers, right=True, out_int32=True)

    @property
    def host_counts(self) -> list[int]:
        """How many each expert has."""
        assert self.host_ends is not None
        return [end - start for start, end in pairwise([0, *self.host_ends])]


@dataclass(frozen=True)
class ChunkInputs:
    """What the experts of a chunk read."""

    weights: Weights
    source_NH: torch.Tensor
    assignments: Assignments


@dataclass(frozen=True)
class GradInputs:
    """What their backward pass reads, but for the preactivations."""

    chunk: ChunkInputs
    sums_grad_RH: torch.Tensor  # gradient of the weighted sums
    sums_rows_n: torch.Tensor  # which of its rows belongs to each assignment


@dataclass
class WeightWork:
    """What is left to do for one chunk once its input gradients are out: see `ExpertCompute.weight_grads`."""

    inputs: GradInputs
    preactivation_grad: torch.Tensor  # [at least n, G]
    activated: torch.Tensor  # [at least n, F] times the assignment's probability

    def free(self) -> None:
        """Hand back the memory; `weight_grads` does so itself."""
        WORKSPACE.give(self.preactivation_grad, self.activated)


class WeightGrads:
    """Gradients of one layer's weights; the first contribution to an expert is written, later ones are added."""

    def __init__(self, weights: Weights, at_once: bool = True) -> None:
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
