"""A call where this rank has all experts: goes through its programs (program.py) with tensors.

Nothing travels: the experts read the layer's own input and write its output.

Shapes: T tokens of this rank, H hidden size, P assignments of its tokens, n those of a chunk.
"""

from __future__ import annotations

import torch

from moe import route
from moe.experts.compute import ExpertCompute
from moe.experts.weights import WeightGrads, Weights
from moe.route import Choice, Chunk
from moe.schedule import program, restore
from moe.schedule.chunk_compute import ChunkCompute, ChunkedResult
from moe.schedule.chunk_plan import Plan, Strategy
from parallel.trace import named

INTERPRETER = "schedule/on_one_rank.py"


class LocalCall:
    """What a call's forward pass leaves to its backward pass; without `both` there is none."""

    def __init__(
        self,
        choice: Choice,
        plan: Plan,
        strategy: Strategy,
        experts: ExpertCompute,
        weights: Weights,
        x_TH: torch.Tensor,
        both: bool,
    ) -> None:
        self.plan, self.strategy, self.experts = plan, strategy, experts
        self.chunks = self.backward_chunks = local_chunks(choice, plan.degree, len(weights.fc1))
        if both and plan.backward_degree != plan.degree:
            self.backward_chunks = local_chunks(choice, plan.backward_degree, len(weights.fc1))
        restored = restore.PREACTIVATIONS[strategy.preactivations]
        self.preactivations = restored(self.chunks, self.backward_chunks, weights.fc1.size(1), x_TH)

    def forward(self, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The weighted sums [T, H]."""
        return _LocalForward(self, x_TH, probs_P, weights).run()

    def backward(
        self,
        x_TH: torch.Tensor,
        probs_P: torch.Tensor,
        weights: Weights,
        output_grad_TH: torch.Tensor,
        grads: WeightGrads | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of `x_TH` and `probs_P`; those of the weights are added to `grads`."""
        return _LocalBackward(self, x_TH, probs_P, weights, output_grad_TH, grads).run()


@named("dispatch")
def local_chunks(choice: Choice, degree: int, num_experts: int) -> list[Chunk]:
    """Chunks of this rank's own tokens."""
    first = route.boundaries(choice.num_tokens, degree)
    if choice.assignments_per_token is not None:
        cut = [token * choice.assignments_per_token for token in first]
    else:
        cut = torch.searchsorted(choice.tokens, torch.tensor(first, device=choice.tokens.device)).tolist()
    return [
        route.make_chunk(
            [slice(cut[i], cut[i + 1])], choice.tokens, choice.experts, first[i], first[i + 1] - first[i], num_experts
        )
        for i in range(degree)
    ]


def _rows_of_layer(chunk: Chunk) -> torch.Tensor:
    """The rows [n] of the chunk's assignments, counted from the layer's first."""
    return chunk.rows + chunk.first_row if chunk.first_row else chunk.rows


class _LocalForward:
    """The state of a forward pass."""

    def __init__(self, call: LocalCall, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights) -> None:
        self.call, self.x_TH = call, x_TH
        self.compute = ChunkCompute(call.experts, weights, probs_P, x_TH.dtype)
        self.result = ChunkedResult(x_TH)

    def run(self) -> torch.Tensor:
        operations = program.local_forward(self.call.plan.degree, self.call.strategy)
        program.perform(operations, FORWARD, self, INTERPRETER)
        return self.result.tensor()

    def experts(self, operation: program.LocalExperts) -> None:
        chunk, preactivation = self.call.chunks[operation.chunk], self.call.preactivations.out(operation.chunk)
        room = self.result.room(chunk.first_row, chunk.num_rows)
        self.result.put(self.compute.sums(self.x_TH, _rows_of_layer(chunk), chunk, preactivation, room))

    def offload(self, operation: program.Offload) -> None:
        self.call.preactivations.offload(operation.chunk)

    def release(self, operation: program.Release) -> None:
        self.call.preactivations.written(operation.chunk)


class _LocalBackward:
    """The state of a backward pass."""

    def __init__(
        self,
        call: LocalCall,
        x_TH: torch.Tensor,
        probs_P: torch.Tensor,
        weights: Weights,
        output_grad_TH: torch.Tensor,
        grads: WeightGrads | None,
    ) -> None:
        self.call, self.x_TH, self.output_grad_TH, self.grads = call, x_TH, output_grad_TH, grads
        self.compute = ChunkCompute(call.experts, weights, probs_P, x_TH.dtype)
        self.probs_grad_P = torch.empty(
            len(probs_P), dtype=torch.promote_types(x_TH.dtype, torch.float32), device=x_TH.device
        )
        self.result = ChunkedResult(x_TH)
        self.preactivation: torch.Tensor | None = None  # of the chunk that is computed

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        operations = program.local_backward(self.call.plan.backward_degree, self.call.strategy)
        program.perform(operations, BACKWARD, self, INTERPRETER)
        self.call.preactivations.free()
        return self.result.tensor(), self.probs_grad_P

    def fetch(self, operation: program.Fetch) -> None:
        self.call.preactivations.fetch(operation.chunk)

    def grads_of_chunk(self, operation: program.LocalGrads) -> None:
        chunk = self.call.backward_chunks[operation.chunk]
        self.preactivation = self.call.preactivations.get(operation.chunk, chunk)
        sums_grad = self.output_grad_TH[chunk.first_row : chunk.first_row + chunk.num_rows]
        room = self.result.room(chunk.first_row, chunk.num_rows)
        rows_grad, work = self.compute.input_grads(
            self.x_TH, _rows_of_layer(chunk), chunk, self.preactivation, sums_grad, self.probs_grad_P, self.grads, room
        )
        self.result.put(rows_grad)
        if work is not None:
            work.free()

    def release(self, operation: program.Release) -> None:
        preactivation, self.preactivation = self.preactivation, None
        self.call.preactivations.done(preactivation)


# What each operation does to the state of a pass.
FORWARD: program.Lines = {
    program.LocalExperts: _LocalForward.experts,
    program.Offload: _LocalForward.offload,
    program.Release: _LocalForward.release,
}
BACKWARD: program.Lines = {
    program.Fetch: _LocalBackward.fetch,
    program.LocalGrads: _LocalBackward.grads_of_chunk,
    program.Release: _LocalBackward.release,
}
