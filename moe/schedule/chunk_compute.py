"""What one rank computes of its chunks, and results that chunks make up.

Shapes: N rows of a buffer, R rows of the chunk, n its assignments, Q all assignments that this rank computes, T tokens,
H hidden size.
"""

from __future__ import annotations

import torch

from memory.pool import WORKSPACE
from moe import route
from moe.experts.compute import ExpertCompute, make_assignments
from moe.experts.weights import ChunkInputs, GradInputs, WeightGrads, Weights, WeightWork
from moe.route import Chunk
from parallel.trace import span


class ChunkCompute:
    """A pass's experts: their weights, and the probabilities of all assignments that this rank computes."""

    def __init__(self, experts: ExpertCompute, weights: Weights, probs_Q: torch.Tensor, dtype: torch.dtype) -> None:
        self.experts, self.weights = experts, weights
        # In fp32 also where rows, which are of `dtype`, are in half precision.
        self.probs_Q = probs_Q.to(torch.promote_types(dtype, torch.float32))

    def sums(
        self,
        source_NH: torch.Tensor,
        rows_n: torch.Tensor,
        chunk: Chunk,
        preactivation: torch.Tensor | None,
        out_RH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The chunk's weighted sums [R, H], in `out_RH` if given; its assignments read `rows_n` of the source."""
        with span("experts"):
            inputs = ChunkInputs(self.weights, source_NH, make_assignments(rows_n, chunk.counts, self.weights))
            output = self.experts.forward(inputs, preactivation)
        with span("combine"):
            sums_RH = route.add_up(output, chunk.sums, chunk.in_row_order(self.probs_Q), out_RH)
        WORKSPACE.give(output)
        return sums_RH

    def input_grads(
        self,
        source_NH: torch.Tensor,
        rows_n: torch.Tensor,
        chunk: Chunk,
        preactivation: torch.Tensor | None,
        sums_grad_RH: torch.Tensor,
        probs_grad_Q: torch.Tensor,
        grads: WeightGrads | None,
        out_RH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, WeightWork | None]:
        """The gradient of the chunk's rows [R, H], in `out_RH` if given; fills its part of `probs_grad_Q`.

        With `grads` the weight gradients are added at once, else the second result is what is left to do for them.
        """
        with span("experts backward"):
            inputs = ChunkInputs(self.weights, source_NH, make_assignments(rows_n, chunk.counts, self.weights))
            probs_n = self.probs_Q.index_select(0, chunk.ids)
            given = GradInputs(inputs, sums_grad_RH, chunk.rows, probs_n)
            row_grads, probs_grad_n, work = self.experts.input_grads(given, preactivation, grads)
        with span("combine"):
            probs_grad_Q[chunk.ids] = probs_grad_n.to(probs_grad_Q.dtype)
            rows_grad_RH = route.add_up(row_grads, chunk.sums, out=out_RH)
        WORKSPACE.give(row_grads, probs_grad_n)
        return rows_grad_RH, work


class ChunkedResult:
    """A tensor like `like` [T, H] that chunks of rows make up; where there is one chunk, that is it."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._result: torch.Tensor | None = None

    def room(self, first: int, count: int) -> torch.Tensor | None:
        """Where `count` rows from `first` on are to be written; None where they are all: anywhere."""
        if self._result is None:
            if count == len(self._like):
                return None
            self._result = WORKSPACE.lend(self._like.shape, self._like)
        return self._result[first : first + count]

    def put(self, rows: torch.Tensor) -> None:
        """These have been written."""
        if self._result is None:
            self._result = rows

    def tensor(self) -> torch.Tensor:
        """All of them."""
        assert self._result is not None
        return self._result
