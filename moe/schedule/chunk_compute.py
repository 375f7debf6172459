"""What one rank computes of its chunks, and results that chunks make up.

Shapes: N rows of a buffer, R rows of the chunk, n its assignments, Q all assignments that this rank computes, T tokens,
H hidden size.
"""

from __future__ import annotations

import torch

from memory.pool import WORKSPACE
from moe import route
from moe.experts.compute import ExpertCompute, is_grouped
from moe.experts.weights import Assignments, ChunkInputs, GradInputs, WeightGrads, Weights, WeightWork
from moe.route import Chunk, Chunks
from parallel.trace import span


class ChunkCompute:
    """A pass's experts: their weights, and the probabilities of all assignments that this rank computes."""

    def __init__(
        self, experts: ExpertCompute, weights: Weights, probs_Q: torch.Tensor, dtype: torch.dtype, chunks: Chunks
    ) -> None:
        self.experts, self.weights, self._ids_Q = experts, weights, chunks.ids_Q
        # In fp32 also where rows, which are of `dtype`, are in half precision.
        self.probs_Q = probs_Q.to(torch.promote_types(dtype, torch.float32))
        # As the chunks' experts compute them.
        self._sorted_probs_Q = self.probs_Q.index_select(0, chunks.ids_Q)
        self._sorted_grads_Q: torch.Tensor | None = None

    def sums(
        self,
        source_NH: torch.Tensor,
        rows_n: torch.Tensor,
        chunk: Chunk,
        preactivation: torch.Tensor | None,
        out_RH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The chunk's weighted sums [R, H], in `out_RH` if given; its assignments read `rows_n` of the source.

        And its preactivations: in `preactivation`, or where the products have made them.
        """
        with span("experts"):
            output, preactivation = self.experts.forward(self._inputs(source_NH, rows_n, chunk), preactivation)
        with span("combine"):
            # Grouped experts have multiplied already.
            probs_n = None if is_grouped(self.weights.home) else chunk.in_row_order(self.probs_Q)
            sums_RH = route.add_up(output, chunk.sums, probs_n, out_RH)
        WORKSPACE.give(output)
        return sums_RH, preactivation

    def input_grads(
        self,
        source_NH: torch.Tensor,
        rows_n: torch.Tensor,
        chunk: Chunk,
        preactivation: torch.Tensor | None,
        sums_grad_RH: torch.Tensor,
        sums_rows_n: torch.Tensor,
        grads: WeightGrads | None,
        out_RH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, WeightWork | None]:
        """The gradient of the chunk's rows [R, H], in `out_RH` if given; `probs_grad_Q` has its part then.

        `sums_rows_n` says which row of `sums_grad_RH` belongs to each assignment. With `grads` the weight gradients are
        added at once, else the second result is what is left to do for them.
        """
        with span("experts backward"):
            given = GradInputs(self._inputs(source_NH, rows_n, chunk), sums_grad_RH, sums_rows_n)
            row_grads, probs_grad_n, work = self.experts.input_grads(given, preactivation, grads)
        with span("combine"):
            if self._sorted_grads_Q is None:
                self._sorted_grads_Q = torch.empty_like(self._sorted_probs_Q)
            self._sorted_grads_Q[chunk.part] = probs_grad_n
            rows_grad_RH = route.add_up(row_grads, chunk.sums, out=out_RH)
        WORKSPACE.give(row_grads, probs_grad_n)
        return rows_grad_RH, work

    def probs_grad_Q(self) -> torch.Tensor:
        """The gradients of all probabilities, once every chunk's are there; zero where no chunk has the assignment."""
        assert self._sorted_grads_Q is not None
        complete = len(self._ids_Q) == len(self.probs_Q)
        probs_grad_Q = torch.empty_like(self.probs_Q) if complete else torch.zeros_like(self.probs_Q)
        probs_grad_Q[self._ids_Q] = self._sorted_grads_Q
        return probs_grad_Q

    def _inputs(self, source_NH: torch.Tensor, rows_n: torch.Tensor, chunk: Chunk) -> ChunkInputs:
        probs_n = self._sorted_probs_Q[chunk.part]
        assignments = Assignments(rows_n, probs_n, chunk.ends, chunk.host_ends, chunk.num_home)
        return ChunkInputs(self.weights, source_NH, assignments)


class ChunkedResult:
    """A tensor like `like` [T, H] that chunks of rows make up; where there is one chunk, that is it. `turns_T`: where
    rows go that are counted by turns."""

    def __init__(self, like: torch.Tensor, turns_T: torch.Tensor | None = None) -> None:
        self._like, self._turns_T = like, turns_T
        self._result: torch.Tensor | None = None
        self._first = 0  # of the rows that `room` was asked for

    def room(self, first: int, count: int) -> torch.Tensor | None:
        """Where `count` rows from `first` on are to be written; None where they are all: anywhere."""
        if self._result is None:
            if count == len(self._like) and self._turns_T is None:
                return None
            self._result = WORKSPACE.lend(self._like.shape, self._like)
        if self._turns_T is not None:
            self._first = first
            return WORKSPACE.take((count, self._like.size(1)), self._like)
        return self._result[first : first + count]

    def put(self, rows: torch.Tensor) -> None:
        """Take rows that have been written: to `room`, or anywhere where they are all."""
        if self._result is None:
            self._result = rows
        elif self._turns_T is not None:
            self._result.index_copy_(0, self._turns_T[self._first : self._first + len(rows)], rows)
            WORKSPACE.give(rows)

    def tensor(self) -> torch.Tensor:
        """All of them."""
        assert self._result is not None
        return self._result
