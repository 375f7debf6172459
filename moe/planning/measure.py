"""Measures what one MoE layer's operations take on this machine: from a layer to the `LayerCosts` that planners plan
with.

Every operation is the schedule's own, on made-up rows and evenly spread assignments, at sizes from a 32nd of an even
load up to all of it. Then whole passes run in a few numbers of chunks, and what the operations do not explain of their
times is a cost of its own. Takes under 10 seconds unless a single operation takes seconds; all ranks of the layer's
expert parallel group do it together and end with the same numbers, which `parallel.costs` keeps on disk.
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

from memory.pool import WORKSPACE
from moe import route
from moe.alltoall.flat import AllToAll, SplitSizes
from moe.experts.compute import ExpertCompute, is_grouped, needs_host_ends
from moe.experts.sizes import SPARE_ROWS
from moe.experts.weights import Slab, WeightGrads, Weights, WeightWork
from moe.layer import MixtrainMoELayer
from moe.placement_map import PlacementMap
from moe.planning.costs import LayerCosts
from moe.planning.load import Shape
from moe.planning.residuals import Residuals
from moe.route import Chunk, Chunks
from moe.schedule.chunk_compute import ChunkCompute
from parallel.costs import cache, measure
from parallel.costs.measure import Call
from parallel.costs.models import NOTHING, Curve, Line, fit_curve, fit_line

SIZES = (1, 2, 4, 8, 16, 32)  # an even load is measured cut into so many
BUDGET = 8.0  # seconds for all of it; first calls and what is being measured when the time is up come on top
SHORT = 0.02  # seconds of an exchange that are enough to see how fast the link is
WHOLE_SHARE = 0.4  # of the time is for whole passes; the shares below are of the rest
TRUST = 2.0  # a link that is so many times faster or slower than the cache says is another link


def measure_layer(
    layer: MixtrainMoELayer,
    shape: Shape,
    folder: str | os.PathLike[str] | None = None,
    experts: ExpertCompute | None = None,
    budget: float = BUDGET,
) -> LayerCosts:
    """The costs of a layer, from the cache in `folder` (None: neither read nor written) or measured; all ranks of its
    group call it."""
    module, shared = layer.experts, layer.shared_experts
    # Read directly: to call the modules would start what their hooks do for a training step.
    fc1, fc2 = (linear.weight.detach() for linear in (module.linear_fc1, module.linear_fc2))
    biases = [
        None if linear.bias is None else linear.bias.detach() for linear in (module.linear_fc1, module.linear_fc2)
    ]
    weights = Slab(fc1, fc2, biases[0], biases[1], module.activation)
    shared_width = 0 if shared is None else shared.linear_fc2.weight.size(1)
    group = layer.ep_group if layer.ep_group.size() > 1 else None
    return measure_costs(weights, layer.exchange, group, shape, shared_width, folder, experts, budget)


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
    """The same from a layer's parts. `group` has the ranks of `exchange`; `shared_width` is the shared expert's F on
    this rank."""
    device, experts = weights.fc1.device, experts or ExpertCompute()
    key = {
        **cache.hardware_key(device),
        **cache.layout_key(group),
        "exchange": type(exchange).__name__,
        "engine": type(experts).__name__,
        "shape": asdict(shape),
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
    """Weight gradients that can be computed again."""

    def free(self) -> None:
        """Nothing is handed back yet."""


class _Bench:
    """One layer's operations, ready to be timed."""

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
        self.source = torch.randn(max(load.rows, 1), load.hidden_size, device=self.device).to(weights.fc1.dtype)
        self.assignments, self.rows = (
            sorted({max(count // size, 1) for size in SIZES}) for count in (load.assignments, load.rows)
        )

    def measure(self, shared_width: int) -> LayerCosts:
        """Everything, one after the other."""
        forward, inputs = (
            self._curve(self._forward, 0.12),
            self._times(lambda n: self._input_gradients(n, keep=True), 0.12),
        )
        again = self._times(lambda n: self._input_gradients(n, keep=False), 0.12)
        # either may have stopped at a smaller size
        extra = [max(b - a, 0.0) for a, b in zip(inputs[1], again[1], strict=False)]
        # The shared expert is an expert that every token goes to; to run it here might communicate and leave gradients
        # behind.
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
        result |= self._copies()
        if self.exchange is None:
            return LayerCosts(exchange=NOTHING, gather=NOTHING, combine_sum=NOTHING, **result)
        known = LayerCosts(**result, **self._communication(self.exchange, forward))
        given = self.weights, self.exchange, self.group, self.shape, self.experts, self.whole_budget
        return replace(known, **Residuals(*given).measure(known))

    def link_is(self, line: Line) -> bool:
        """Whether exchanges of some rows, sent as they were measured, take about as long as the line says."""
        assert self.exchange is not None
        rows = self._short_rows(line)
        parts = self._parts(rows)
        call = self._exchange(self.exchange, rows, [], parts)
        times = [measure.time_call(call, self.device) for _ in range(4)]
        (seconds,) = measure.max_over_ranks([statistics.median(times[1:])], self.device, self.group)
        expected = parts * line(self._bytes(rows))
        return expected / TRUST <= seconds <= expected * TRUST

    # -- fitting -----------------------------------------------------------------------------------------------------

    def _times(self, make: Callable[[int], Call], share: float) -> tuple[list[int], list[float]]:
        return measure.measure(make, self.assignments, self.device, self.group, share * self.budget)

    def _curve(self, make: Callable[[int], Call], share: float) -> Curve:
        return measure.measure_curve(make, self.assignments, self.device, self.group, share * self.budget)

    def _line(self, make: Callable[[int], Call], sizes: list[int], share: float) -> Line:
        return measure.measure_line(make, sizes, self.device, self.group, share * self.budget)

    # -- the experts -------------------------------------------------------------------------------------------------

    def _rows_of(self, n: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        """(rows, their number, experts) of n assignments: as many rows as a chunk of so many assignments has, spread
        over all experts."""
        places = torch.arange(n, device=self.device)
        num_rows = max(n * self.load.rows // max(self.load.assignments, 1), 1)
        return places * num_rows // n, num_rows, places % self.num_experts

    def _chunks(self, n: int) -> Chunks:
        rows, num_rows, of = self._rows_of(n)
        chunks = route.make_chunks(rows, of, [num_rows], [[slice(0, n)]], self.num_experts)
        if needs_host_ends(self.weights):
            route.read_ends(chunks)
        return chunks

    def _compute(self, n: int) -> tuple[ChunkCompute, Chunk]:
        chunks = self._chunks(n)
        probs = torch.ones(n, device=self.device)
        return ChunkCompute(self.experts, Weights((self.weights,)), probs, self.source.dtype, chunks), chunks[0]

    def _forward(self, n: int) -> Call:
        (compute, chunk), source = self._compute(n), self.source
        preactivation = None
        if not is_grouped(self.weights):
            preactivation = WORKSPACE.take((n + SPARE_ROWS, self.weights.fc1.size(1)), source)
        return lambda: _drop(compute.sums(source, chunk.rows, chunk, preactivation)[0])

    def _start_gradients(self, n: int, keep: bool) -> Callable[[], WeightWork]:
        (compute, chunk), source = self._compute(n), self.source
        preactivation = None
        if keep:
            preactivation = torch.randn(n + SPARE_ROWS, self.weights.fc1.size(1), device=self.device).to(source.dtype)

        def call() -> WeightWork:
            _, work = compute.input_grads(source, chunk.rows, chunk, preactivation, source, chunk.rows, None)
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
        rows, num_rows, of = self._rows_of(n)
        return lambda: _drop(route.make_chunks(rows, of, [num_rows], [[slice(0, n)]], self.num_experts))

    def _regroup(self, n: int) -> Call:
        hidden = torch.zeros(n, self.weights.fc1.size(1), dtype=self.source.dtype, device=self.device)
        ids = torch.randperm(n, device=self.device)
        return lambda: _drop(hidden.index_select(0, ids))

    # -- communication -----------------------------------------------------------------------------------------------

    def _bytes(self, rows: int) -> int:
        """What a rank sends to others of so many rows, as `_split_sizes` spreads them."""
        return self._each(rows) * (self.num_ranks - 1) * self.load.hidden_size * self.load.element_size

    def _each(self, rows: int) -> int:
        return max(rows // self.num_ranks, 1)

    def _split_sizes(self, exchange: AllToAll, rows: int) -> SplitSizes:
        counts = torch.full((exchange.size, 1), self._each(rows), dtype=torch.int64, device=self.device)
        return exchange.count(counts).split_sizes([0])

    def _exchange(self, exchange: AllToAll, rows: int, posting: list[float], count: int = 1) -> Call:
        """`count` exchanges of so many rows at once."""
        split_sizes = self._split_sizes(exchange, rows)
        # All that are on their way write to one buffer, which nobody reads.
        received = self.source.new_empty(sum(split_sizes.receive), self.load.hidden_size)
        sent = self.source.new_zeros(sum(split_sizes.send) - split_sizes.send[exchange.rank], self.load.hidden_size)

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

    def _parts(self, rows: int) -> int:
        # A part is measured as one of all parts of an even load, as the schedule sends them: alone, a small message may
        # pass in a link's burst, at many times the rate that it keeps up.
        return max(self.load.rows // rows, 1)

    def _communication(self, exchange: AllToAll, forward: Curve) -> dict[str, Any]:
        posting: dict[int, list[float]] = {}

        def make(rows: int) -> Call:
            posting[rows] = []
            return self._exchange(exchange, rows, posting[rows], self._parts(rows))

        rows, seconds = measure.measure(make, self.rows, self.device, self.group, 0.22 * self.budget)
        line = fit_line(
            [self._bytes(each) for each in rows], [t / self._parts(each) for each, t in zip(rows, seconds, strict=True)]
        )
        post = NOTHING  # on a GPU the program's own stream has no part in it
        if self.device.type != "cuda":
            medians = measure.max_over_ranks(
                [statistics.median(posting[each]) for each in rows], self.device, self.group
            )
            post = fit_line(rows, medians)
        slow_program, slow_link = self._slowdown(exchange, line, forward)
        return {
            "exchange": line,
            "post": post,
            "gather": self._line(self._gather, self.rows, 0.04),
            "combine_sum": self._line(self._combine_sum, self.rows, 0.04),
            "count_exchange": self._count_exchange(exchange),
            "compute_slowdown": slow_program,
            "exchange_slowdown": slow_link,
        }

    def _gather(self, rows: int) -> Call:
        places, out = torch.randperm(rows, device=self.device), self.source.new_empty(rows, self.load.hidden_size)
        return lambda: _drop(torch.index_select(self.source, 0, places, out=out))

    def _combine_sum(self, rows: int) -> Call:
        num_tokens = max(rows * self.load.tokens // max(self.load.rows, 1), 1)
        tokens, back = torch.arange(rows, device=self.device) % num_tokens, self.source[:rows]
        result = self.source.new_empty(num_tokens, self.load.hidden_size)
        cut = route.ChunkOffsets([[rows]], [[rows]])
        return lambda: _drop(route.add_up(back, route.combine_sums(tokens, num_tokens, cut, None)[0], out=result))

    def _count_exchange(self, exchange: AllToAll) -> float:
        """Seconds from a router's choice to the counts of 4 chunks in both passes, on all ranks."""
        shape = self.shape
        places = torch.arange(shape.tokens * shape.top_k, device=self.device)
        tokens, of = places // shape.top_k, places % shape.num_experts
        choice = route.Choice(tokens, of, tokens * shape.num_experts + of, shape.tokens, shape.top_k)
        homes = route.Places.at_home(choice, PlacementMap(shape.num_experts, exchange.size))

        def call() -> None:
            sent = route.dispatch_order(choice, homes, [4, 4])
            exchange.count(sent.counts.flatten(1))
            sent.row_tokens(len(places), len(places))

        times = [
            measure.max_over_ranks([measure.time_call(call, self.device)], self.device, self.group) for _ in range(6)
        ]
        return statistics.median(seconds for (seconds,) in times[1:])

    def _short_rows(self, line: Line) -> int:
        """The most rows, of those measured, that travel in SHORT seconds; or the fewest."""
        return max((rows for rows in self.rows if line(self._bytes(rows)) <= SHORT), default=self.rows[0])

    def _slowdown(self, exchange: AllToAll, line: Line, forward: Curve) -> tuple[float, float]:
        n = max((n for n in self.assignments if forward(n) <= SHORT), default=self.assignments[0])
        split_sizes = self._split_sizes(exchange, self._short_rows(line))
        # All that are on their way write to one buffer, which nobody reads.
        received = self.source.new_empty(sum(split_sizes.receive), self.load.hidden_size)
        sent = self.source.new_zeros(sum(split_sizes.send) - split_sizes.send[exchange.rank], self.load.hidden_size)

        def communicate() -> Call:
            handle = exchange.expect(received, split_sizes)
            handle.send(sent, own=False)

            def finish() -> None:
                handle.wait()
                handle.finish()

            return finish

        return measure.measure_slowdown(self._forward(n), communicate, self.device, self.group, 0.1 * self.budget)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copies(self) -> dict[str, Any]:
        load = self.load
        most = max(load.rows * load.hidden_size, load.assignments * load.hidden_columns, 64) * load.element_size
        out, back = measure.measure_copies(
            [most // size for size in (64, 16, 4, 1)], self.device, self.group, 0.04 * self.budget
        )
        if self.device.type == "cuda":
            return {"copy_out": out, "copy_in": back}
        return {"copy_out": out, "copies_by_program": True}  # what lies on the host need not come back


def _drop(result: object) -> None:
    """Only the time counts."""
