"""Measure the costs of one MoE layer on this machine (`LayerCosts`), from which planners predict times.

Each operation of the schedule runs alone, on synthetic rows and evenly distributed assignments, at sizes from 1/32 of
an even load to all of it. Then whole passes run with several numbers of chunks, and the time that their operations do
not explain becomes a separate cost. This takes under 10 seconds unless a single operation takes seconds. All ranks of
the layer's expert parallel group measure together and get equal numbers, which `parallel.costs` caches on disk.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist

from memory.pool import WORKSPACE
from moe import route
from moe.alltoall.flat import AllToAll, SplitSizes
from moe.chunk_plan import Plan
from moe.experts.compute import ExpertCompute, is_grouped, needs_host_ends
from moe.experts.sizes import SPARE_ROWS
from moe.experts.weights import Slab, WeightGrads, Weights, WeightWork
from moe.layer import MixtrainMoELayer, Setting, routed_experts
from moe.placement_map import PlacementMap
from moe.planning.costs import LayerCosts, Limits
from moe.planning.load import Shape
from moe.planning.planner import best_plan, predict
from moe.route import Chunk
from moe.schedule.chunk_compute import ChunkCompute
from parallel.costs import cache, measure
from parallel.costs.measure import Call
from parallel.costs.models import NOTHING, Curve, Line, fit_curve, fit_line

SIZES = (1, 2, 4, 8, 16, 32)  # numbers of equal chunks of an even load, whose sizes are measured
BUDGET = 8.0  # seconds of the whole measurement, without first calls and the operation that is running at its end
SHORT = 0.02  # seconds of an exchange that suffice to measure the link
WHOLE_SHARE = 0.4  # share of the time for whole passes; the shares below are of the rest
TRUST = 2.0  # cached costs are measured again if the link is faster or slower by more than this factor


def measure_layer(layer: MixtrainMoELayer, shape: Shape, folder: str | os.PathLike[str] | None = None) -> LayerCosts:
    """Return the costs of a layer's operations, measured or from the cache in `folder` (None: no cache).

    Collective over the layer's expert parallel group.
    """
    module, shared = layer.experts, layer.shared_experts
    # Weights are read directly: a call of the modules would run their hooks for a training step.
    fc1, fc2 = (linear.weight.detach() for linear in (module.linear_fc1, module.linear_fc2))
    biases = [None if each.bias is None else each.bias.detach() for each in (module.linear_fc1, module.linear_fc2)]
    weights = Slab(fc1, fc2, biases[0], biases[1], module.activation)
    shared_width = 0 if shared is None else shared.linear_fc2.weight.size(1)
    group = layer.ep_group if layer.ep_group.size() > 1 else None
    return measure_costs(weights, layer.exchange, group, shape, shared_width, folder)


def measure_costs(
    weights: Slab,
    exchange: AllToAll | None,
    group: dist.ProcessGroup | None,
    shape: Shape,
    shared_width: int = 0,
    folder: str | os.PathLike[str] | None = None,
    experts: ExpertCompute | None = None,
    budget: float = BUDGET,
) -> LayerCosts:
    """Return the costs of a layer with these weights and this all-to-all, measured or from the cache in `folder`.

    `group` has the ranks of `exchange`. `shared_width` is the feed-forward size of the shared expert on this rank.
    Collective over the group.
    """
    device, experts = weights.fc1.device, experts or ExpertCompute()
    key = {
        **cache.hardware_key(device),
        **cache.layout_key(group),
        "exchange": type(exchange).__name__,
        "engine": type(experts).__name__,
        "shape": shape.as_key(),
        "dtype": str(weights.fc1.dtype),
        "activation": weights.activation,
        "bias": weights.fc1_bias is not None,
        "shared_width": shared_width,
        "fields": [field.name for field in fields(LayerCosts)],
    }
    with torch.no_grad():
        bench = _Bench(weights, exchange, group, shape, experts, budget)

        def still_true(values: dict[str, Any]) -> bool:
            return exchange is None or bench.link_is(LayerCosts.from_dict(values).exchange)

        values = cache.cached(folder, key, lambda: bench.measure(shared_width).as_dict(), device, group, still_true)
    return LayerCosts.from_dict(values)


class _HeldWork(WeightWork):
    """Inputs of weight gradients that stay allocated, so that the gradients can be computed repeatedly."""

    def free(self) -> None:
        """Do nothing: the buffers stay allocated."""


class _Bench:
    """A benchmark of one layer's operations with synthetic data."""

    def __init__(
        self,
        weights: Slab,
        exchange: AllToAll | None,
        group: dist.ProcessGroup | None,
        shape: Shape,
        experts: ExpertCompute,
        budget: float,
    ) -> None:
        self.weights, self.exchange, self.group, self.experts = weights, exchange, group, experts
        self.budget = budget if exchange is None else (1.0 - WHOLE_SHARE) * budget
        self.whole_budget = budget - self.budget
        self.device, self.shape, self.load = weights.fc1.device, shape, shape.even()
        load = self.load
        self.num_ranks, self.num_experts = shape.num_ranks, len(weights.fc1)
        self.source = torch.randn(max(load.token_rows, 1), load.hidden_size, device=self.device).to(weights.fc1.dtype)
        counts = load.assignments, load.token_rows
        self.assignments, self.row_counts = (sorted({max(count // size, 1) for size in SIZES}) for count in counts)

    def measure(self, shared_width: int) -> LayerCosts:
        """Measure all operations of a layer, one after the other, and return its costs."""
        forward = self._curve(self._forward, 0.12)
        inputs = self._times(lambda n: self._input_gradients(n, keep=True), 0.12)
        again = self._times(lambda n: self._input_gradients(n, keep=False), 0.12)
        # either measurement may have ended at a smaller size
        extra = [max(b - a, 0.0) for a, b in zip(inputs[1], again[1], strict=False)]
        # The shared expert counts as an expert of all tokens. It is not run: it might communicate and leave gradients.
        as_assignments = self.load.tokens * shared_width / self.load.width
        result: dict[str, Any] = {
            "forward": forward,
            "input_gradients": fit_curve(*inputs),
            "recompute": fit_curve(inputs[0][: len(extra)], extra),
            "weight_gradients": self._curve(self._weight_gradients, 0.12),
            "prepare": self._curve(self._prepare, 0.03),
            "regroup": self._line(self._regroup, self.assignments, 0.03),
        }
        if shared_width:
            backward = result["input_gradients"](as_assignments) + result["weight_gradients"](as_assignments)
            result |= {"shared_forward": forward(as_assignments), "shared_backward": backward}
        numel = max(self.load.token_rows * self.load.hidden_size, self.load.assignments * self.load.hidden_columns, 64)
        sizes = [numel * self.load.element_size // divisor for divisor in (64, 16, 4, 1)]
        copy_out, copy_in = measure.measure_copies(sizes, self.device, self.group, 0.04 * self.budget)
        result["copy_out"] = copy_out
        # Tensors on the host need no copy back.
        result |= {"copy_in": copy_in} if self.device.type == "cuda" else {"copies_by_program": True}
        if self.exchange is None:
            return LayerCosts(exchange=NOTHING, gather=NOTHING, combine_sum=NOTHING, **result)
        known = LayerCosts(**result, **self._communication(self.exchange, forward))
        return replace(known, **_residuals(self, known))

    def link_is(self, line: Line) -> bool:
        """Return whether exchanges still take about as long as `line` (an earlier measurement) predicts."""
        assert self.exchange is not None
        num_rows = self._short_rows(line)
        count = self._num_messages(num_rows)
        call = self._exchange(self.exchange, num_rows, [], count)
        times = [measure.time_call(call, self.device) for _ in range(4)]
        (seconds,) = measure.max_over_ranks([statistics.median(times[1:])], self.device, self.group)
        expected = count * line(self._bytes(num_rows))
        return expected / TRUST <= seconds <= expected * TRUST

    # -- fitting -----------------------------------------------------------------------------------------------------

    def _times(self, make: Callable[[int], Call], share: float) -> tuple[list[int], list[float]]:
        return measure.measure(make, self.assignments, self.device, self.group, share * self.budget)

    def _curve(self, make: Callable[[int], Call], share: float) -> Curve:
        return measure.measure_curve(make, self.assignments, self.device, self.group, share * self.budget)

    def _line(self, make: Callable[[int], Call], sizes: list[int], share: float) -> Line:
        return measure.measure_line(make, sizes, self.device, self.group, share * self.budget)

    # -- the experts -------------------------------------------------------------------------------------------------

    def _synthetic(self, n: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Return (token row of each, number of token rows, expert of each) for n evenly distributed assignments."""
        numbers = torch.arange(n, device=self.device)
        num_rows = max(n * self.load.token_rows // max(self.load.assignments, 1), 1)
        return numbers * num_rows // n, num_rows, numbers % self.num_experts

    def _compute(self, n: int) -> tuple[ChunkCompute, Chunk]:
        token_rows, num_rows, experts = self._synthetic(n)
        chunks = route.make_chunks(token_rows, experts, [num_rows], [[slice(0, n)]], self.num_experts)
        if needs_host_ends(self.weights):
            route.read_ends(chunks)
        probs = torch.ones(n, device=self.device)
        return ChunkCompute(self.experts, Weights((self.weights,)), probs, self.source.dtype, chunks), chunks[0]

    def _forward(self, n: int) -> Call:
        (compute, chunk), source = self._compute(n), self.source
        preactivation = None
        if not is_grouped(self.weights):
            preactivation = WORKSPACE.take((n + SPARE_ROWS, self.weights.fc1.size(1)), source)
        return lambda: _drop(compute.sums(source, chunk.token_rows, chunk, preactivation)[0])

    def _start_gradients(self, n: int, keep: bool) -> Callable[[], WeightWork]:
        (compute, chunk), source = self._compute(n), self.source
        preactivation = None
        if keep:
            preactivation = torch.randn(n + SPARE_ROWS, self.weights.fc1.size(1), device=self.device).to(source.dtype)

        def call() -> WeightWork:
            _, work = compute.input_grads(source, chunk.token_rows, chunk, preactivation, source, chunk.token_rows)
            assert work is not None
            return work

        return call

    def _input_gradients(self, n: int, keep: bool) -> Call:
        call = self._start_gradients(n, keep)
        return lambda: call().free()

    def _weight_gradients(self, n: int) -> Call:
        work = _HeldWork(**vars(self._start_gradients(n, True)()))
        grads = WeightGrads(Weights((self.weights,)))
        return lambda: self.experts.weight_grads(work, grads)

    def _prepare(self, n: int) -> Call:
        token_rows, num_rows, experts = self._synthetic(n)
        return lambda: _drop(route.make_chunks(token_rows, experts, [num_rows], [[slice(0, n)]], self.num_experts))

    def _regroup(self, n: int) -> Call:
        hidden = torch.zeros(n, self.weights.fc1.size(1), dtype=self.source.dtype, device=self.device)
        ids = torch.randperm(n, device=self.device)
        return lambda: _drop(hidden.index_select(0, ids))

    # -- communication -----------------------------------------------------------------------------------------------

    def _bytes(self, num_rows: int) -> int:
        """Return the bytes that a rank sends to other ranks in an even all-to-all of `num_rows` rows."""
        row_bytes = self.load.hidden_size * self.load.element_size
        return max(num_rows // self.num_ranks, 1) * (self.num_ranks - 1) * row_bytes

    def _buffers(self, exchange: AllToAll, num_rows: int) -> tuple[SplitSizes, torch.Tensor, torch.Tensor]:
        """Return the split sizes, receive buffer and send buffer of an even all-to-all of `num_rows` rows."""
        each = max(num_rows // self.num_ranks, 1)
        counts = torch.full((exchange.size, 1), each, dtype=torch.int64, device=self.device)
        split_sizes = exchange.count(counts).split_sizes([0])
        # All exchanges in flight write to one buffer, which is never read.
        received = self.source.new_empty(sum(split_sizes.receive), self.load.hidden_size)
        sent = self.source.new_zeros(sum(split_sizes.send) - split_sizes.send[exchange.rank], self.load.hidden_size)
        return split_sizes, received, sent

    def _exchange(self, exchange: AllToAll, num_rows: int, posting: list[float], count: int = 1) -> Call:
        """Return a function that runs `count` all-to-alls of `num_rows` rows at once.

        The function appends the seconds that the start of each all-to-all takes to `posting`.
        """
        split_sizes, received, sent = self._buffers(exchange, num_rows)

        def call() -> None:
            handles = []
            for _ in range(count):
                start = time.perf_counter()
                handles.append(exchange.expect(received, split_sizes))
                handles[-1].send(sent, own=False)
                posting.append(time.perf_counter() - start)
            for handle in handles:
                handle.wait()
            for handle in handles:
                handle.finish()

        return call

    def _num_messages(self, num_rows: int) -> int:
        # All messages of an even load are measured together, as the schedule sends them: a single small message may
        # pass in a burst, at many times the sustained rate of the link.
        return max(self.load.token_rows // num_rows, 1)

    def _communication(self, exchange: AllToAll, forward: Curve) -> dict[str, Any]:
        posting: dict[int, list[float]] = {}

        def make(num_rows: int) -> Call:
            posting[num_rows] = []
            return self._exchange(exchange, num_rows, posting[num_rows], self._num_messages(num_rows))

        sizes, seconds = measure.measure(make, self.row_counts, self.device, self.group, 0.22 * self.budget)
        of_message = [total / self._num_messages(each) for each, total in zip(sizes, seconds, strict=True)]
        line = fit_line([self._bytes(each) for each in sizes], of_message)
        post = NOTHING  # on a GPU an exchange takes no time of the program's own stream
        if self.device.type != "cuda":
            medians = measure.max_over_ranks([statistics.median(posting[n]) for n in sizes], self.device, self.group)
            post = fit_line(sizes, medians)
        slow_program, slow_link = self._slowdown(exchange, line, forward)
        return {
            "exchange": line,
            "post": post,
            "gather": self._line(self._gather, self.row_counts, 0.04),
            "combine_sum": self._line(self._combine_sum, self.row_counts, 0.04),
            "count_exchange": self._count_exchange(exchange),
            "compute_slowdown": slow_program,
            "exchange_slowdown": slow_link,
        }

    def _gather(self, num_rows: int) -> Call:
        order = torch.randperm(num_rows, device=self.device)
        out = self.source.new_empty(num_rows, self.load.hidden_size)
        return lambda: _drop(torch.index_select(self.source, 0, order, out=out))

    def _combine_sum(self, num_rows: int) -> Call:
        num_tokens = max(num_rows * self.load.tokens // max(self.load.token_rows, 1), 1)
        tokens, back = torch.arange(num_rows, device=self.device) % num_tokens, self.source[:num_rows]
        result = self.source.new_empty(num_tokens, self.load.hidden_size)
        cut = route.ChunkOffsets([[num_rows]], [[num_rows]])
        return lambda: _drop(route.add_up(back, route.combine_sums(tokens, num_tokens, cut, None)[0], out=result))

    def _count_exchange(self, exchange: AllToAll) -> float:
        """Measure the seconds from routing until all ranks have the counts of both passes, with 4 chunks each."""
        shape = self.shape
        numbers = torch.arange(shape.tokens * shape.top_k, device=self.device)
        tokens, experts = numbers // shape.top_k, numbers % shape.num_experts
        choice = route.Choice(tokens, experts, tokens * shape.num_experts + experts, shape.tokens, shape.top_k)
        primaries = route.Destinations.of_primaries(choice, PlacementMap(shape.num_experts, exchange.size))

        def call() -> None:
            sent = route.dispatch_order(choice, primaries, [4, 4])
            exchange.count(sent.counts.flatten(1))
            sent.row_tokens(len(numbers), len(numbers))

        times = [
            measure.max_over_ranks([measure.time_call(call, self.device)], self.device, self.group) for _ in range(6)
        ]
        return statistics.median(seconds for (seconds,) in times[1:])

    def _short_rows(self, line: Line) -> int:
        """Return the largest measured number of rows that is sent within SHORT seconds, or else the smallest."""
        sizes = self.row_counts
        return max((each for each in sizes if line(self._bytes(each)) <= SHORT), default=sizes[0])

    def _slowdown(self, exchange: AllToAll, line: Line, forward: Curve) -> tuple[float, float]:
        n = max((n for n in self.assignments if forward(n) <= SHORT), default=self.assignments[0])
        split_sizes, received, sent = self._buffers(exchange, self._short_rows(line))

        def communicate() -> Call:
            handle = exchange.expect(received, split_sizes)
            handle.send(sent, own=False)

            def finish() -> None:
                handle.wait()
                handle.finish()

            return finish

        return measure.measure_slowdown(self._forward(n), communicate, self.device, self.group, 0.1 * self.budget)


def _drop(result: object) -> None:
    """Discard a result of which only the time is measured."""


DEGREES = (1, 2, 4, 8)  # numbers of chunks in which passes run
MIXED = (4, 2)  # forward and backward degree, to measure the cost of unequal degrees
FEWER = ((1, 1), (4, 4), (8, 8))  # the only degrees that run if passes are slow
STEPS = 3  # consecutive steps of a plan; the first one allocates its buffers
MAX_VISITS = 5
BELIEVED = 0.5  # share of the measured difference that is used, because few passes run and one may be disturbed

Degrees = tuple[int, int]
Times = dict[Degrees, tuple[list[float], list[float]]]  # seconds of the forward and of the backward passes


def _residuals(bench: _Bench, known: LayerCosts) -> dict[str, Any]:
    """Measure residuals: the time of whole passes that the times of their operations (`known`) do not explain.

    All ranks of the group time the passes of a layer together, for at most about `whole_budget` seconds. Returns the
    residual seconds by field of LayerCosts; nothing if the passes are too slow to measure. A residual is BELIEVED times
    the difference between measured and predicted seconds.
    """
    load, alone = bench.load, replace(known, shared_forward=0.0, shared_backward=0.0)
    best = {(r, r): best_plan(alone, load, Limits((r,), (r,), ("keep",))).plan for r in DEGREES}
    best[MIXED] = replace(best[MIXED[1], MIXED[1]], degree=MIXED[0])
    best = {degrees: plan for degrees, plan in best.items() if max(degrees) <= max(load.tokens, 1)}
    expected = {degrees: predict(alone, load, plan) for degrees, plan in best.items()}
    seconds = {degrees: prediction.forward + prediction.backward for degrees, prediction in expected.items()}
    some = {degrees: plan for degrees, plan in best.items() if degrees in FEWER}
    if STEPS * sum(seconds.values()) <= bench.whole_budget:
        times = _time_plans(bench, best)
    elif STEPS * sum(seconds[degrees] for degrees in some) <= bench.whole_budget:
        times = _time_plans(bench, some)
    else:
        return {}
    rest = {}
    for degrees, (forwards, backwards) in times.items():
        prediction = expected[degrees]
        rest[degrees] = [
            BELIEVED * (statistics.median(measured) - predicted)
            for measured, predicted in ((forwards, prediction.forward), (backwards, prediction.backward))
        ]
    same = [degrees[0] for degrees in rest if degrees != MIXED]
    curves = []
    for i in (0, 1):
        curve = Curve(tuple(map(float, same)), tuple(rest[r, r][i] for r in same))
        end = 2 * curve.sizes[-1]  # beyond the last size the curve must not fall
        curves.append(Curve((*curve.sizes, end), (*curve.seconds, max(curve.seconds[-1], curve(end)))))
    forward, backward = curves
    mixed = sum(rest[MIXED]) - forward(MIXED[0]) - backward(MIXED[1]) if MIXED in rest else 0.0
    return {"forward_rest": forward, "backward_rest": backward, "mixed_rest": max(mixed, 0.0)}


def _time_plans(bench: _Bench, plans: dict[Degrees, Plan]) -> Times:
    """Run the plans in turn, and return the measured seconds of both passes of each plan."""
    shape, exchange, dtype = bench.shape, bench.exchange, bench.weights.fc1.dtype
    assert exchange is not None
    generator = torch.Generator().manual_seed(exchange.rank)
    drawn = torch.rand(shape.tokens, shape.num_experts, generator=generator)
    routing = torch.zeros_like(drawn, dtype=torch.bool).scatter_(1, drawn.topk(shape.top_k).indices, True)
    routing = routing.to(bench.device)
    inputs = torch.randn(shape.tokens, shape.hidden_size, device=bench.device).to(dtype)
    tensors = inputs, routing.to(dtype), bench.weights.fc1.detach(), bench.weights.fc2.detach()
    x, probs, fc1, fc2 = (tensor.view_as(tensor).requires_grad_() for tensor in tensors)
    weights, output_grad = replace(bench.weights, fc1=fc1, fc2=fc2), torch.ones_like(x)

    def step(plan: Plan) -> list[float]:
        outputs: list[torch.Tensor] = []

        def forward() -> None:
            with torch.enable_grad():
                setting = Setting(exchange, assignments_per_token=shape.top_k, experts=bench.experts)
                outputs.append(routed_experts(x, probs, routing, weights, plan, setting))

        def backward() -> None:
            torch.autograd.grad(outputs, [x, probs, fc1, fc2], [output_grad])

        return [measure.time_call(call, bench.device) for call in (forward, backward)]

    begin = time.perf_counter()
    times: Times = {degrees: ([], []) for degrees in plans}
    for visit in range(1, MAX_VISITS + 1):
        for degrees, plan in plans.items():
            step(plan)
            for _ in range(STEPS - 1):
                measure.max_over_ranks([0.0], bench.device, bench.group)  # ranks start together
                slowest = measure.max_over_ranks(step(plan), bench.device, bench.group)
                for of_pass, seconds in zip(times[degrees], slowest, strict=True):
                    of_pass.append(seconds)
        (spent,) = measure.max_over_ranks([time.perf_counter() - begin], bench.device, bench.group)
        if spent * (visit + 1) / visit > bench.whole_budget:
            break
    return times
