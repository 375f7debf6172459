"""The chunk pipeline of one MoE layer: an explicit forward and an explicit backward pass (PipeMoE, Shi et al., INFOCOM 2023;
MPipeMoE, Zhang et al., IPDPS 2023).

Forward, while the experts compute chunk i, the next chunks (plan.DEPTH of them) are dispatched and the last ones combined; the
shared expert fills the first wait. Backward the same with gradients: the input gradients of a chunk leave before its weight
gradients are computed, which fill the waits. Its number of chunks is its own. What is not kept for the backward pass lives in a
few buffers of the size of a chunk, used in turn.

Shapes: T tokens of this rank, H hidden size, P pairs that this rank chose, Q pairs that it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from moe import experts, memory, route
from moe.clock import Clock
from moe.dispatch import AllToAll, Flow, Handle, Traffic, start
from moe.plan import AHEAD, DEPTH, MAX_IN_FLIGHT, STRATEGIES, Plan
from moe.route import Chunk, Cuts
from moe.weights import Pairs, WeightGrads, Weights, WeightWork
from moe.workspace import WORKSPACE
from parallel.trace import named, span

SharedExpert = Callable[[torch.Tensor], torch.Tensor]


class Engine(Protocol):
    """What computes the experts of a chunk; the module `moe.experts` says what each does."""

    def forward(self, weights: Weights, source: torch.Tensor, pairs: Pairs, hidden: torch.Tensor | None) -> torch.Tensor: ...

    def input_gradients(
        self,
        weights: Weights,
        source: torch.Tensor,
        pairs: Pairs,
        hidden: torch.Tensor | None,
        output_grad: torch.Tensor,
        output_rows: torch.Tensor,
        pair_weights: torch.Tensor,
        grads: WeightGrads | None,
    ) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]: ...

    def weight_gradients(self, work: WeightWork, grads: WeightGrads) -> None: ...


def routed_experts(
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    weights: Weights,
    plan: Plan,
    exchange: AllToAll | None,
    shared_expert: SharedExpert | None = None,
    pairs_per_token: int | None = None,
    engine: Engine = experts,
    clock: Clock | None = None,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs [T, H], plus the shared expert's, differentiable in x, probs and weights.

    x [T, H]; probs [T, E] and routing_map [T, E] (bool) over the experts of all ranks of `exchange` (None: this rank has
    them all). `pairs_per_token` is the number of experts of every token where none is dropped.
    """
    clock = clock or Clock()
    choice = route.choose(routing_map, pairs_per_token)
    pair_weights = probs.reshape(-1).index_select(0, choice.flat)
    tensors = (x, pair_weights, weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    call: _LocalCall | _ParallelCall
    if exchange is not None and keep:
        call = _ParallelCall(choice, plan, keep, engine, exchange, shared_expert)
        return _Schedule.apply(call, clock, weights.activation, *tensors)
    # Without other ranks there is no wait to fill, and without a backward pass of ours the shared expert may have its own.
    call = _LocalCall(choice, plan, keep, engine) if exchange is None else _ParallelCall(choice, plan, keep, engine, exchange, None)
    output = _Schedule.apply(call, clock, weights.activation, *tensors)
    return output if shared_expert is None else output + shared_expert(x)


class _Schedule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _LocalCall | _ParallelCall, clock: Clock, activation: str, *tensors: Any) -> torch.Tensor:
        x, pair_weights, fc1, fc2, fc1_bias, fc2_bias = tensors
        ctx.call, ctx.clock, ctx.activation = call, clock, activation
        ctx.save_for_backward(*tensors)
        with clock.measure("forward" if call.keep else "evaluation", x.device):
            return call.forward(x, pair_weights, Weights(fc1, fc2, fc1_bias, fc2_bias, activation))

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, pair_weights, fc1, fc2, fc1_bias, fc2_bias = ctx.saved_tensors
        weights = Weights(fc1, fc2, fc1_bias, fc2_bias, ctx.activation)
        call, ctx.call = ctx.call, None
        if call is None:  # its buffers are in use again
            raise RuntimeError("an MoE layer's output can be differentiated once; it was asked for a second time (retain_graph).")
        grads = WeightGrads(weights) if any(ctx.needs_input_grad[5:]) else None
        with ctx.clock.measure("backward", x.device):
            x_grad, pair_weight_grad = call.backward(x, pair_weights, weights, output_grad.contiguous(), grads)
        parameter_grads = (None,) * 4 if grads is None else grads.finish()
        return None, None, None, x_grad, pair_weight_grad.to(pair_weights.dtype), *parameter_grads


class _Call:
    """What calls with and without communication have in common."""

    def __init__(self, choice: route.Choice, plan: Plan, keep: bool, engine: Engine) -> None:
        self.choice, self.plan, self.keep, self.engine = choice, plan, keep, engine
        self.strategy = STRATEGIES[plan.memory_strategy]

    def compute(
        self,
        weights: Weights,
        source: torch.Tensor,
        rows: torch.Tensor,
        chunk: Chunk,
        values: torch.Tensor,
        hidden: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A chunk's weighted sums [rows of the chunk, H], in `out` if given; `rows` are its pairs' rows of `source`."""
        with span("experts"):
            output = self.engine.forward(weights, source, experts.make_pairs(rows, chunk.counts, weights), hidden)
        with span("combine"):
            sums = route.add_up(output, chunk.sums, chunk.in_row_order(values), out)
        WORKSPACE.give(output)
        return sums

    def input_gradients(
        self,
        weights: Weights,
        source: torch.Tensor,
        rows: torch.Tensor,
        chunk: Chunk,
        hidden: torch.Tensor | None,
        output_grad: torch.Tensor,
        values: torch.Tensor,
        weight_grad: torch.Tensor,
        grads: WeightGrads | None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, WeightWork | None]:
        """A chunk's gradient of its rows [rows, H], in `out` if given; fills its part of `weight_grad`. See experts.input_gradients
        for `grads`."""
        with span("experts backward"):
            pairs = experts.make_pairs(rows, chunk.counts, weights)
            pair_grad, value_grad, work = self.engine.input_gradients(
                weights, source, pairs, hidden, output_grad, chunk.rows, values.index_select(0, chunk.ids), grads
            )
        with span("combine"):
            weight_grad[chunk.ids] = value_grad.to(weight_grad.dtype)
            sums = route.add_up(pair_grad, chunk.sums, out=out)
        WORKSPACE.give(pair_grad, value_grad)
        return sums, work


class _Rows:
    """A tensor like `like` [T, H] that chunks of rows make up; where there is one chunk, that is it."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._rows: torch.Tensor | None = None

    def room(self, first: int, count: int) -> torch.Tensor | None:
        """Where `count` rows from `first` on are to be written; None where they are all: anywhere."""
        if self._rows is None:
            if count == len(self._like):
                return None
            self._rows = WORKSPACE.lend(self._like.shape, self._like)
        return self._rows[first : first + count]

    def put(self, rows: torch.Tensor) -> None:
        """These have been written."""
        if self._rows is None:
            self._rows = rows

    def tensor(self) -> torch.Tensor:
        """All of them."""
        assert self._rows is not None
        return self._rows


def _wide(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pairs' weights as they are multiplied: in fp32 also where rows are in half precision."""
    return weights.to(torch.promote_types(dtype, torch.float32))


def _rows_of_layer(chunk: Chunk) -> torch.Tensor:
    """The chunk's pairs' rows in a buffer of all chunks."""
    return chunk.rows + chunk.first_row if chunk.first_row else chunk.rows


@named("dispatch")
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


class _LocalCall(_Call):
    """One call where this rank has all experts: no communication, and the layer's own input is what the experts read."""

    def forward(self, x: torch.Tensor, pair_weights: torch.Tensor, weights: Weights) -> torch.Tensor:
        plan, num_experts = self.plan, len(weights.fc1)
        chunks = _local_chunks(self.choice, plan.degree, num_experts)
        if self.keep:
            same = plan.backward_degree == plan.degree
            self.chunks = chunks if same else _local_chunks(self.choice, plan.backward_degree, num_experts)
            self.hidden = memory.HIDDEN[self.strategy.hidden](chunks, self.chunks, weights.fc1.size(1), x)
        values = _wide(pair_weights, x.dtype)
        output = _Rows(x)
        for i, chunk in enumerate(chunks):
            hidden = self.hidden.out(i) if self.keep else None
            room = output.room(chunk.first_row, chunk.num_rows)
            output.put(self.compute(weights, x, _rows_of_layer(chunk), chunk, values, hidden, room))
            del hidden
            if self.keep:
                self.hidden.written(i)
        return output.tensor()

    def backward(
        self, x: torch.Tensor, pair_weights: torch.Tensor, weights: Weights, output_grad: torch.Tensor, grads: WeightGrads | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = _wide(pair_weights, x.dtype)
        weight_grad = torch.empty(len(values), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        x_grad = _Rows(x)
        for i, chunk in enumerate(self.chunks):
            chunk_grad = output_grad[chunk.first_row : chunk.first_row + chunk.num_rows]
            rows, hidden = _rows_of_layer(chunk), self.hidden.get(i, chunk)
            room = x_grad.room(chunk.first_row, chunk.num_rows)
            sums, work = self.input_gradients(weights, x, rows, chunk, hidden, chunk_grad, values, weight_grad, grads, room)
            self.hidden.done(hidden)
            x_grad.put(sums)
            if work is not None:
                work.free()
            del sums, work, hidden
        self.hidden.free()
        return x_grad.tensor(), weight_grad


class _Pass:
    """One pass's chunks as both sides see them: who sends how many rows, and which pairs belong to a chunk."""

    def __init__(self, traffic: Traffic, first_column: int, degree: int) -> None:
        columns = [(column, column + 1) for column in range(first_column, first_column + 2 * degree, 2)]
        self.degree = degree
        self.sends, self.receives = (
            Cuts(*([[of_rank[pair[kind]] for pair in columns] for of_rank in side] for kind in (0, 1)))
            for side in (traffic.sent, traffic.received)
        )
        self.flows = [traffic.flow([rows]) for rows, _ in columns]
        self.answers = [traffic.flow([rows], back=True) for rows, _ in columns]
        pairs = [pairs for _, pairs in columns]
        self.pair_flow, self.pair_answer = traffic.flow(pairs), traffic.flow(pairs, back=True)
        self.received_rows = self.receives.total_rows()

    def chunks(self, rows: torch.Tensor, local_experts: torch.Tensor, num_local_experts: int) -> list[Chunk]:
        """The chunks of received pairs; `rows` [Q] count in a buffer of all chunks' rows."""
        chunks, first = [], 0
        for i, num_rows in enumerate(self.received_rows):
            pairs = self.receives.slices(self.receives.pairs, i)
            chunks.append(route.make_chunk(pairs, rows, local_experts, first, num_rows, num_local_experts))
            first += num_rows
        return chunks


class _ParallelCall(_Call):
    """One call where the experts are spread over the ranks of `exchange`."""

    def __init__(
        self, choice: route.Choice, plan: Plan, keep: bool, engine: Engine, exchange: AllToAll, shared_expert: SharedExpert | None
    ) -> None:
        super().__init__(choice, plan, keep, engine)
        self.exchange, self.shared_expert = exchange, shared_expert
        self._in_flight: list[tuple[Handle, torch.Tensor | None]] = []  # exchanges, and the send buffers to hand back after them

    # -- setting up --------------------------------------------------------------------------------------------------

    @named("dispatch")
    def _exchange_counts(self, num_local_experts: int) -> None:
        """Cut both sides' rows and pairs into chunks: one exchange of counts for all chunks and both passes, one wait of the host."""
        plan, size = self.plan, self.exchange.size
        self.sent = route.outgoing(self.choice, num_local_experts, size)
        degrees = [plan.degree] if plan.degree == plan.backward_degree or not self.keep else [plan.degree, plan.backward_degree]
        counts = [route.traffic(self.sent, self.choice.num_tokens, size, degree).flatten(1) for degree in degrees]
        traffic = self.exchange.count(counts[0] if len(counts) == 1 else torch.cat(counts, dim=1))
        self.forward_pass = self.backward_pass = _Pass(traffic, 0, plan.degree)
        if len(degrees) == 2:
            self.backward_pass = _Pass(traffic, 2 * plan.degree, plan.backward_degree)
        self.row_tokens = self.sent.row_tokens(sum(self.forward_pass.sends.total_rows()))

    @named("dispatch")
    def _start_pairs(self, pair_weights: torch.Tensor) -> Handle:
        """Send each pair's code and weight to its expert's rank: one message for all chunks."""
        weights = pair_weights.index_select(0, self.sent.pairs)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        bits = torch.int64 if weights.dtype is torch.float64 else torch.int32
        message = torch.stack([self.sent.codes.to(bits), weights.view(bits)], dim=1)
        flow = self.forward_pass.pair_flow
        return self._follow(start(self.exchange, message, message.new_empty(sum(flow.receive), 2), flow))

    @named("dispatch")
    def _take_pairs(self, message: torch.Tensor, num_local_experts: int, dtype: torch.dtype) -> None:
        codes = message[:, 0].long()
        self.values = message[:, 1].contiguous().view(dtype)  # [Q]
        local_experts = codes % num_local_experts
        self.source_rows = route.received_rows(codes, self.forward_pass.receives, num_local_experts)  # [Q]
        self.chunks = self.backward_chunks = self.forward_pass.chunks(self.source_rows, local_experts, num_local_experts)
        if self.backward_pass is not self.forward_pass:
            rows = route.received_rows(codes, self.backward_pass.receives, num_local_experts)
            self.backward_chunks = self.backward_pass.chunks(rows, local_experts, num_local_experts)

    # -- one chunk's way ---------------------------------------------------------------------------------------------

    @named("dispatch")
    def _send_rows(self, handle: Handle, values: torch.Tensor, cut: Cuts, chunk: int, receive: torch.Tensor, receive_cut: Cuts) -> None:
        """Gather a chunk's rows from `values` [T, H] and send them; this rank's own go straight into the receive buffer."""
        me, slices = self.exchange.rank, cut.slices(cut.rows, chunk)
        own = slices[me]
        before = sum(receive_cut.chunk_rows(chunk)[:me])
        torch.index_select(values, 0, self.row_tokens[own], out=receive[before : before + cut.chunk_rows(chunk)[me]])
        away = route.cut_list(self.row_tokens, [part for rank, part in enumerate(slices) if rank != me])
        rows = WORKSPACE.take((len(away), values.size(1)), values)
        torch.index_select(values, 0, away, out=rows)
        handle.send(rows, own=False)
        self._follow(handle, rows)

    @named("combine")
    def _answer(self, sums: torch.Tensor, flow: Flow, values: torch.Tensor, cut: Cuts, chunk: int) -> Handle:
        """Send a computed chunk's sums home."""
        handle = self.exchange.expect(WORKSPACE.take((sum(cut.chunk_rows(chunk)), values.size(1)), values), flow)
        handle.send(sums)
        return self._follow(handle)

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
        num_local_experts = len(weights.fc1)
        self._exchange_counts(num_local_experts)
        this = self.forward_pass
        sends, receives, degree = this.sends, this.receives, this.degree
        pairs = self._start_pairs(pair_weights)
        self.rows = memory.ROWS[self.strategy.rows if self.keep else "communicate"](this.received_rows, x)
        arrivals = _Arrivals(self.exchange, this, lambda i: self.rows.out(i), degree if self.rows.has_all else AHEAD)
        for i in range(min(DEPTH, degree)):
            self._send_rows(arrivals.handle(i), x, sends, i, arrivals.buffer(i), receives)
        with span("shared expert"):
            shared = self._shared_forward(x)
        self._take_pairs(pairs.wait(), num_local_experts, torch.promote_types(pair_weights.dtype, torch.float32))
        values = _wide(self.values, x.dtype)
        if self.keep:
            self.hidden = memory.HIDDEN[self.strategy.hidden](self.chunks, self.backward_chunks, weights.fc1.size(1), x)
        output, answers = _Rows(x), _Answers(self, sends)
        for i, chunk in enumerate(self.chunks):
            ahead = i + DEPTH
            if ahead < degree:
                self._send_rows(arrivals.handle(ahead), x, sends, ahead, arrivals.buffer(ahead), receives)
            source = arrivals.wait(i)
            hidden = self.hidden.out(i) if self.keep else None
            sums = self.compute(weights, source, chunk.rows, chunk, values, hidden)
            answers.append(self._answer(sums, this.answers[i], x, sends, i))
            if self.keep:
                self.hidden.written(i)
            self.rows.written(i, source)
            del sums, source, hidden  # a buffer is free when nothing refers to it
            answers.add_up(output, keep=DEPTH)
        answers.add_up(output)
        self._finish_all()
        return output.tensor() if shared is None else output.tensor().add_(shared)

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
        exchange, this, lag = self.exchange, self.backward_pass, self.plan.weight_lag
        sends, receives, degree = this.sends, this.receives, this.degree
        values = _wide(self.values, x.dtype)

        def room(i: int) -> torch.Tensor:
            return WORKSPACE.take((this.received_rows[i], x.size(1)), x)

        # What arrives for each chunk, in the order in which it is needed.
        arriving = {"grad": (_Arrivals(exchange, this, room, AHEAD), output_grad)}
        if self.strategy.rows == "communicate":
            arriving["rows"] = (_Arrivals(exchange, this, room, AHEAD), x)
            if self.strategy.hidden == "recompute":
                arriving = dict(reversed(arriving.items()))

        def send(i: int) -> None:
            for arrivals, tensor in arriving.values():
                self._send_rows(arrivals.handle(i), tensor, sends, i, arrivals.buffer(i), receives)

        pair_weight_grad = torch.empty(len(self.values), dtype=self.values.dtype, device=x.device)
        x_grad, answers, later = _Rows(x), _Answers(self, sends), _WeightQueue(self.engine, grads)
        for i in range(min(DEPTH, degree)):
            send(i)
        self.hidden.fetch(0)
        self.rows.fetch(0)
        with span("shared expert backward"):
            shared_grad = self._shared_backward(output_grad)
        for i, chunk in enumerate(self.backward_chunks):
            if i + DEPTH < degree:
                send(i + DEPTH)
            if i + 1 < degree:
                self.hidden.fetch(i + 1)
                self.rows.fetch(i + 1)
            if "rows" in arriving:
                source, rows = arriving["rows"][0].wait(i), chunk.rows
            else:
                source, rows = self.rows.get(i, chunk, self.source_rows)
            chunk_grad = arriving["grad"][0].wait(i)
            hidden = self.hidden.get(i, chunk)
            sums, work = self.input_gradients(weights, source, rows, chunk, hidden, chunk_grad, values, pair_weight_grad, None)
            answers.append(self._answer(sums, this.answers[i], x, sends, i))
            self.hidden.done(hidden)
            later.add(work, chunk_grad, None if self.rows.has_all else source)
            del sums, work, chunk_grad, source, hidden
            if i + 1 == degree:
                flow = this.pair_answer
                pairs = self._follow(start(exchange, pair_weight_grad, pair_weight_grad.new_empty(sum(flow.receive)), flow))
            later.run(keep=lag)
            answers.add_up(x_grad, keep=DEPTH)
        later.run(keep=0)
        answers.add_up(x_grad)
        weight_grads_home = pairs.wait()
        choice_grad = torch.empty_like(weight_grads_home)
        choice_grad[self.sent.pairs] = weight_grads_home
        self._finish_all()
        self.hidden.free()
        self.rows.free()
        return x_grad.tensor() if shared_grad is None else x_grad.tensor().add_(shared_grad), choice_grad

    def _shared_backward(self, output_grad: torch.Tensor) -> torch.Tensor | None:
        if self.shared_expert is None:
            return None
        torch.autograd.backward(self.shared_edge, output_grad)
        gradient = self.shared_input.grad
        del self.shared_edge, self.shared_input
        return gradient


class _Arrivals:
    """Receives of one tensor's chunks, posted `ahead` of the chunk that is waited for: a rank that got ready late would hold up
    the others, as its notice waits behind its own rows."""

    def __init__(self, exchange: AllToAll, this: _Pass, room: Callable[[int], torch.Tensor], ahead: int) -> None:
        self._exchange, self._pass, self._room, self._ahead = exchange, this, room, ahead
        self._expected: dict[int, tuple[Handle, torch.Tensor]] = {}
        self._next = 0
        self._expect(ahead)

    def _expect(self, last: int) -> None:
        while self._next <= min(last, self._pass.degree - 1):
            buffer = self._room(self._next)
            self._expected[self._next] = (self._exchange.expect(buffer, self._pass.flows[self._next]), buffer)
            self._next += 1

    def handle(self, i: int) -> Handle:
        return self._expected[i][0]

    def buffer(self, i: int) -> torch.Tensor:
        return self._expected[i][1]

    @named("dispatch wait")
    def wait(self, i: int) -> torch.Tensor:
        """Chunk i; its buffer is the caller's then."""
        self._expect(i + self._ahead)
        handle, buffer = self._expected.pop(i)
        handle.wait()
        return buffer


class _Answers:
    """A pass's answers on their way home, oldest first."""

    def __init__(self, call: _ParallelCall, cut: Cuts) -> None:
        self._call, self._cut, self._next = call, cut, 0
        self._handles: list[Handle] = []

    def append(self, handle: Handle) -> None:
        """The answer of the next chunk."""
        self._handles.append(handle)

    @named("combine")
    def add_up(self, result: _Rows, keep: int = 0) -> None:
        """Wait for all but the youngest `keep`, and add up each chunk's rows per token."""
        first, cut = route.boundaries(self._call.choice.num_tokens, self._cut.degree), self._cut
        while len(self._handles) > keep:
            chunk = self._next
            tokens = route.cut_list(self._call.row_tokens, cut.slices(cut.rows, chunk))
            num_tokens = first[chunk + 1] - first[chunk]
            home_sum = route.home_sum(tokens, first[chunk], num_tokens)
            rows = self._handles.pop(0).wait()
            result.put(route.add_up(rows, home_sum, out=result.room(first[chunk], num_tokens)))
            WORKSPACE.give(rows)
            del rows
            self._next += 1


class _WeightQueue:
    """Weight gradients that are still to be computed, oldest first, and the buffers that they read."""

    def __init__(self, engine: Engine, grads: WeightGrads | None) -> None:
        self._engine, self._grads = engine, grads
        self._works: list[tuple[WeightWork | None, torch.Tensor, torch.Tensor | None]] = []

    def add(self, work: WeightWork | None, grad: torch.Tensor, source: torch.Tensor | None) -> None:
        """A chunk's work, its rows' gradients, and its rows if nobody else keeps them; both go back to the workspace after it."""
        self._works.append((work, grad, source))

    @named("experts weight gradients")
    def run(self, keep: int) -> None:
        """Compute all but the youngest `keep`."""
        while len(self._works) > keep:
            work, *buffers = self._works.pop(0)
            if work is not None and self._grads is not None:
                self._engine.weight_gradients(work, self._grads)
            elif work is not None:
                work.free()
            WORKSPACE.give(*buffers)
