"""Measures what one MoE layer's operations take on this machine: from a layer to the `LayerCosts` that planners plan with.

Every operation is the schedule's own, on made-up rows and evenly spread pairs, at sizes from a 32nd of an even load up to all of
it. Then whole passes run in a few numbers of chunks, and what the operations do not explain of their times is a cost of its own.
Takes under 10 seconds unless a single operation takes seconds; all ranks of the layer's expert parallel group do it together and
end with the same numbers, which `parallel.costs` keeps on disk.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from moe import experts, route
from moe.blocks import SPARE_ROWS
from moe.dispatch import AllToAll, Flow
from moe.layer import MixtrainMoELayer
from moe.load import Shape
from moe.plan import Plan
from moe.planner import LayerCosts, Limits, best_plan, predict
from moe.route import Chunk
from moe.schedule import Engine, routed_experts
from moe.weights import WeightGrads, Weights, WeightWork
from moe.workspace import WORKSPACE
from parallel import costs
from parallel.costs import NOTHING, Call, Curve, Line

SIZES = (1, 2, 4, 8, 16, 32)  # an even load is measured cut into so many
BUDGET = 8.0  # seconds for all of it; first calls and what is being measured when the time is up come on top
SHORT = 0.02  # seconds of an exchange that are enough to see how fast the link is
WHOLE_SHARE = 0.4  # of the time is for whole passes; the shares below are of the rest
DEGREES = (1, 2, 4, 8)  # numbers of chunks in which they run
MIXED = (4, 2)  # forward and backward, to see what other chunks backward cost
STEPS = 3  # of a plan one after the other; the first one makes its buffers
MAX_VISITS = 5
FEWER = ((1, 1), (4, 4), (8, 8))  # run alone where steps are long
BELIEVED = 0.5  # of what whole passes take beyond the model: few are run, and a disturbed one must not decide
TRUST = 2.0  # a link that is so many times faster or slower than the cache says is another link


def measure_layer(
    layer: MixtrainMoELayer,
    shape: Shape,
    folder: str | os.PathLike[str] | None = None,
    engine: Engine = experts,
    budget: float = BUDGET,
) -> LayerCosts:
    """The costs of a layer, from the cache in `folder` (None: neither read nor written) or measured; all ranks of its group call it."""
    module, shared = layer.experts, layer.shared_experts
    # Read directly: to call the modules would start what their hooks do for a training step.
    fc1, fc2 = (linear.weight.detach() for linear in (module.linear_fc1, module.linear_fc2))
    biases = [None if linear.bias is None else linear.bias.detach() for linear in (module.linear_fc1, module.linear_fc2)]
    weights = Weights(fc1, fc2, biases[0], biases[1], module.activation)
    shared_width = 0 if shared is None else shared.linear_fc2.weight.size(1)
    group = layer.ep_group if layer.ep_group.size() > 1 else None
    return measure_costs(weights, layer.exchange, group, shape, shared_width, folder, engine, budget)


def measure_costs(
    weights: Weights,
    exchange: AllToAll | None,
    group: dist.ProcessGroup | None,
    shape: Shape,
    shared_width: int = 0,
    folder: str | os.PathLike[str] | None = None,
    engine: Engine = experts,
    budget: float = BUDGET,
) -> LayerCosts:
    """The same from a layer's parts. `group` has the ranks of `exchange`; `shared_width` is the shared expert's F on this rank."""
    device = weights.fc1.device
    key = {
        **costs.hardware_key(device),
        **costs.layout_key(group),
        "exchange": type(exchange).__name__,
        "engine": getattr(engine, "__name__", type(engine).__name__),
        "shape": asdict(shape),
        "dtype": str(weights.fc1.dtype),
        "activation": weights.activation,
        "bias": weights.fc1_bias is not None,
        "shared_width": shared_width,
        "fields": [field.name for field in fields(LayerCosts)],
    }
    with torch.no_grad():
        bench = _Bench(weights, exchange, group, shape, engine, budget)

        def still_true(values: dict[str, Any]) -> bool:
            return exchange is None or bench.link_is(LayerCosts.from_dict(values).exchange)

        values = costs.cached(folder, key, lambda: bench.measure(shared_width).as_dict(), device, group, still_true)
    return LayerCosts.from_dict(values)


class _HeldWork(WeightWork):
    """Weight gradients that can be computed again."""

    def free(self) -> None:
        """Nothing is handed back yet."""


class _Bench:
    """One layer's operations, ready to be timed."""

    def __init__(
        self, weights: Weights, exchange: AllToAll | None, group: dist.ProcessGroup | None, shape: Shape, engine: Engine, budget: float
    ) -> None:
        self.weights, self.exchange, self.group, self.engine = weights, exchange, group, engine
        self.budget = budget if exchange is None else (1.0 - WHOLE_SHARE) * budget
        self.whole_budget = budget - self.budget
        self.device, self.shape, self.load = weights.fc1.device, shape, shape.even()
        load = self.load
        self.num_ranks, self.num_experts = shape.num_ranks, len(weights.fc1)
        self.source = torch.randn(max(load.rows, 1), load.hidden_size, device=self.device).to(weights.fc1.dtype)
        self.pairs, self.rows = (sorted({max(count // size, 1) for size in SIZES}) for count in (load.pairs, load.rows))

    def measure(self, shared_width: int) -> LayerCosts:
        """Everything, one after the other."""
        forward, inputs = self._curve(self._forward, 0.12), self._times(lambda n: self._input_gradients(n, keep=True), 0.12)
        again = self._times(lambda n: self._input_gradients(n, keep=False), 0.12)
        extra = [max(b - a, 0.0) for a, b in zip(inputs[1], again[1], strict=False)]  # either may have stopped at a smaller size
        # The shared expert is an expert that every token goes to; to run it here might communicate and leave gradients behind.
        as_pairs = self.load.tokens * shared_width / self.load.width
        result: dict[str, Any] = {
            "forward": forward,
            "input_gradients": costs.fit_curve(*inputs),
            "recompute": costs.fit_curve(inputs[0][: len(extra)], extra),
            "weight_gradients": self._curve(self._weight_gradients, 0.12),
            "prepare": self._curve(self._prepare, 0.03),
            "regroup": self._line(self._regroup, self.pairs, 0.03),
        }
        if shared_width:
            backward = result["input_gradients"](as_pairs) + result["weight_gradients"](as_pairs)
            result |= {"shared_forward": forward(as_pairs), "shared_backward": backward}
        result |= self._copies()
        if self.exchange is None:
            return LayerCosts(exchange=NOTHING, gather=NOTHING, home_sum=NOTHING, **result)
        known = LayerCosts(**result, **self._communication(self.exchange, forward))
        return replace(known, **self._rest(self.exchange, known))

    def link_is(self, line: Line) -> bool:
        """Whether exchanges of some rows, sent as they were measured, take about as long as the line says."""
        assert self.exchange is not None
        rows = self._short_rows(line)
        parts = self._parts(rows)
        call = self._exchange(self.exchange, rows, [], parts)
        times = [costs.time_call(call, self.device) for _ in range(4)]
        (seconds,) = costs.agree([statistics.median(times[1:])], self.device, self.group)
        expected = parts * line(self._bytes(rows))
        return expected / TRUST <= seconds <= expected * TRUST

    # -- fitting -----------------------------------------------------------------------------------------------------

    def _times(self, make: Callable[[int], Call], share: float) -> tuple[list[int], list[float]]:
        return costs.measure(make, self.pairs, self.device, self.group, share * self.budget)

    def _curve(self, make: Callable[[int], Call], share: float) -> Curve:
        return costs.measure_curve(make, self.pairs, self.device, self.group, share * self.budget)

    def _line(self, make: Callable[[int], Call], sizes: list[int], share: float) -> Line:
        return costs.measure_line(make, sizes, self.device, self.group, share * self.budget)

    # -- the experts -------------------------------------------------------------------------------------------------

    def _rows_of_pairs(self, n: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        """(rows, their number, experts) of n pairs: as many rows as a chunk of so many pairs has, spread over all experts."""
        places = torch.arange(n, device=self.device)
        num_rows = max(n * self.load.rows // max(self.load.pairs, 1), 1)
        return places * num_rows // n, num_rows, places % self.num_experts

    def _chunk(self, n: int) -> Chunk:
        rows, num_rows, of = self._rows_of_pairs(n)
        return route.make_chunk([slice(0, n)], rows, of, 0, num_rows, self.num_experts)

    def _forward(self, n: int) -> Call:
        chunk, weights, source = self._chunk(n), self.weights, self.source
        values = torch.ones(n, dtype=source.dtype, device=self.device)
        hidden = WORKSPACE.take((n + SPARE_ROWS, weights.fc1.size(1)), source)

        def call() -> None:
            output = self.engine.forward(weights, source, experts.make_pairs(chunk.rows, chunk.counts, weights), hidden)
            route.add_up(output, chunk.sums, chunk.in_row_order(values))
            WORKSPACE.give(output)

        return call

    def _start_gradients(self, n: int, keep: bool) -> Callable[[], WeightWork]:
        chunk, weights, source = self._chunk(n), self.weights, self.source
        values = torch.ones(n, dtype=source.dtype, device=self.device)
        weight_grad = torch.empty(n, dtype=torch.promote_types(source.dtype, torch.float32), device=self.device)
        hidden = torch.randn(n + SPARE_ROWS, weights.fc1.size(1), device=self.device).to(source.dtype) if keep else None

        def call() -> WeightWork:
            pairs = experts.make_pairs(chunk.rows, chunk.counts, weights)
            pair_grad, value_grad, work = self.engine.input_gradients(
                weights, source, pairs, hidden, source, chunk.rows, values.index_select(0, chunk.ids), None
            )
            weight_grad[chunk.ids] = value_grad.to(weight_grad.dtype)
            route.add_up(pair_grad, chunk.sums)
            WORKSPACE.give(pair_grad, value_grad)
            assert work is not None
            return work

        return call

    def _input_gradients(self, n: int, keep: bool) -> Call:
        call = self._start_gradients(n, keep)
        return lambda: call().free()

    def _weight_gradients(self, n: int) -> Call:
        work = _HeldWork(**vars(self._start_gradients(n, True)()))
        grads = WeightGrads(self.weights)
        return lambda: self.engine.weight_gradients(work, grads)

    def _prepare(self, n: int) -> Call:
        rows, num_rows, of = self._rows_of_pairs(n)
        return lambda: _drop(route.make_chunk([slice(0, n)], rows, of, 0, num_rows, self.num_experts))

    def _regroup(self, n: int) -> Call:
        hidden = torch.zeros(n, self.weights.fc1.size(1), dtype=self.source.dtype, device=self.device)
        ids = torch.randperm(n, device=self.device)
        return lambda: _drop(hidden.index_select(0, ids))

    # -- communication -----------------------------------------------------------------------------------------------

    def _bytes(self, rows: int) -> int:
        """What a rank sends to others of so many rows, as `_flow` spreads them."""
        return self._each(rows) * (self.num_ranks - 1) * self.load.hidden_size * self.load.element_size

    def _each(self, rows: int) -> int:
        return max(rows // self.num_ranks, 1)

    def _flow(self, exchange: AllToAll, rows: int) -> Flow:
        counts = torch.full((exchange.size, 1), self._each(rows), dtype=torch.int64, device=self.device)
        return exchange.count(counts).flow([0])

    def _exchange(self, exchange: AllToAll, rows: int, posting: list[float], count: int = 1) -> Call:
        """`count` exchanges of so many rows at once."""
        flow = self._flow(exchange, rows)
        # All that are on their way write to one buffer, which nobody reads.
        received = self.source.new_empty(sum(flow.receive), self.load.hidden_size)
        sent = self.source.new_zeros(sum(flow.send) - flow.send[exchange.rank], self.load.hidden_size)

        def call() -> None:
            handles = []
            for _ in range(count):
                start = time.perf_counter()
                handles.append(exchange.expect(received, flow))
                handles[-1].send(sent, own=False)
                posting.append(time.perf_counter() - start)
            for handle in handles:
                handle.wait()
            for handle in handles:
                handle.finish()

        return call

    def _parts(self, rows: int) -> int:
        # A part is measured as one of all parts of an even load, as the schedule sends them: alone, a small message may pass in a
        # link's burst, at many times the rate that it keeps up.
        return max(self.load.rows // rows, 1)

    def _communication(self, exchange: AllToAll, forward: Curve) -> dict[str, Any]:
        posting: dict[int, list[float]] = {}

        def make(rows: int) -> Call:
            posting[rows] = []
            return self._exchange(exchange, rows, posting[rows], self._parts(rows))

        rows, seconds = costs.measure(make, self.rows, self.device, self.group, 0.22 * self.budget)
        line = costs.fit_line([self._bytes(each) for each in rows], [t / self._parts(each) for each, t in zip(rows, seconds, strict=True)])
        post = NOTHING  # on a GPU the program's own stream has no part in it
        if self.device.type != "cuda":
            medians = costs.agree([statistics.median(posting[each]) for each in rows], self.device, self.group)
            post = costs.fit_line(rows, medians)
        slow_program, slow_link = self._slowdown(exchange, line, forward)
        return {
            "exchange": line,
            "post": post,
            "gather": self._line(self._gather, self.rows, 0.04),
            "home_sum": self._line(self._home_sum, self.rows, 0.04),
            "count_exchange": self._count_exchange(exchange),
            "compute_slowdown": slow_program,
            "exchange_slowdown": slow_link,
        }

    def _gather(self, rows: int) -> Call:
        places, out = torch.randperm(rows, device=self.device), self.source.new_empty(rows, self.load.hidden_size)
        return lambda: _drop(torch.index_select(self.source, 0, places, out=out))

    def _home_sum(self, rows: int) -> Call:
        num_tokens = max(rows * self.load.tokens // max(self.load.rows, 1), 1)
        tokens, back = torch.arange(rows, device=self.device) % num_tokens, self.source[:rows]
        result = self.source.new_empty(num_tokens, self.load.hidden_size)
        return lambda: _drop(route.add_up(back, route.home_sum(tokens, 0, num_tokens), out=result))

    def _count_exchange(self, exchange: AllToAll) -> float:
        """Seconds from a router's choice to the counts of 4 chunks in both passes, on all ranks."""
        shape = self.shape
        places = torch.arange(shape.tokens * shape.top_k, device=self.device)
        tokens, of = places // shape.top_k, places % shape.num_experts
        choice = route.Choice(tokens, of, tokens * shape.num_experts + of, shape.tokens, shape.top_k)

        def call() -> None:
            sent = route.outgoing(choice, self.num_experts, exchange.size)
            counts = route.traffic(sent, shape.tokens, exchange.size, 4).flatten(1)
            exchange.count(torch.cat([counts, counts], dim=1))
            sent.row_tokens(len(places))

        times = [costs.agree([costs.time_call(call, self.device)], self.device, self.group) for _ in range(6)]
        return statistics.median(seconds for (seconds,) in times[1:])

    def _short_rows(self, line: Line) -> int:
        """The most rows, of those measured, that travel in SHORT seconds; or the fewest."""
        return max((rows for rows in self.rows if line(self._bytes(rows)) <= SHORT), default=self.rows[0])

    def _slowdown(self, exchange: AllToAll, line: Line, forward: Curve) -> tuple[float, float]:
        n = max((n for n in self.pairs if forward(n) <= SHORT), default=self.pairs[0])
        flow = self._flow(exchange, self._short_rows(line))
        # All that are on their way write to one buffer, which nobody reads.
        received = self.source.new_empty(sum(flow.receive), self.load.hidden_size)
        sent = self.source.new_zeros(sum(flow.send) - flow.send[exchange.rank], self.load.hidden_size)

        def communicate() -> Call:
            handle = exchange.expect(received, flow)
            handle.send(sent, own=False)

            def finish() -> None:
                handle.wait()
                handle.finish()

            return finish

        return costs.measure_slowdown(self._forward(n), communicate, self.device, self.group, 0.1 * self.budget)

    # -- whole passes ------------------------------------------------------------------------------------------------

    def _rest(self, exchange: AllToAll, known: LayerCosts) -> dict[str, Any]:
        """What passes take beyond what `known` predicts, at some numbers of chunks."""
        alone = replace(known, shared_forward=0.0, shared_backward=0.0)
        limits = Limits(strategies=("keep",))
        best = {(r, r): best_plan(alone, self.load, replace(limits, degrees=(r,), backward_degrees=(r,))).plan for r in DEGREES}
        best[MIXED] = replace(best[MIXED[1], MIXED[1]], degree=MIXED[0])
        best = {degrees: plan for degrees, plan in best.items() if max(degrees) <= max(self.load.tokens, 1)}
        expected = {degrees: predict(alone, self.load, plan) for degrees, plan in best.items()}
        seconds = {degrees: prediction.forward + prediction.backward for degrees, prediction in expected.items()}
        some = {degrees: plan for degrees, plan in best.items() if degrees in FEWER}
        if STEPS * sum(seconds.values()) <= self.whole_budget:
            times = self._time_plans(exchange, best)
        elif STEPS * sum(seconds[degrees] for degrees in some) <= self.whole_budget:
            times = self._time_plans(exchange, some)
        else:
            return {}
        rest = {
            degrees: [
                BELIEVED * (statistics.median(of_pass) - predicted)
                for of_pass, predicted in zip(times[degrees], (expected[degrees].forward, expected[degrees].backward), strict=True)
            ]
            for degrees in times
        }
        same = [degrees[0] for degrees in rest if degrees != MIXED]
        forward, backward = (_rising_on(Curve(tuple(map(float, same)), tuple(rest[r, r][i] for r in same))) for i in (0, 1))
        mixed = sum(rest[MIXED]) - forward(MIXED[0]) - backward(MIXED[1]) if MIXED in rest else 0.0
        return {"forward_rest": forward, "backward_rest": backward, "mixed_rest": max(mixed, 0.0)}

    def _time_plans(self, exchange: AllToAll, plans: dict[tuple[int, int], Plan]) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
        """Seconds of both passes of the plans, which take turns."""
        shape, dtype = self.shape, self.source.dtype
        generator = torch.Generator().manual_seed(exchange.rank)
        drawn = torch.rand(shape.tokens, shape.num_experts, generator=generator)
        routing = torch.zeros_like(drawn, dtype=torch.bool).scatter_(1, drawn.topk(shape.top_k).indices, True).to(self.device)
        rows = torch.randn(shape.tokens, shape.hidden_size, device=self.device).to(dtype)
        tensors = rows, routing.to(dtype), self.weights.fc1.detach(), self.weights.fc2.detach()
        x, probs, fc1, fc2 = (tensor.view_as(tensor).requires_grad_() for tensor in tensors)
        weights, output_grad = replace(self.weights, fc1=fc1, fc2=fc2), torch.ones_like(x)

        def step(plan: Plan) -> list[float]:
            outputs: list[torch.Tensor] = []

            def forward() -> None:
                with torch.enable_grad():
                    outputs.append(
                        routed_experts(x, probs, routing, weights, plan, exchange, pairs_per_token=shape.top_k, engine=self.engine)
                    )

            def backward() -> None:
                torch.autograd.grad(outputs, [x, probs, fc1, fc2], [output_grad])

            return [costs.time_call(call, self.device) for call in (forward, backward)]

        begin = time.perf_counter()
        times: dict[tuple[int, int], tuple[list[float], list[float]]] = {degrees: ([], []) for degrees in plans}
        for visit in range(1, MAX_VISITS + 1):
            for degrees, plan in plans.items():
                step(plan)
                for _ in range(STEPS - 1):
                    costs.agree([0.0], self.device, self.group)  # ranks start together
                    for of_pass, seconds in zip(times[degrees], costs.agree(step(plan), self.device, self.group), strict=True):
                        of_pass.append(seconds)
            (spent,) = costs.agree([time.perf_counter() - begin], self.device, self.group)
            if spent * (visit + 1) / visit > self.whole_budget:
                break
        return times

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copies(self) -> dict[str, Any]:
        load = self.load
        most = max(load.rows * load.hidden_size, load.pairs * load.hidden_columns, 64) * load.element_size
        out, back = costs.measure_copies([most // size for size in (64, 16, 4, 1)], self.device, self.group, 0.04 * self.budget)
        if self.device.type == "cuda":
            return {"copy_out": out, "copy_in": back}
        return {"copy_out": out, "copies_by_program": True}  # what lies on the host need not come back


def _rising_on(curve: Curve) -> Curve:
    """The curve with a point more, beyond which it does not fall."""
    sizes, seconds = curve.sizes, curve.seconds
    return Curve((*sizes, 2 * sizes[-1]), (*seconds, max(seconds[-1], curve(2 * sizes[-1]))))


def _drop(result: object) -> None:
    """Only the time counts."""
