"""Run an MoE layer's call whose experts are on several ranks, operation by operation (see program.py).

Tensors that are not kept for the backward pass share a few buffers of the size of a chunk.

Shapes: T tokens of this rank, H hidden size, P assignments of this rank's tokens, Q assignments that this rank
computes, U rows (one for each token and destination rank) that this rank sends, R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memory.pool import WORKSPACE
from memory.transfer import to_device
from moe import route
from moe.alltoall.flat import AllToAll, Handle, SplitSizes, start
from moe.chunk_plan import MAX_IN_FLIGHT, Plan, Strategy
from moe.experts.compute import ExpertCompute, needs_host_ends
from moe.experts.weights import WeightGrads, Weights, WeightWork
from moe.placement.replicas import CallReplicas
from moe.route import Choice, Chunks, DispatchOrder
from moe.schedule import program, restore
from moe.schedule.chunk_compute import STREAMED, ChunkCompute, ChunkedResult
from moe.schedule.pass_sizes import PassSizes, SendOrder
from parallel import card
from parallel.trace import named, span

INTERPRETER = "schedule/over_ranks.py"
SharedExpert = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Arrived:
    """The assignments that this rank has received, sorted into the chunks of each pass, and their preactivations."""

    probs_Q: torch.Tensor
    chunks: Chunks
    backward_chunks: Chunks
    preactivations: restore.Preactivations


class SpreadCall:
    """The state of an MoE layer's call between its forward and backward pass, if its experts are on several ranks."""

    # set by the forward pass
    dispatched_rows: restore.DispatchedRows
    arrived: Arrived

    def __init__(
        self,
        choice: Choice,
        order: DispatchOrder,
        sizes: tuple[PassSizes, PassSizes],
        plan: Plan,
        strategy: Strategy,
        exchange: AllToAll,
        experts: ExpertCompute,
        shared_expert: SharedExpert | None,
        replicas: CallReplicas | None = None,
    ) -> None:
        self.choice, self.order, self.plan, self.strategy = choice, order, plan, strategy
        self.exchange, self.experts, self.replicas, self.streamed = exchange, experts, replicas, experts.streamed
        self.kinds = replicas is not None, experts.streamed is not None  # arguments of its programs
        self.forward_sizes, self.backward_sizes = sizes
        self.num_assignments = sum(self.forward_sizes.assignments.send)  # of this rank's tokens
        row_tokens_U = order.row_tokens(sum(self.forward_sizes.sends.total_rows()), self.num_assignments)
        order_U = order.assignments[: self.num_assignments] if order.row_per_assignment else None
        orders = [each.send_order(row_tokens_U, choice, exchange.rank, order_U) for each in dict.fromkeys(sizes)]
        self.forward_order, self.backward_order = orders[0], orders[-1]
        self.shared = None if shared_expert is None else _SharedGraph(shared_expert)

    def forward(self, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Run the forward pass; return [T, H]: the weighted sums of expert outputs, plus the shared expert's output."""
        state = _Forward(self, x_TH, probs_P, weights)
        operations = program.forward(state.sizes.degree, self.strategy, *self.kinds)
        with card.exchanges_under_way():
            program.perform(operations, FORWARD, state, INTERPRETER)
        output_TH = state.finish()
        # Frees the memory of tensors that only the forward pass has read.
        self.forward_order, self.arrived.chunks = self.backward_order, self.arrived.backward_chunks
        return output_TH

    def backward(
        self,
        x_TH: torch.Tensor,
        probs_P: torch.Tensor,
        weights: Weights,
        output_grad_TH: torch.Tensor,
        grads: WeightGrads | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the backward pass: return the gradients of `x_TH` and `probs_P`, and add weight gradients to `grads`."""
        state = _Backward(self, x_TH, weights, output_grad_TH, grads)
        operations = program.backward(state.sizes.degree, self.strategy, self.plan.weight_lag, *self.kinds)
        with card.exchanges_under_way():
            program.perform(operations, BACKWARD, state, INTERPRETER)
        x_grad_TH = state.finish()
        self.arrived.preactivations.free()
        self.dispatched_rows.free()
        return x_grad_TH, state.probs_grad_P


class _SharedGraph:
    """The shared expert with its own autograd graph, so that its backward can run while ranks wait for messages."""

    def __init__(self, function: SharedExpert) -> None:
        self._function = function
        self._input: torch.Tensor | None = None
        self._edge: Any = None

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            self._input = x_TH.detach().requires_grad_()
            output = self._function(self._input)
        self._edge = torch.autograd.graph.get_gradient_edge(output)
        return output.detach()

    def backward(self, output_grad_TH: torch.Tensor) -> torch.Tensor | None:
        assert self._input is not None
        torch.autograd.backward(self._edge, output_grad_TH)
        gradient, self._input, self._edge = self._input.grad, None, None
        return gradient


class _Pass:
    """The state of one pass over several ranks: all-to-alls in flight, and tensors that later operations need."""

    message: Handle  # exchange of values of all assignments

    def __init__(self, call: SpreadCall, sizes: PassSizes, order: SendOrder, tensors: dict[str, torch.Tensor]) -> None:
        self.call, self.sizes, self.order = call, sizes, order
        self.tensors = tensors  # dispatched tensors [T, H], by their name in the program
        self.expected: dict[tuple[str, int], tuple[Handle, torch.Tensor]] = {}
        self.received: dict[str, torch.Tensor] = {}  # of the chunk that is computed
        self.sums_RH: torch.Tensor | None = None  # result of the computed chunk
        # Exchanges, and the send buffers to free after them.
        self.in_flight: list[tuple[Handle, torch.Tensor | None]] = []
        self.combines: dict[int, Handle] = {}
        self.shared_TH: torch.Tensor | None = None
        self.result = ChunkedResult(tensors["rows"], call.choice.order_T)

    def finish(self) -> torch.Tensor:
        """Wait for all sends; return the result of the pass, plus the shared expert's result."""
        while self.in_flight:
            self._finish_oldest()
        result_TH = self.result.tensor()
        return result_TH if self.shared_TH is None else result_TH.add_(self.shared_TH)

    def buffer(self, chunk: int) -> torch.Tensor:
        """Return the buffer that receives a chunk's dispatched rows."""
        like = self.tensors["rows"]
        return WORKSPACE.take((self.sizes.received_rows[chunk], like.size(1)), like)

    # -- operations of both passes -----------------------------------------------------------------------------------

    def expect(self, operation: program.Expect) -> None:
        buffer = self.buffer(operation.chunk)
        handle = self.call.exchange.expect(buffer, self.sizes.dispatches[operation.chunk])
        self.expected[operation.tensor, operation.chunk] = handle, buffer

    @named("dispatch")
    def dispatch(self, operation: program.Dispatch) -> None:
        """Gather and send a chunk's rows; gather rows for this rank itself directly into its receive buffer."""
        chunk, tensor_TH = operation.chunk, self.tensors[operation.tensor]
        handle, receive = self.expected[operation.tensor, chunk]
        own, away = self.order.own[chunk], self.order.away[chunk]
        before = sum(self.sizes.receives.chunk_rows(chunk)[: self.call.exchange.rank])
        torch.index_select(tensor_TH, 0, own, out=receive[before : before + len(own)])
        away_rows = WORKSPACE.take((len(away), tensor_TH.size(1)), tensor_TH)
        torch.index_select(tensor_TH, 0, away, out=away_rows)
        handle.send(away_rows, own=False)
        self.follow(handle, away_rows)

    @named("dispatch wait")
    def wait_dispatch(self, operation: program.WaitDispatch) -> None:
        handle, buffer = self.expected.pop((operation.tensor, operation.chunk))
        handle.wait()
        self.received[operation.tensor] = buffer

    @named("combine")
    def combine(self, operation: program.Combine) -> None:
        chunk, like, sums_RH = operation.chunk, self.tensors["rows"], self.sums_RH
        assert sums_RH is not None
        self.sums_RH = None  # a buffer is free when nothing refers to it
        combined = WORKSPACE.take((sum(self.sizes.sends.chunk_rows(chunk)), like.size(1)), like)
        handle = self.call.exchange.expect(combined, self.sizes.combines[chunk])
        handle.send(sums_RH)
        self.combines[chunk] = self.follow(handle)

    @named("combine")
    def sum_combine(self, operation: program.SumCombine) -> None:
        chunk = operation.chunk
        first, end = route.boundaries(self.call.choice.num_tokens, self.sizes.degree)[chunk : chunk + 2]
        combined = self.combines.pop(chunk).wait()
        self.result.put(route.add_up(combined, self.order.sums[chunk], out=self.result.output(first, end - first)))
        WORKSPACE.give(combined)

    def send_message(self, message: torch.Tensor, sizes: SplitSizes) -> None:
        """Start an all-to-all of `message`, which has one entry per assignment."""
        received = message.new_empty(sum(sizes.receive), *message.shape[1:])
        self.message = self.follow(start(self.call.exchange, message, received, sizes))

    def take_message(self) -> torch.Tensor:
        """Wait for the all-to-all that `send_message` started, and return the received entries."""
        return self.message.wait()

    def follow(self, handle: Handle, send_buffer: torch.Tensor | None = None) -> Handle:
        """Register an all-to-all in flight, and finish the oldest ones until at most MAX_IN_FLIGHT remain."""
        self.in_flight.append((handle, send_buffer))
        while len(self.in_flight) > MAX_IN_FLIGHT:
            self._finish_oldest()
        return handle

    def _finish_oldest(self) -> None:
        handle, send_buffer = self.in_flight.pop(0)
        handle.finish()
        WORKSPACE.give(send_buffer)


class _Forward(_Pass):
    compute: ChunkCompute  # once the assignments are received

    def __init__(self, call: SpreadCall, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights) -> None:
        super().__init__(call, call.forward_sizes, call.forward_order, {"rows": x_TH})
        self.x_TH, self.probs_P, self.weights = x_TH, probs_P, weights
        strategy = restore.ROW_STRATEGIES[call.strategy.token_rows]
        self.dispatched_rows = call.dispatched_rows = strategy(self.sizes.received_rows, x_TH, call.experts.link)

    def buffer(self, chunk: int) -> torch.Tensor:
        return self.dispatched_rows.out(chunk)

    @named("dispatch")
    def send_assignments(self, operation: program.SendAssignments) -> None:
        order, count = self.call.order, self.call.num_assignments
        probs_P = self.probs_P.index_select(0, order.assignments[:count])
        probs_P = probs_P.to(torch.promote_types(probs_P.dtype, torch.float32))
        bits = torch.int64 if probs_P.dtype is torch.float64 else torch.int32
        ids_P = order.packed_ids[:count].to(bits)
        self.send_message(torch.stack([ids_P, probs_P.view(bits)], dim=1), self.sizes.assignments)

    def shared_expert(self, operation: program.SharedExpert) -> None:
        with span("shared expert"):
            self.shared_TH = None if self.call.shared is None else self.call.shared.forward(self.x_TH)

    @named("dispatch")
    def sort_assignments(self, message: torch.Tensor) -> None:
        call, num_slots, own_slots = self.call, self.call.order.num_slots, self.weights.num_experts
        ids_Q = message[:, 0].long()
        probs_Q = message[:, 1].contiguous().view(torch.promote_types(self.probs_P.dtype, torch.float32))
        rows_Q = ids_Q // num_slots  # numbered for each source rank
        slots_Q = ids_Q.sub(rows_Q, alpha=num_slots)
        if self.weights.primaries.block_rows is not None:  # one group for each source rank
            received = self.sizes.assignments.receive
            sources = torch.arange(len(received), device=slots_Q.device)
            counts = to_device(torch.tensor(received), slots_Q.device)
            sources_Q = torch.repeat_interleave(sources, counts, output_size=len(slots_Q))
            slots_Q = sources_Q.add_(slots_Q, alpha=len(received))
            own_slots *= len(received)
        passes = [each.chunks(rows_Q, slots_Q, own_slots) for each in dict.fromkeys((self.sizes, call.backward_sizes))]
        if needs_host_ends(self.weights.primaries):
            route.read_ends([chunk for chunks in passes for chunk in chunks])
        chunks, backward_chunks = passes[0], passes[-1]
        restored = restore.PREACTIVATION_STRATEGIES[call.strategy.preactivations]
        width = self.weights.primaries.fc1.size(1)
        preactivations = restored(chunks, backward_chunks, width, self.x_TH, call.experts.link)
        self.dispatched_rows.regroup(chunks, backward_chunks)
        call.arrived = Arrived(probs_Q, chunks, backward_chunks, preactivations)
        self.compute = ChunkCompute(call.experts, self.weights, probs_Q, self.x_TH.dtype, chunks)

    def experts(self, operation: program.Experts) -> None:
        arrived = self.call.arrived
        chunk, preactivation = arrived.chunks[operation.chunk], arrived.preactivations.out(operation.chunk)
        self.sums_RH, preactivation = self.compute.sums(self.received["rows"], chunk.token_rows, chunk, preactivation)
        arrived.preactivations.put(operation.chunk, preactivation)

    def offload(self, operation: program.Offload) -> None:
        self.call.arrived.preactivations.offload(operation.chunk)
        self.dispatched_rows.offload(operation.chunk, self.received["rows"])

    def release(self, operation: program.Release) -> None:
        self.call.arrived.preactivations.written(operation.chunk)
        self.dispatched_rows.written(operation.chunk, self.received.pop("rows"))


class _Backward(_Pass):
    probs_grad_P: torch.Tensor  # once returned

    def __init__(
        self, call: SpreadCall, x_TH: torch.Tensor, weights: Weights, grad_TH: torch.Tensor, grads: WeightGrads | None
    ) -> None:
        super().__init__(call, call.backward_sizes, call.backward_order, {"rows": x_TH, "grads": grad_TH})
        self.arrived, self.dispatched_rows, self.grads = call.arrived, call.dispatched_rows, grads
        chunks = self.arrived.backward_chunks
        self.compute = ChunkCompute(call.experts, weights, self.arrived.probs_Q, x_TH.dtype, chunks)
        self.preactivation: torch.Tensor | None = None  # of the chunk that is computed
        # For each chunk, the inputs of its weight gradients, and the buffers to free afterwards.
        self.works: dict[int, tuple[WeightWork | None, torch.Tensor, torch.Tensor | None]] = {}

    def fetch(self, operation: program.Fetch) -> None:
        self.arrived.preactivations.fetch(operation.chunk)
        self.dispatched_rows.fetch(operation.chunk)

    def shared_expert_grad(self, operation: program.SharedExpertGrad) -> None:
        with span("shared expert backward"):
            self.shared_TH = None if self.call.shared is None else self.call.shared.backward(self.tensors["grads"])

    def input_grads(self, operation: program.InputGrads) -> None:
        i, received = operation.chunk, self.received
        chunk, self.received = self.arrived.backward_chunks[i], {}
        if "rows" in received:
            source_NH, rows_n = received["rows"], chunk.token_rows
        else:
            source_NH, rows_n = self.dispatched_rows.get(i, chunk)
        self.preactivation = self.arrived.preactivations.get(i, chunk)
        self.sums_RH, work = self.compute.input_grads(
            source_NH, rows_n, chunk, self.preactivation, received["grads"], chunk.token_rows
        )
        self.works[i] = work, received["grads"], None if self.dispatched_rows.has_all else source_NH

    def release(self, operation: program.Release) -> None:
        preactivation, self.preactivation = self.preactivation, None
        self.arrived.preactivations.done(preactivation)

    @named("experts weight gradients")
    def expert_weight_grads(self, operation: program.ExpertWeightGrads) -> None:
        work, *buffers = self.works.pop(operation.chunk)
        if work is not None and self.grads is not None:
            self.call.experts.weight_grads(work, self.grads)
        elif work is not None:
            work.free()
        WORKSPACE.give(*buffers)

    def take_probs_grad(self, operation: program.TakeProbsGrad) -> None:
        call, grads_P = self.call, self.take_message()
        size = len(call.order.assignments)
        # The gradient of a dropped assignment is zero.
        self.probs_grad_P = grads_P.new_empty(size) if len(grads_P) == size else grads_P.new_zeros(size)
        self.probs_grad_P[call.order.assignments[: len(grads_P)]] = grads_P


# The effect of each operation on the state of a pass.
_BOTH: program.Lines = {
    **STREAMED,
    program.Expect: _Pass.expect,
    program.Dispatch: _Pass.dispatch,
    program.WaitDispatch: _Pass.wait_dispatch,
    program.Combine: _Pass.combine,
    program.SumCombine: _Pass.sum_combine,
}
FORWARD: program.Lines = {
    **_BOTH,
    program.FetchReplicas: lambda state, _: state.call.replicas.fetch(state.weights.primaries),
    program.WaitReplicas: lambda state, _: state.call.replicas.wait(),
    program.SendAssignments: _Forward.send_assignments,
    program.SharedExpert: _Forward.shared_expert,
    program.TakeAssignments: lambda state, _: state.sort_assignments(state.take_message()),
    program.Experts: _Forward.experts,
    program.Offload: _Forward.offload,
    program.Release: _Forward.release,
}
BACKWARD: program.Lines = {
    **_BOTH,
    program.SharedExpertGrad: _Backward.shared_expert_grad,
    program.Fetch: _Backward.fetch,
    program.InputGrads: _Backward.input_grads,
    program.Release: _Backward.release,
    program.SendProbsGrad: lambda state, _: state.send_message(
        state.compute.probs_grad_Q(), state.sizes.assignments_back
    ),
    program.ExpertWeightGrads: _Backward.expert_weight_grads,
    program.TakeProbsGrad: _Backward.take_probs_grad,
    program.ReturnGrads: lambda state, _: state.call.replicas.return_grads(state.grads),
    program.WaitGrads: lambda state, _: state.call.replicas.wait(),
}
