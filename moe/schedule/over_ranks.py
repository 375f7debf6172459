"""A call whose experts are spread over several ranks: goes through its programs (program.py) with tensors.

What is not kept for the backward pass lives in a few buffers of the size of a chunk, used in turn.

Shapes: T tokens of this rank, H hidden size, P assignments of this rank's tokens, Q assignments that this rank
computes, U rows (one for each token and rank that it goes to) that this rank sends, R rows of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from moe.placement.copies import CallCopies
from moe.route import Choice, Chunks, DispatchOrder
from moe.schedule import program, restore, streamed
from moe.schedule.chunk_compute import ChunkCompute, ChunkedResult
from moe.schedule.pass_sizes import PassSizes, SendOrder
from parallel import card
from parallel.trace import named, span

INTERPRETER = "schedule/over_ranks.py"
SharedExpert = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Arrived:
    """The assignments that came to this rank, sorted into both passes' chunks, and what is restored of their
    activations."""

    probs_Q: torch.Tensor
    chunks: Chunks
    backward_chunks: Chunks
    preactivations: restore.Preactivations


class SpreadCall:
    """What a call's forward pass leaves to its backward pass."""

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
        copies: CallCopies | None = None,
    ) -> None:
        self.choice, self.order, self.plan, self.strategy = choice, order, plan, strategy
        self.exchange, self.experts, self.copies, self.streamed = exchange, experts, copies, experts.streamed
        self.kinds = copies is not None, experts.streamed is not None  # of its programs
        self.forward_sizes, self.backward_sizes = sizes
        self.num_assignments = sum(self.forward_sizes.assignments.send)  # of this rank's tokens
        row_tokens_U = order.row_tokens(sum(self.forward_sizes.sends.total_rows()), self.num_assignments)
        turns_U = order.assignments[: self.num_assignments] if order.apart else None
        orders = [each.send_order(row_tokens_U, choice, exchange.rank, turns_U) for each in dict.fromkeys(sizes)]
        self.forward_order, self.backward_order = orders[0], orders[-1]
        self.shared = None if shared_expert is None else _SharedGraph(shared_expert)
        self.rows: restore.Rows | None = None  # from the forward pass on
        self.arrived: Arrived | None = None  # from the forward pass on

    def forward(self, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The weighted sums [T, H], and the shared expert's output added to them."""
        output_TH = _Forward(self, x_TH, probs_P, weights).run()
        assert self.arrived is not None
        # The memory of what the forward pass alone has read is free.
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
        """The gradients of `x_TH` and `probs_P`; those of the weights are added to `grads`."""
        return _Backward(self, x_TH, weights, output_grad_TH, grads).run()


class _SharedGraph:
    """The shared expert with a graph of its own, so that the backward pass can run it where it waits."""

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


class _Pass(ABC):
    """The state of one pass: what is on its way, and what the next operations of a chunk need."""

    def __init__(self, call: SpreadCall, sizes: PassSizes, order: SendOrder, tensors: dict[str, torch.Tensor]) -> None:
        self.call, self.sizes, self.order = call, sizes, order
        self.tensors = tensors  # what is dispatched [T, H], by its name in the program
        self.expected: dict[tuple[str, int], tuple[Handle, torch.Tensor]] = {}
        self.received: dict[str, torch.Tensor] = {}  # of the chunk that is computed
        self.sums_RH: torch.Tensor | None = None  # of the chunk that was computed
        # Exchanges, and the send buffers to hand back after them.
        self.in_flight: list[tuple[Handle, torch.Tensor | None]] = []
        self.message: Handle | None = None  # what travels of all assignments
        self.combines: dict[int, Handle] = {}
        self.shared_TH: torch.Tensor | None = None
        self.result = ChunkedResult(tensors["rows"], call.choice.turns_T)

    def finish(self) -> torch.Tensor:
        """Wait for what is still being sent; the result, with what the shared expert adds."""
        while self.in_flight:
            self._finish_oldest()
        result_TH = self.result.tensor()
        return result_TH if self.shared_TH is None else result_TH.add_(self.shared_TH)

    @abstractmethod
    def buffer(self, chunk: int) -> torch.Tensor:
        """Where a chunk is received."""

    # -- what both passes do -----------------------------------------------------------------------------------------

    def expect(self, operation: program.Expect) -> None:
        buffer = self.buffer(operation.chunk)
        handle = self.call.exchange.expect(buffer, self.sizes.dispatches[operation.chunk])
        self.expected[operation.tensor, operation.chunk] = handle, buffer

    @named("dispatch")
    def dispatch(self, operation: program.Dispatch) -> None:
        """Gather a chunk's rows and send them; this rank's own go straight into the receive buffer."""
        chunk, tensor_TH = operation.chunk, self.tensors[operation.tensor]
        handle, receive = self.expected[operation.tensor, chunk]
        own, away = self.order.own[chunk], self.order.away[chunk]
        before = sum(self.sizes.receives.chunk_rows(chunk)[: self.call.exchange.rank])
        torch.index_select(tensor_TH, 0, own, out=receive[before : before + len(own)])
        rows = WORKSPACE.take((len(away), tensor_TH.size(1)), tensor_TH)
        torch.index_select(tensor_TH, 0, away, out=rows)
        handle.send(rows, own=False)
        self.follow(handle, rows)

    @named("dispatch wait")
    def wait_dispatch(self, operation: program.WaitDispatch) -> None:
        handle, buffer = self.expected.pop((operation.tensor, operation.chunk))
        handle.wait()
        self.received[operation.tensor] = buffer  # it is the chunk's from now on

    @named("combine")
    def combine(self, operation: program.Combine) -> None:
        chunk, like, sums_RH = operation.chunk, self.tensors["rows"], self.sums_RH
        assert sums_RH is not None
        self.sums_RH = None  # a buffer is free when nothing refers to it
        room = WORKSPACE.take((sum(self.sizes.sends.chunk_rows(chunk)), like.size(1)), like)
        handle = self.call.exchange.expect(room, self.sizes.combines[chunk])
        handle.send(sums_RH)
        self.combines[chunk] = self.follow(handle)

    @named("combine")
    def sum_combine(self, operation: program.SumCombine) -> None:
        chunk = operation.chunk
        first, end = route.boundaries(self.call.choice.num_tokens, self.sizes.degree)[chunk : chunk + 2]
        rows = self.combines.pop(chunk).wait()
        self.result.put(route.add_up(rows, self.order.sums[chunk], out=self.result.room(first, end - first)))
        WORKSPACE.give(rows)

    def send_message(self, message: torch.Tensor, sizes: SplitSizes) -> None:
        """Start an exchange of all assignments."""
        received = message.new_empty(sum(sizes.receive), *message.shape[1:])
        self.message = self.follow(start(self.call.exchange, message, received, sizes))

    def take_message(self) -> torch.Tensor:
        """Wait for it."""
        assert self.message is not None
        return self.message.wait()

    def follow(self, handle: Handle, rows: torch.Tensor | None = None) -> Handle:
        """Remember an exchange whose rows are on their way; older ones are over by now, or are waited for."""
        self.in_flight.append((handle, rows))
        while len(self.in_flight) > MAX_IN_FLIGHT:
            self._finish_oldest()
        return handle

    def _finish_oldest(self) -> None:
        handle, rows = self.in_flight.pop(0)
        handle.finish()
        WORKSPACE.give(rows)


class _Forward(_Pass):
    def __init__(self, call: SpreadCall, x_TH: torch.Tensor, probs_P: torch.Tensor, weights: Weights) -> None:
        super().__init__(call, call.forward_sizes, call.forward_order, {"rows": x_TH})
        self.x_TH, self.probs_P, self.weights = x_TH, probs_P, weights
        self.rows = call.rows = restore.ROWS[call.strategy.rows](self.sizes.received_rows, x_TH, call.experts.link)
        self.compute: ChunkCompute | None = None  # once the assignments are there

    def run(self) -> torch.Tensor:
        operations = program.forward(self.sizes.degree, self.call.strategy, *self.call.kinds)
        with card.exchanges_under_way():
            program.perform(operations, FORWARD, self, INTERPRETER)
        return self.finish()

    def buffer(self, chunk: int) -> torch.Tensor:
        return self.rows.out(chunk)

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

    def take_assignments(self, operation: program.TakeAssignments) -> None:
        self._sort_assignments(self.take_message())

    @named("dispatch")
    def _sort_assignments(self, message: torch.Tensor) -> None:
        call, num_slots, own_slots = self.call, self.call.order.num_slots, self.weights.num_experts
        ids_Q = message[:, 0].long()
        probs_Q = message[:, 1].contiguous().view(torch.promote_types(self.probs_P.dtype, torch.float32))
        rows_Q = ids_Q // num_slots  # in their ranks'
        slots_Q = ids_Q.sub(rows_Q, alpha=num_slots)
        if self.weights.home.block_rows is not None:  # a group of each source rank
            received = self.sizes.assignments.receive
            sources = torch.arange(len(received), device=slots_Q.device)
            counts = to_device(torch.tensor(received), slots_Q.device)
            sources_Q = torch.repeat_interleave(sources, counts, output_size=len(slots_Q))
            slots_Q = sources_Q.add_(slots_Q, alpha=len(received))
            own_slots *= len(received)
        passes = [each.chunks(rows_Q, slots_Q, own_slots) for each in dict.fromkeys((self.sizes, call.backward_sizes))]
        if needs_host_ends(self.weights.home):
            route.read_ends([chunk for chunks in passes for chunk in chunks])
        chunks, backward_chunks = passes[0], passes[-1]
        restored = restore.PREACTIVATIONS[call.strategy.preactivations]
        width = self.weights.home.fc1.size(1)
        preactivations = restored(chunks, backward_chunks, width, self.x_TH, call.experts.link)
        self.rows.regroup(chunks, backward_chunks)
        call.arrived = Arrived(probs_Q, chunks, backward_chunks, preactivations)
        self.compute = ChunkCompute(call.experts, self.weights, probs_Q, self.x_TH.dtype, chunks)

    def experts(self, operation: program.Experts) -> None:
        arrived, compute = self.call.arrived, self.compute
        assert arrived is not None and compute is not None
        chunk, preactivation = arrived.chunks[operation.chunk], arrived.preactivations.out(operation.chunk)
        self.sums_RH, preactivation = compute.sums(self.received["rows"], chunk.rows, chunk, preactivation)
        arrived.preactivations.put(operation.chunk, preactivation)

    def offload(self, operation: program.Offload) -> None:
        assert self.call.arrived is not None
        self.call.arrived.preactivations.offload(operation.chunk)
        self.rows.offload(operation.chunk, self.received["rows"])

    def release(self, operation: program.Release) -> None:
        assert self.call.arrived is not None
        self.call.arrived.preactivations.written(operation.chunk)
        self.rows.written(operation.chunk, self.received.pop("rows"))


class _Backward(_Pass):
    def __init__(
        self,
        call: SpreadCall,
        x_TH: torch.Tensor,
        weights: Weights,
        output_grad_TH: torch.Tensor,
        grads: WeightGrads | None,
    ) -> None:
        assert call.arrived is not None and call.rows is not None
        super().__init__(call, call.backward_sizes, call.backward_order, {"rows": x_TH, "grads": output_grad_TH})
        self.arrived, self.rows, self.grads = call.arrived, call.rows, grads
        chunks = self.arrived.backward_chunks
        self.compute = ChunkCompute(call.experts, weights, self.arrived.probs_Q, x_TH.dtype, chunks)
        self.probs_grad_P: torch.Tensor | None = None
        self.preactivation: torch.Tensor | None = None  # of the chunk that is computed
        # What is left to do for the weight gradients of each chunk, and the buffers that it reads, to be handed back
        # after it.
        self.works: dict[int, tuple[WeightWork | None, torch.Tensor, torch.Tensor | None]] = {}

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        call, lag = self.call, self.call.plan.weight_lag
        operations = program.backward(self.sizes.degree, call.strategy, lag, *call.kinds)
        with card.exchanges_under_way():
            program.perform(operations, BACKWARD, self, INTERPRETER)
        x_grad_TH = self.finish()
        self.arrived.preactivations.free()
        self.rows.free()
        assert self.probs_grad_P is not None
        return x_grad_TH, self.probs_grad_P

    def buffer(self, chunk: int) -> torch.Tensor:
        like = self.tensors["rows"]
        return WORKSPACE.take((self.sizes.received_rows[chunk], like.size(1)), like)

    def fetch(self, operation: program.Fetch) -> None:
        self.arrived.preactivations.fetch(operation.chunk)
        self.rows.fetch(operation.chunk)

    def shared_expert_grad(self, operation: program.SharedExpertGrad) -> None:
        with span("shared expert backward"):
            self.shared_TH = None if self.call.shared is None else self.call.shared.backward(self.tensors["grads"])

    def input_grads(self, operation: program.InputGrads) -> None:
        i, received = operation.chunk, self.received
        chunk, self.received = self.arrived.backward_chunks[i], {}
        if "rows" in received:
            source_NH, rows_n = received["rows"], chunk.rows
        else:
            source_NH, rows_n = self.rows.get(i, chunk)
        self.preactivation = self.arrived.preactivations.get(i, chunk)
        self.sums_RH, work = self.compute.input_grads(
            source_NH, rows_n, chunk, self.preactivation, received["grads"], chunk.rows, None
        )
        self.works[i] = work, received["grads"], None if self.rows.has_all else source_NH

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

    def send_probs_grad(self, operation: program.SendProbsGrad) -> None:
        self.send_message(self.compute.probs_grad_Q(), self.sizes.assignments_back)

    def take_probs_grad(self, operation: program.TakeProbsGrad) -> None:
        call, home_P = self.call, self.take_message()
        size = len(call.order.assignments)
        # What was dropped has no gradient.
        self.probs_grad_P = home_P.new_empty(size) if len(home_P) == size else home_P.new_zeros(size)
        self.probs_grad_P[call.order.assignments[: len(home_P)]] = home_P


# What each operation does to the state of a pass.
FORWARD: program.Lines = {
    **streamed.LINES,
    program.FetchCopies: lambda state, _: state.call.copies.fetch(state.weights.home),
    program.WaitCopies: lambda state, _: state.call.copies.wait(),
    program.SendAssignments: _Forward.send_assignments,
    program.Expect: _Forward.expect,
    program.Dispatch: _Forward.dispatch,
    program.SharedExpert: _Forward.shared_expert,
    program.TakeAssignments: _Forward.take_assignments,
    program.WaitDispatch: _Forward.wait_dispatch,
    program.Experts: _Forward.experts,
    program.Combine: _Forward.combine,
    program.Offload: _Forward.offload,
    program.Release: _Forward.release,
    program.SumCombine: _Forward.sum_combine,
}
BACKWARD: program.Lines = {
    **streamed.LINES,
    program.Expect: _Backward.expect,
    program.Dispatch: _Backward.dispatch,
    program.SharedExpertGrad: _Backward.shared_expert_grad,
    program.WaitDispatch: _Backward.wait_dispatch,
    program.Fetch: _Backward.fetch,
    program.InputGrads: _Backward.input_grads,
    program.Combine: _Backward.combine,
    program.Release: _Backward.release,
    program.SendProbsGrad: _Backward.send_probs_grad,
    program.ExpertWeightGrads: _Backward.expert_weight_grads,
    program.SumCombine: _Backward.sum_combine,
    program.TakeProbsGrad: _Backward.take_probs_grad,
    program.ReturnGrads: lambda state, _: state.call.copies.return_grads(state.grads),
    program.WaitGrads: lambda state, _: state.call.copies.wait(),
}
