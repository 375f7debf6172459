"""The chunk pipeline of one MoE layer: an explicit forward and an explicit backward pass (PipeMoE, Shi et al., INFOCOM 2023;
MPipeMoE, Zhang et al., IPDPS 2023).

Forward, while the experts compute chunk i, chunk i + 1 is dispatched and chunk i - 1 combined; the shared expert fills the
first wait. Backward the same with gradients: input gradients of all chunks first, so that they leave early, then the weight
gradients, which fill the wait for the last ones. Its number of chunks is its own.

Shapes: T tokens of this rank, H hidden size, P pairs that this rank chose, Q pairs that it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe import experts, memory, route
from moe.dispatch import AllToAll, Handle, start
from moe.experts import WeightGrads, Weights, WeightWork
from moe.route import Chunk, Cuts, Sum
from moe.workspace import WORKSPACE

MAX_IN_FLIGHT = 5  # exchanges of a pass that may still be sending: bounds the memory of send buffers

SharedExpert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """How one call of a layer runs: numbers of chunks, and what is kept for the backward pass (a key of memory.STRATEGIES)."""

    degree: int = 1
    backward_degree: int = 1
    memory_strategy: str = "keep"


def routed_experts(
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    weights: Weights,
    plan: Plan,
    exchange: AllToAll | None,
    shared_expert: SharedExpert | None = None,
    pairs_per_token: int | None = None,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs [T, H], plus the shared expert's, differentiable in x, probs and weights.

    x [T, H]; probs [T, E] and routing_map [T, E] (bool) over the experts of all ranks of `exchange` (None: this rank has
    them all). `pairs_per_token` is the number of experts of every token where none is dropped.
    """
    choice = route.choose(routing_map, pairs_per_token)
    pair_weights = probs.reshape(-1).index_select(0, choice.flat)
    tensors = (x, pair_weights, weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    call: _LocalCall | _ParallelCall
    if exchange is not None and keep:
        call = _ParallelCall(choice, plan, keep, exchange, shared_expert)
        return _Schedule.apply(call, weights.activation, *tensors)
    # Without other ranks there is no wait to fill, and without a backward pass of ours the shared expert may have its own.
    call = _LocalCall(choice, plan, keep) if exchange is None else _ParallelCall(choice, plan, keep, exchange, None)
    output = _Schedule.apply(call, weights.activation, *tensors)
    return output if shared_expert is None else output + shared_expert(x)


class _Schedule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _LocalCall | _ParallelCall, activation: str, *tensors: Any) -> torch.Tensor:
        x, pair_weights, fc1, fc2, fc1_bias, fc2_bias = tensors
        ctx.call, ctx.activation = call, activation
        ctx.save_for_backward(*tensors)
        return call.forward(x, pair_weights, Weights(fc1, fc2, fc1_bias, fc2_bias, activation))

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, pair_weights, fc1, fc2, fc1_bias, fc2_bias = ctx.saved_tensors
        weights = Weights(fc1, fc2, fc1_bias, fc2_bias, ctx.activation)
        call, ctx.call = ctx.call, None
        if call is None:  # its buffers are in use again
            raise RuntimeError("an MoE layer's output can be differentiated once; it was asked for a second time (retain_graph).")
        grads = WeightGrads(weights) if any(ctx.needs_input_grad[4:]) else None
        x_grad, pair_weight_grad = call.backward(x, pair_weights, weights, output_grad.contiguous(), grads)
        parameter_grads = (None,) * 4 if grads is None else grads.finish()
        return None, None, x_grad, pair_weight_grad.to(pair_weights.dtype), *parameter_grads


def _compute_chunk(weights: Weights, source: torch.Tensor, chunk: Chunk, values: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """A chunk's weighted sums [rows of the chunk, H] from the rows of all chunks."""
    rows = chunk.rows + chunk.first_row if chunk.first_row else chunk.rows
    output = experts.forward(weights, source, experts.make_pairs(rows, chunk.counts, weights), hidden)
    sums = route.add_up(output, chunk.sums, chunk.in_row_order(values))
    WORKSPACE.give(output)
    return sums


def _local_chunks(choice: route.Choice, degree: int, num_experts: int) -> list[Chunk]:
    first = route.boundaries(choice.num_tokens, degree)
    if choice.pairs_per_token is not None:
        cut = [token * choice.pairs_per_token for token in first]
    else:
        cut = torch.searchsorted(choice.tokens, torch.tensor(first, device=choice.tokens.device)).tolist()
    return [
        route.make_chunk([slice(cut[i], cut[i + 1])], choice.tokens, choice.experts, first[i], first[i + 1] - first[i], num_experts)
        for i in range(degree)
    ]


class _LocalCall:
    """One call where this rank has all experts: no communication, and the layer's own input is what the experts read."""

    def __init__(self, choice: route.Choice, plan: Plan, keep: bool) -> None:
        self.choice, self.plan, self.keep = choice, plan, keep

    def forward(self, x: torch.Tensor, pair_weights: torch.Tensor, weights: Weights) -> torch.Tensor:
        plan, num_experts = self.plan, len(weights.fc1)
        chunks = _local_chunks(self.choice, plan.degree, num_experts)
        if self.keep:
            same = plan.backward_degree == plan.degree
            self.chunks = chunks if same else _local_chunks(self.choice, plan.backward_degree, num_experts)
            self.saved = memory.STRATEGIES[plan.memory_strategy](chunks, self.chunks, weights.fc1.size(1), x)
        values = pair_weights.to(x.dtype)
        sums = []
        for i, chunk in enumerate(chunks):
            sums.append(_compute_chunk(weights, x, chunk, values, self.saved.hidden_out(i) if self.keep else None))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def backward(
        self, x: torch.Tensor, pair_weights: torch.Tensor, weights: Weights, output_grad: torch.Tensor, grads: WeightGrads | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = pair_weights.to(x.dtype)
        weight_grad = torch.empty(len(values), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        x_grads = []
        for i, chunk in enumerate(self.chunks):
            chunk_grad = output_grad[chunk.first_row : chunk.first_row + chunk.num_rows]
            sums, work = _input_gradients(weights, x, chunk, self.saved.hidden(i, chunk), chunk_grad, values, weight_grad, grads)
            x_grads.append(sums)
            if work is not None:
                work.free()
        self.saved.free()
        return x_grads[0] if len(x_grads) == 1 else torch.cat(x_grads), weight_grad


def _input_gradients(
    weights: Weights,
    source: torch.Tensor,
    chunk: Chunk,
    hidden: torch.Tensor | None,
    output_grad: torch.Tensor,
    values: torch.Tensor,
    weight_grad: torch.Tensor,
    grads: WeightGrads | None,
    source_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, WeightWork | None]:
    """A chunk's gradient of its rows [rows, H]; fills its part of `weight_grad`. See experts.input_gradients for `grads`."""
    if source_rows is None:
        source_rows = chunk.rows + chunk.first_row if chunk.first_row else chunk.rows
    pairs = experts.make_pairs(source_rows, chunk.counts, weights)
    pair_grad, value_grad, work = experts.input_gradients(
        weights, source, pairs, hidden, output_grad, chunk.rows, values.index_select(0, chunk.ids), grads
    )
    weight_grad[chunk.ids] = value_grad.to(weight_grad.dtype)
    sums = route.add_up(pair_grad, chunk.sums)
    WORKSPACE.give(pair_grad, value_grad)
    return sums, work


class _ParallelCall:
    """One call where the experts are spread over the ranks of `exchange`."""

    def __init__(self, choice: route.Choice, plan: Plan, keep: bool, exchange: AllToAll, shared_expert: SharedExpert | None) -> None:
        self.choice, self.plan, self.keep, self.exchange, self.shared_expert = choice, plan, keep, exchange, shared_expert
        self._in_flight: list[tuple[Handle, torch.Tensor | None]] = []  # exchanges, and the send buffers to hand back after them

    # -- setting up --------------------------------------------------------------------------------------------------

    def _exchange_counts(self, num_local_experts: int) -> None:
        """Cut both sides' rows and pairs into chunks: one exchange of counts for all chunks and both passes, one wait of the host."""
        plan, size = self.plan, self.exchange.size
        self.sent = route.outgoing(self.choice, num_local_experts, size)
        degrees = [plan.degree] if plan.degree == plan.backward_degree or not self.keep else [plan.degree, plan.backward_degree]
        counts = torch.cat([route.traffic(self.sent, self.choice.num_tokens, size, degree) for degree in degrees], dim=1)
        received = torch.empty_like(counts)
        self._follow(start(self.exchange, counts, [1] * size, received, [1] * size)).wait()
        both = torch.stack([counts, received]).tolist()
        first = plan.degree
        self.send_cuts, self.receive_cuts = (route.cuts([rank[:first] for rank in side]) for side in both)
        self.backward_send_cuts, self.backward_receive_cuts = self.send_cuts, self.receive_cuts
        if len(degrees) == 2:
            self.backward_send_cuts, self.backward_receive_cuts = (route.cuts([rank[first:] for rank in side]) for side in both)
        self.row_tokens = self.sent.row_tokens(sum(self.send_cuts.total_rows()))

    def _start_pairs(self, pair_weights: torch.Tensor) -> Handle:
        """Send each pair's code and weight to its expert's rank: one message for all chunks."""
        weights = pair_weights.index_select(0, self.sent.pairs)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        bits = torch.int64 if weights.dtype is torch.float64 else torch.int32
        message = torch.stack([self.sent.codes.to(bits), weights.view(bits)], dim=1)
        self.pairs_sent = [sum(counts) for counts in self.send_cuts.pairs]
        self.pairs_received = [sum(counts) for counts in self.receive_cuts.pairs]
        received = message.new_empty(sum(self.pairs_received), 2)
        return self._follow(start(self.exchange, message, self.pairs_sent, received, self.pairs_received))

    def _take_pairs(self, message: torch.Tensor, num_local_experts: int, dtype: torch.dtype) -> None:
        codes = message[:, 0].long()
        self.values = message[:, 1].contiguous().view(dtype)  # [Q]
        self.source_rows = route.received_rows(codes, self.receive_cuts, num_local_experts)  # [Q]
        local_experts = codes % num_local_experts
        self.chunks = _received_chunks(self.receive_cuts, self.source_rows, local_experts, num_local_experts)
        self.backward_chunks = self.chunks
        if self.backward_receive_cuts is not self.receive_cuts:
            rows = route.received_rows(codes, self.backward_receive_cuts, num_local_experts)
            self.backward_chunks = _received_chunks(self.backward_receive_cuts, rows, local_experts, num_local_experts)

    # -- one chunk's way ---------------------------------------------------------------------------------------------

    def _send_rows(self, handle: Handle, values: torch.Tensor, cut: Cuts, chunk: int, receive: torch.Tensor, receive_cut: Cuts) -> None:
        """Gather a chunk's rows from `values` [T, H] and send them; this rank's own go straight into the receive buffer."""
        me, slices = self.exchange.rank, cut.slices(cut.rows, chunk)
        counts = cut.chunk_rows(chunk)
        own = slices[me]
        before = sum(receive_cut.chunk_rows(chunk)[:me])
        torch.index_select(values, 0, self.row_tokens[own], out=receive[before : before + counts[me]])
        counts[me] = 0
        away = route.cut_list(self.row_tokens, [part for rank, part in enumerate(slices) if rank != me])
        rows = WORKSPACE.take((len(away), values.size(1)), values)
        torch.index_select(values, 0, away, out=rows)
        handle.send(rows, counts, own=False)
        self._follow(handle, rows)

    def _home_sum(self, cut: Cuts, chunk: int) -> Sum:
        first = route.boundaries(self.choice.num_tokens, cut.degree)
        tokens = route.cut_list(self.row_tokens, cut.slices(cut.rows, chunk))
        return route.home_sum(tokens, first[chunk], first[chunk + 1] - first[chunk])

    def _follow(self, handle: Handle, rows: torch.Tensor | None = None) -> Handle:
        """Remember an exchange whose rows are on their way; older ones are over by now, or are waited for."""
        self._in_flight.append((handle, rows))
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._finish_oldest()
        return handle

    def _finish_oldest(self) -> None:
        handle, rows = self._in_flight.pop(0)
        handle.finish()
        WORKSPACE.give(rows)

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor, pair_weights: torch.Tensor, weights: Weights) -> torch.Tensor:
        num_local_experts, exchange = len(weights.fc1), self.exchange
        self._exchange_counts(num_local_experts)
        sends, receives, degree = self.send_cuts, self.receive_cuts, self.plan.degree
        pairs = self._start_pairs(pair_weights)
        self.source = WORKSPACE.take((sum(receives.total_rows()), x.size(1)), x)
        parts = self.source.split(receives.total_rows())
        # All receives are posted first, so that no rank's notice waits behind its own rows.
        dispatches = [exchange.expect(part, receives.chunk_rows(i)) for i, part in enumerate(parts)]
        returns: list[Handle] = []
        self._send_rows(dispatches[0], x, sends, 0, parts[0], receives)
        shared = self._shared_forward(x)
        self._take_pairs(pairs.wait(), num_local_experts, torch.promote_types(pair_weights.dtype, torch.float32))
        values = self.values.to(x.dtype)
        saved = (
            memory.STRATEGIES[self.plan.memory_strategy](self.chunks, self.backward_chunks, weights.fc1.size(1), x) if self.keep else None
        )
        outputs: list[torch.Tensor] = []
        for i, chunk in enumerate(self.chunks):
            if i + 1 < degree:
                self._send_rows(dispatches[i + 1], x, sends, i + 1, parts[i + 1], receives)
            returns.append(exchange.expect(WORKSPACE.take((sum(sends.chunk_rows(i)), x.size(1)), x), sends.chunk_rows(i)))
            dispatches[i].wait()
            sums = _compute_chunk(weights, self.source, chunk, values, saved.hidden_out(i) if saved is not None else None)
            returns[i].send(sums, receives.chunk_rows(i))
            self._follow(returns[i])
            if i > 0:
                outputs.append(self._sum_at_home(returns[i - 1], sends, i - 1))
        outputs.append(self._sum_at_home(returns[-1], sends, degree - 1))
        self._finish_all()
        output = outputs[0] if degree == 1 else torch.cat(outputs)
        if saved is not None:
            self.saved = saved
        else:
            WORKSPACE.give(self.source)
        return output if shared is None else output.add_(shared)

    def _sum_at_home(self, handle: Handle, cut: Cuts, chunk: int) -> torch.Tensor:
        rows = handle.wait()
        sums = route.add_up(rows, self._home_sum(cut, chunk))
        WORKSPACE.give(rows)
        return sums

    def _shared_forward(self, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert with a graph of its own, so that the backward pass can run it where it waits."""
        if self.shared_expert is None:
            return None
        with torch.enable_grad():
            self.shared_input = x.detach().requires_grad_()
            output = self.shared_expert(self.shared_input)
        self.shared_edge = torch.autograd.graph.get_gradient_edge(output)
        return output.detach()

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(
        self, x: torch.Tensor, pair_weights: torch.Tensor, weights: Weights, output_grad: torch.Tensor, grads: WeightGrads | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exchange, degree = self.exchange, self.plan.backward_degree
        sends, receives = self.backward_send_cuts, self.backward_receive_cuts
        values = self.values.to(x.dtype)
        received = WORKSPACE.take((sum(receives.total_rows()), x.size(1)), x)
        parts = received.split(receives.total_rows())
        dispatches = [exchange.expect(part, receives.chunk_rows(i)) for i, part in enumerate(parts)]
        returns: list[Handle] = []
        pair_weight_grad = torch.empty(len(self.values), dtype=self.values.dtype, device=x.device)
        self._send_rows(dispatches[0], output_grad, sends, 0, parts[0], receives)
        shared_grad = self._shared_backward(output_grad)
        later: list[WeightWork] = []
        home_sums: list[torch.Tensor] = []
        for i, chunk in enumerate(self.backward_chunks):
            if i + 1 < degree:
                self._send_rows(dispatches[i + 1], output_grad, sends, i + 1, parts[i + 1], receives)
            returns.append(exchange.expect(WORKSPACE.take((sum(sends.chunk_rows(i)), x.size(1)), x), sends.chunk_rows(i)))
            dispatches[i].wait()
            rows = self.source_rows.index_select(0, chunk.ids)
            hidden = self.saved.hidden(i, chunk)
            sums, work = _input_gradients(weights, self.source, chunk, hidden, parts[i], values, pair_weight_grad, None, rows)
            returns[i].send(sums, receives.chunk_rows(i))
            self._follow(returns[i])
            if work is not None:
                later.append(work)
        weight_grads_home = pair_weight_grad.new_empty(sum(self.pairs_sent))
        pairs = self._follow(start(exchange, pair_weight_grad, self.pairs_received, weight_grads_home, self.pairs_sent))
        for work in later:
            if grads is not None:
                experts.weight_gradients(work, grads)
            else:
                work.free()
        for i, handle in enumerate(returns):
            home_sums.append(self._sum_at_home(handle, sends, i))
        x_grad = home_sums[0] if degree == 1 else torch.cat(home_sums)
        choice_grad = torch.empty_like(weight_grads_home)
        choice_grad[self.sent.pairs] = pairs.wait()
        self._finish_all()
        self.saved.free()
        WORKSPACE.give(received, self.source)
        return x_grad if shared_grad is None else x_grad.add_(shared_grad), choice_grad

    def _shared_backward(self, output_grad: torch.Tensor) -> torch.Tensor | None:
        if self.shared_expert is None:
            return None
        torch.autograd.backward(self.shared_edge, output_grad)
        gradient = self.shared_input.grad
        del self.shared_edge, self.shared_input
        return gradient


def _received_chunks(cut: Cuts, rows: torch.Tensor, local_experts: torch.Tensor, num_local_experts: int) -> list[Chunk]:
    chunks, first = [], 0
    for i, num_rows in enumerate(cut.total_rows()):
        chunks.append(route.make_chunk(cut.slices(cut.pairs, i), rows, local_experts, first, num_rows, num_local_experts))
        first += num_rows
    return chunks
