"""The seconds of a plan: goes through its programs (schedule/program.py), operation by operation.

Two things run at once. The program is what one rank does in order: it computes, starts exchanges and waits for them.
The link carries the exchanges one after the other, in the order in which they were started. While both are busy, the
program runs `compute_slowdown` times slower and the link `exchange_slowdown` times. Copies to and from the host run on
an engine of their own. All numbers are those of the busiest rank, and its chunks are equal parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from moe.chunk_plan import STRATEGIES, LayerLoad, Plan, Strategy
from moe.planning.costs import LayerCosts
from moe.schedule import program
from moe.schedule.program import Operation

# What travels of each assignment beside its row: packed id and probability; the probability's gradient.
ASSIGNMENT_BYTES, ASSIGNMENT_GRADIENT_BYTES = 8, 4

COMPUTE, SEND, WAIT, COPY, WAIT_COPY = range(5)
# What the machine does, and for how long (the name of some seconds), or what it waits for (an operation, then the
# number of its exchange).
Step = tuple[int, Any]
Seconds = dict[str, float]  # by name: what a step takes

LINES: dict[type[Operation], Callable[[Any], list[Step]]] = {
    # Slots and the link are the rank's, not the layer's: simulator/clock/streams.py counts what comes and goes.
    program.FetchExpert: lambda operation: [],
    program.WaitExpert: lambda operation: [],
    program.StoreExpert: lambda operation: [],
    program.FetchCopies: lambda operation: [(SEND, "copies")],
    program.WaitCopies: lambda operation: [(WAIT, program.FetchCopies())],
    program.ReturnGrads: lambda operation: [(SEND, "copy_grads")],
    program.WaitGrads: lambda operation: [(WAIT, program.ReturnGrads())],
    program.SendAssignments: lambda operation: [(SEND, "assignments")],
    program.Expect: lambda operation: [],
    program.Dispatch: lambda operation: [(COMPUTE, "gather"), (SEND, "exchange"), (COMPUTE, "post")],
    program.SharedExpert: lambda operation: [(COMPUTE, "shared_expert")],
    program.TakeAssignments: lambda operation: [(WAIT, program.SendAssignments()), (COMPUTE, "prepare")],
    program.WaitDispatch: lambda operation: [(WAIT, program.Dispatch(operation.chunk, operation.tensor))],
    program.Experts: lambda operation: [(COMPUTE, "experts")],
    program.Combine: lambda operation: [(SEND, "exchange"), (COMPUTE, "post")],
    program.Offload: lambda operation: [(COMPUTE, "program_copy"), (COPY, "copy")],
    program.SumCombine: lambda operation: [(WAIT, program.Combine(operation.chunk)), (COMPUTE, "combine_sum")],
    program.Fetch: lambda operation: [(COMPUTE, "program_copy"), (COPY, "copy")],
    program.SharedExpertGrad: lambda operation: [(COMPUTE, "shared_expert")],
    program.InputGrads: lambda operation: [(WAIT_COPY, program.Fetch(operation.chunk)), (COMPUTE, "input_grads")],
    program.Release: lambda operation: [],
    program.SendProbsGrad: lambda operation: [(SEND, "assignments")],
    program.ExpertWeightGrads: lambda operation: [(COMPUTE, "weight_grads")],
    program.TakeProbsGrad: lambda operation: [(WAIT, program.SendProbsGrad())],
    program.LocalExperts: lambda operation: [(COMPUTE, "experts")],
    program.LocalGrads: lambda operation: [
        (WAIT_COPY, program.Fetch(operation.chunk)),
        (COMPUTE, "input_grads"),
        (COMPUTE, "weight_grads"),
    ],
}


class Timeline(NamedTuple):
    """A program as steps, and what each resource has to do in all of it: names of seconds, and how often."""

    steps: tuple[Step, ...]
    computed: tuple[tuple[str, int], ...]
    sent: tuple[tuple[str, int], ...]
    copied: tuple[tuple[str, int], ...]
    last: tuple[str, ...]  # computed when nothing is on its way any more


def timeline(operations: Sequence[Operation]) -> Timeline:
    """The steps of a program. Raises UnknownOperation for an operation that has no line here."""
    steps: list[Step] = []
    exchanges: dict[Operation, int] = {}
    copies: dict[Operation, int] = {}
    for operation in operations:
        for kind, what in program.line_for(LINES, operation, "planning/timing.py")(operation):
            if kind == WAIT:
                what = exchanges[what]
            elif kind == WAIT_COPY:
                if what not in copies:
                    continue  # nothing is on the host
                what = copies[what]
            elif kind in (SEND, COPY):
                started = exchanges if kind == SEND else copies
                started[operation] = len(started)
            steps.append((kind, what))
    counts = {
        kind: tuple(Counter(what for each, what in steps if each == kind).items()) for kind in (COMPUTE, SEND, COPY)
    }
    last: list[str] = []
    for kind, what in reversed(steps):
        if kind != COMPUTE:
            break
        last.append(what)
    return Timeline(tuple(steps), counts[COMPUTE], counts[SEND], counts[COPY], tuple(last))


@cache
def forward_timeline(degree: int, strategy: Strategy, copies: bool) -> Timeline:
    """The timeline of a forward pass; `copies`: experts may have some."""
    return timeline(program.forward(degree, strategy, copies))


@cache
def backward_timeline(degree: int, strategy: Strategy, lag: int, copies: bool) -> Timeline:
    """The timeline of a backward pass."""
    return timeline(program.backward(degree, strategy, lag, copies))


def run(
    steps: Sequence[Step], seconds: Mapping[str, float], slow_program: float, slow_link: float, now: float
) -> float:
    """When a program that begins at `now` and its last copy are over.

    Exchanges follow one another, so the sum of what the link has yet to carry says all of it.
    """
    compute, send, wait, copy = COMPUTE, SEND, WAIT, COPY
    backlog = sent = copies_end = 0.0
    ends: list[float] = []  # of the exchanges: what was sent up to each
    copies: list[float] = []
    for kind, what in steps:
        if kind == compute:
            work = seconds[what]
            if backlog > 0.0:
                together, link_alone = work * slow_program, backlog * slow_link
                if together < link_alone:
                    backlog -= together / slow_link
                    now += together
                    continue
                backlog = 0.0
                now += link_alone
                work -= link_alone / slow_program
            now += work
        elif kind == send:
            backlog += seconds[what]
            sent += seconds[what]
            ends.append(sent)
        elif kind == wait:
            ahead = backlog - (sent - ends[what])
            if ahead > 0.0:
                backlog -= ahead
                now += ahead
        elif kind == copy:
            copies_end = max(copies_end, now) + seconds[what]
            copies.append(copies_end)
        elif copies[what] > now:
            backlog = max(0.0, backlog - (copies[what] - now))
            now = copies[what]
    return max(now, copies_end)


def _least(line: Timeline, seconds: Mapping[str, float]) -> float:
    """No more than `run`: what each resource has to do at least."""
    computed = sent = copied = 0.0
    for name, count in line.computed:
        computed += count * seconds[name]
    for name, count in line.sent:
        sent += count * seconds[name]
    for name in line.last:
        sent += seconds[name]
    for name, count in line.copied:
        copied += count * seconds[name]
    return max(computed, sent, copied)


class ChunkSeconds:
    """What the operations of a chunk take where the load is cut into `degree` chunks."""

    def __init__(self, costs: LayerCosts, load: LayerLoad, degree: int) -> None:
        rows, assignments = load.rows / degree, load.assignments / degree
        row_bytes = load.hidden_size * load.element_size
        self.costs, self.degree, self.has_copies = costs, degree, load.has_copies
        # Of the assignments the same share travels as of the rows.
        travelling = load.assignments * load.away_rows / load.rows if load.rows else 0.0
        packed_ids, probs_grad = (
            costs.exchange(size * travelling) for size in (ASSIGNMENT_BYTES, ASSIGNMENT_GRADIENT_BYTES)
        )
        self.prepare, self.regroup = costs.prepare(assignments), costs.regroup(assignments)
        self.recompute, self.input_grads = costs.recompute(assignments), costs.input_gradients(assignments)
        preactivation_bytes = assignments * load.hidden_columns * load.element_size
        self._copy_out = costs.copy_out(rows * row_bytes), costs.copy_out(preactivation_bytes)
        self._copy_in = costs.copy_in(rows * row_bytes), costs.copy_in(preactivation_bytes)
        shared: Seconds = {
            "exchange": costs.exchange(load.away_rows / degree * row_bytes),
            "gather": costs.gather(rows),
            "post": costs.post(rows),
            "combine_sum": costs.combine_sum(rows),
        }
        experts, weight_grads = costs.forward(assignments), costs.weight_gradients(assignments)
        fetched, returned = (
            costs.exchange(each) if each else 0.0 for each in (load.fetched_bytes, load.returned_bytes)
        )
        first = {"assignments": packed_ids, "shared_expert": costs.shared_forward, "copies": fetched}
        self._forward = {**shared, **first, "experts": experts, "prepare": degree * self.prepare}
        last = {"assignments": probs_grad, "shared_expert": costs.shared_backward, "copy_grads": returned}
        self._backward = {**shared, **last, "weight_grads": weight_grads, "input_grads": self.input_grads}
        self._bounds: dict[tuple[bool, bool], float] = {}  # of the forward pass, by what is copied

    def forward(self, strategy: Strategy, other: ChunkSeconds | None = None) -> Seconds:
        """Seconds of the forward pass; `other` is the backward pass, whose chunks are prepared too where they are not
        the same."""
        seconds = self._forward.copy()
        if other is not None and other.degree != self.degree:
            seconds["prepare"] += other.degree * other.prepare
        if strategy.offloads:
            seconds |= self._copies(self._copy_out, strategy)
        return seconds

    def backward(self, strategy: Strategy, same: bool) -> Seconds:
        """Seconds of the backward pass; `same`: the forward pass had as many chunks."""
        seconds = self._backward.copy()
        # With what it takes to have the preactivations in this pass's chunks.
        if strategy.preactivations == "recompute":
            seconds["input_grads"] = self.recompute + self.input_grads
        elif strategy.preactivations == "keep" and not same:
            seconds["input_grads"] = self.regroup + self.input_grads
        if strategy.offloads:
            seconds |= self._copies(self._copy_in, strategy)
        return seconds

    def forward_bound(self, strategy: Strategy) -> float:
        """No more than `forward_of`, whatever the backward pass's chunks."""
        copied = strategy.rows == "offload", strategy.preactivations == "offload"
        bound = self._bounds.get(copied)
        if bound is None:
            least = _least(forward_timeline(self.degree, strategy, self.has_copies), self.forward(strategy))
            rest = self.costs.count_exchange + self.costs.forward_rest(self.degree)
            bound = self._bounds[copied] = max(least + rest, 0.0)
        return bound

    def backward_bound(self, strategy: Strategy, same: bool) -> float:
        """No more than `backward_of` with any lag."""
        least = _least(backward_timeline(self.degree, strategy, 0, self.has_copies), self.backward(strategy, same))
        return max(least + self.costs.backward_rest(self.degree), 0.0)

    def _copies(self, of_both: tuple[float, float], strategy: Strategy) -> Seconds:
        rows, preactivations = of_both
        copy = (rows if strategy.rows == "offload" else 0.0) + (
            preactivations if strategy.preactivations == "offload" else 0.0
        )
        by_program = self.costs.copies_by_program
        return {"program_copy": copy if by_program else 0.0, "copy": 0.0 if by_program else copy}


def forward_seconds(costs: LayerCosts, load: LayerLoad, plan: Plan) -> float:
    """Seconds of the forward pass, until the output is there and, if it offloads, the last copy is out."""
    chunk, other = ChunkSeconds(costs, load, plan.degree), ChunkSeconds(costs, load, plan.backward_degree)
    return forward_of(chunk, other, STRATEGIES[plan.memory_strategy])


def forward_of(chunk: ChunkSeconds, other: ChunkSeconds, strategy: Strategy) -> float:
    """The same, `other` being the backward pass's chunks."""
    costs, degree = chunk.costs, chunk.degree
    steps, seconds = forward_timeline(degree, strategy, chunk.has_copies).steps, chunk.forward(strategy, other)
    end = run(steps, seconds, costs.compute_slowdown, costs.exchange_slowdown, costs.count_exchange)
    mixed = costs.mixed_rest if other.degree != degree else 0.0
    return max(end + costs.forward_rest(degree) + mixed, 0.0)


def backward_seconds(costs: LayerCosts, load: LayerLoad, plan: Plan) -> float:
    """Seconds of the backward pass."""
    same = plan.degree == plan.backward_degree
    return backward_of(
        ChunkSeconds(costs, load, plan.backward_degree), STRATEGIES[plan.memory_strategy], plan.weight_lag, same
    )


def backward_of(chunk: ChunkSeconds, strategy: Strategy, lag: int, same: bool) -> float:
    """The same; `same`: the forward pass had as many chunks."""
    costs = chunk.costs
    line, seconds = backward_timeline(chunk.degree, strategy, lag, chunk.has_copies), chunk.backward(strategy, same)
    end = run(line.steps, seconds, costs.compute_slowdown, costs.exchange_slowdown, 0.0)
    return max(end + costs.backward_rest(chunk.degree), 0.0)
