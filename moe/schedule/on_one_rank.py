"""Run an MoE layer's call on a rank that has all experts, operation by operation (see program.py).

There is no exchange: the experts read the layer's own input and write its output.

Shapes: T tokens of this rank, H hidden size, P assignments of its tokens, n those of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from memory.transfer import lists_to_device
from moe import route
from moe.chunk_plan import NOTHING_KEPT, STRATEGIES, Plan, pass_degrees
from moe.experts.compute import ExpertCompute, needs_host_ends
from moe.experts.weights import WeightGrads, Weights
from moe.route import Choice, Chunk, Chunks
from moe.schedule import program, restore
from moe.schedule.chunk_compute import STREAMED, ChunkCompute, ChunkedResult
from parallel.trace import named

INTERPRETER = "schedule/on_one_rank.py"


class LocalCall:
    """The state of an MoE layer's call between its forward and backward pass, if this rank has all experts.

    `both`: the call has a backward pass.
    """

    replicas = None  # there are none, since there are no other ranks

    def __init__(
        self, choice: Choice, plan: Plan, experts: ExpertCompute, weights: Weights, x_TH: torch.Tensor, both: bool
    ) -> None:
        self.streamed = experts.streamed
        self.strategy = STRATEGIES[plan.memory_strategy] if both else NOTHING_KEPT
        self.plan, self.experts, self.order_T = plan, experts, choice.order_T
        passes = local_chunks(choice, pass_degrees(plan, both), weights.num_experts)
        if needs_host_ends(weights.primaries):
            route.read_ends([chunk for chunks in passes for chunk in chunks])
        self.chunks, self.backward_chunks = passes[0], passes[-1]
        restored = restore.PREACTIVATION_STRATEGIES[self.strategy.preactivations]
        width = weights.primaries.fc1.size(1)
        self.preactivations = restored(self.chunks, self.backward_chunks, width, x_TH, experts.link)

    def forward(self, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Run the forward pass; return the weighted sums of the experts' outputs [T, H]."""
        state = _LocalPass(self, x_TH, probs_P, weights, self.chunks)
        operations = program.local_forward(self.plan.degree, self.strategy, self.streamed is not None)
        program.perform(operations, FORWARD, state, INTERPRETER)
        self.chunks = self.backward_chunks  # frees the memory of the forward pass's chunks
        return state.result.tensor()

    def backward(
        self,
        x_TH: torch.Tensor,
        probs_P: torch.Tensor,
        weights: Weights,
        output_grad_TH: torch.Tensor,
        grads: WeightGrads | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the backward pass: return the gradients of `x_TH` and `probs_P`, and add weight gradients to `grads`."""
        state = _LocalPass(self, x_TH, probs_P, weights, self.backward_chunks)
        state.output_grad_TH, state.grads = output_grad_TH, grads
        operations = program.local_backward(self.plan.backward_degree, self.strategy, self.streamed is not None)
        program.perform(operations, BACKWARD, state, INTERPRETER)
        self.preactivations.free()
        return state.result.tensor(), state.compute.probs_grad_Q()


@named("dispatch")
def local_chunks(choice: Choice, degrees: Sequence[int], num_experts: int) -> list[Chunks]:
    """Split this rank's assignments into chunks. Return a list of chunks for each number of chunks in `degrees`."""
    cuts = [route.boundaries(choice.num_tokens, degree) for degree in degrees]
    device, each = choice.tokens.device, choice.assignments_per_token
    if each is not None:
        offsets = [[token * each for token in cut] for cut in cuts]
    else:  # the host waits, once
        firsts = lists_to_device([[token for cut in cuts for token in cut]], device)[0]
        found = iter(torch.searchsorted(choice.tokens, firsts).tolist())
        offsets = [[next(found) for _ in cut] for cut in cuts]
    count = offsets[0][-1]
    tokens, experts = choice.tokens[:count], choice.experts[:count]
    made = []
    for cut, ends in zip(cuts, offsets, strict=True):
        num_rows, numbers = ([end - start for start, end in pairwise(of)] for of in (cut, ends))
        rows_P, of_chunk = tokens, None
        if len(num_rows) > 1:
            *lists, counts = lists_to_device([*route.chunk_bases(numbers, num_experts), cut[:-1], numbers], device)
            chunk_of = torch.repeat_interleave(counts, output_size=count)
            of_chunk = torch.stack(lists).index_select(1, chunk_of)
            rows_P = tokens - of_chunk[2]
        slices = [[slice(*bounds)] for bounds in pairwise(ends)]
        made.append(route.make_chunks(rows_P, experts, num_rows, slices, num_experts, of_chunk))
    return made


def _rows_of_layer(call: LocalCall, chunk: Chunk) -> torch.Tensor:
    """Return the rows [n] of the layer's input that the chunk's assignments read."""
    rows_n = chunk.token_rows + chunk.first_row if chunk.first_row else chunk.token_rows
    return rows_n if call.order_T is None else call.order_T.index_select(0, rows_n)


class _LocalPass:
    """The state of a pass on one rank, which its operations change."""

    # only in a backward pass
    output_grad_TH: torch.Tensor
    grads: WeightGrads | None
    preactivation: torch.Tensor | None  # of the chunk that is computed

    def __init__(
        self, call: LocalCall, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights, chunks: Chunks
    ) -> None:
        self.call, self.x_TH, self.chunks = call, x_TH, chunks
        self.compute = ChunkCompute(call.experts, weights, probs_P, x_TH.dtype, chunks)
        self.result = ChunkedResult(x_TH, call.order_T)

    def experts(self, operation: program.LocalExperts) -> None:
        chunk, preactivation = self.chunks[operation.chunk], self.call.preactivations.out(operation.chunk)
        out_RH, rows_n = self.result.output(chunk.first_row, chunk.num_rows), _rows_of_layer(self.call, chunk)
        sums_RH, preactivation = self.compute.sums(self.x_TH, rows_n, chunk, preactivation, out_RH)
        self.call.preactivations.put(operation.chunk, preactivation)
        self.result.put(sums_RH)

    def grads_of_chunk(self, operation: program.LocalGrads) -> None:
        chunk = self.chunks[operation.chunk]
        self.preactivation = self.call.preactivations.get(operation.chunk, chunk)
        rows_n = _rows_of_layer(self.call, chunk)
        out_RH = self.result.output(chunk.first_row, chunk.num_rows)
        rows_grad, work = self.compute.input_grads(
            self.x_TH, rows_n, chunk, self.preactivation, self.output_grad_TH, rows_n, self.grads, out_RH
        )
        self.result.put(rows_grad)
        if work is not None:
            work.free()

    def release(self, operation: program.Release) -> None:
        preactivation, self.preactivation = self.preactivation, None
        self.call.preactivations.done(preactivation)


# The effect of each operation on the state of a pass.
FORWARD: program.Lines = {
    **STREAMED,
    program.LocalExperts: _LocalPass.experts,
    program.Offload: lambda state, operation: state.call.preactivations.offload(operation.chunk),
    program.Release: lambda state, operation: state.call.preactivations.written(operation.chunk),
}
BACKWARD: program.Lines = {
    **STREAMED,
    program.Fetch: lambda state, operation: state.call.preactivations.fetch(operation.chunk),
    program.LocalGrads: _LocalPass.grads_of_chunk,
    program.Release: _LocalPass.release,
}
