"""Compute a chunk on one rank, assemble results of chunks, and run the operations of offloaded experts.

Shapes: N rows of a buffer, R rows of the chunk, n its assignments, Q all assignments that this rank computes, T tokens,
H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from memory.pool import WORKSPACE
from moe import route
from moe.experts.compute import ExpertCompute, is_grouped
from moe.experts.weights import Assignments, ChunkInputs, GradInputs, WeightGrads, Weights, WeightWork
from moe.route import Chunk, Chunks
from moe.schedule import program
from parallel.trace import span


class ChunkCompute:
    """The computation of a pass's chunks, with the experts' weights and the probabilities of all assignments."""

    def __init__(
        self, experts: ExpertCompute, weights: Weights, probs_Q: torch.Tensor, dtype: torch.dtype, chunks: Chunks
    ) -> None:
        self.experts, self.weights, self._ids_Q = experts, weights, chunks.ids_Q
        # In fp32 even if rows, which have `dtype`, are in half precision.
        self.probs_Q = probs_Q.to(torch.promote_types(dtype, torch.float32))
        # Sorted like the assignments of each chunk's experts, chunk by chunk.
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
        """Return the weighted sums of expert outputs [R, H] of a chunk, and its preactivations.

        `rows_n`: the row of the source that each assignment reads. `out_RH`: memory for the sums. The preactivations
        are written to `preactivation` if it is given. Otherwise grouped experts return a new tensor, and experts in
        blocks return None.
        """
        with span("experts"):
            output, preactivation = self.experts.forward(self._inputs(source_NH, rows_n, chunk), preactivation)
        with span("combine"):
            # Grouped experts have multiplied by the probabilities already.
            probs_n = None if is_grouped(self.weights.primaries) else route.cut_list(self.probs_Q, chunk.slices)
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
        grads: WeightGrads | None = None,
        out_RH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, WeightWork | None]:
        """Return the gradients of a chunk's rows [R, H], and the inputs of its weight gradients.

        `sums_rows_n`: each assignment's row of `sums_grad_RH`, the gradients of the weighted sums. `out_RH`: memory for
        the first result. With `grads`, weight gradients are added to it at once, and the second result is None. The
        gradients of the chunk's probabilities are stored for `probs_grad_Q`.
        """
        with span("experts backward"):
            given = GradInputs(self._inputs(source_NH, rows_n, chunk), sums_grad_RH, sums_rows_n)
            row_grads, probs_grad_n, work = self.experts.input_grads(given, preactivation, grads)
        with span("combine"):
            if self._sorted_grads_Q is None:
                self._sorted_grads_Q = torch.empty_like(self._sorted_probs_Q)
            self._sorted_grads_Q[chunk.span] = probs_grad_n
            rows_grad_RH = route.add_up(row_grads, chunk.sums, out=out_RH)
        WORKSPACE.give(row_grads, probs_grad_n)
        return rows_grad_RH, work

    def probs_grad_Q(self) -> torch.Tensor:
        """Return the gradients of all probabilities, after the last chunk; zero for assignments in no chunk."""
        assert self._sorted_grads_Q is not None
        complete = len(self._ids_Q) == len(self.probs_Q)
        probs_grad_Q = torch.empty_like(self.probs_Q) if complete else torch.zeros_like(self.probs_Q)
        probs_grad_Q[self._ids_Q] = self._sorted_grads_Q
        return probs_grad_Q

    def _inputs(self, source_NH: torch.Tensor, rows_n: torch.Tensor, chunk: Chunk) -> ChunkInputs:
        probs_n = self._sorted_probs_Q[chunk.span]
        assignments = Assignments(rows_n, probs_n, chunk.ends, chunk.host_ends, chunk.num_primary_assignments)
        return ChunkInputs(self.weights, source_NH, assignments)


class ChunkedResult:
    """A result with the shape of `like` [T, H], assembled from chunks of its rows.

    Without `order_T`, a single chunk becomes the result without a copy. `order_T`: with strided chunks, the row of the
    result that each row of the chunks belongs to.
    """

    def __init__(self, like: torch.Tensor, order_T: torch.Tensor | None = None) -> None:
        self._like, self._order_T = like, order_T
        self._result: torch.Tensor | None = None
        self._first = 0  # first row of the last `output`

    def output(self, first: int, count: int) -> torch.Tensor | None:
        """Return memory for `count` rows from row `first` on; None if these are all rows: any memory will do."""
        if self._result is None:
            if count == len(self._like) and self._order_T is None:
                return None
            self._result = WORKSPACE.lend(self._like.shape, self._like)
        if self._order_T is not None:
            self._first = first
            return WORKSPACE.take((count, self._like.size(1)), self._like)
        return self._result[first : first + count]

    def put(self, written_NH: torch.Tensor) -> None:
        """Put rows into the result. They are in the memory from `output` or, if that was None, in any memory."""
        if self._result is None:
            self._result = written_NH
        elif self._order_T is not None:
            self._result.index_copy_(0, self._order_T[self._first : self._first + len(written_NH)], written_NH)
            WORKSPACE.give(written_NH)

    def tensor(self) -> torch.Tensor:
        """Return the complete result."""
        assert self._result is not None
        return self._result


def _store_expert(state: Any, operation: program.StoreExpert) -> None:
    if state.grads is not None:
        replicas = state.call.replicas
        state.call.streamed.store(state.grads.finish(), () if replicas is None else replicas.take_arrived())


# The effect of each operation of offloaded experts (moe/experts/streamed.py) on the state of a pass.
STREAMED: program.Lines = {
    program.FetchExpert: lambda state, _: state.call.streamed.fetch(),
    program.WaitExpert: lambda state, _: state.call.streamed.wait(),
    program.StoreExpert: _store_expert,
}
