"""Predicted seconds of a plan: an interpreter of its programs (schedule/program.py) with a clock.

Two resources run concurrently. The program is the sequence of one rank: it computes, starts exchanges and waits for
them. The link carries the exchanges one after the other, in the order in which they were started. While both are busy,
the program runs `compute_slowdown` times slower and the link `exchange_slowdown` times. Copies to and from the host run
on an engine of their own. All numbers are those of the busiest rank, and its chunks are equal.
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

# Bytes sent per assignment in addition to its token row: packed id and probability; the probability's gradient.
ASSIGNMENT_BYTES, ASSIGNMENT_GRADIENT_BYTES = 8, 4

COMPUTE, SEND, WAIT, COPY_HOST, WAIT_COPY = range(5)
# A kind of step, and its duration (a name in `Seconds`) or what it waits for (an operation, later the number of its
# exchange or copy).
Step = tuple[int, Any]
Seconds = dict[str, float]  # durations of steps, by name

_no_step: Callable[[Any], list[Step]] = lambda operation: []  # noqa: E731
LINES: dict[type[Operation], Callable[[Any], list[Step]]] = {
    **dict.fromkeys((program.Expect, program.Release), _no_step),
    # Slots and the link belong to the rank, not to the layer: simulator/clock/streams.py counts these transfers.
    **dict.fromkeys((program.FetchExpert, program.WaitExpert, program.StoreExpert), _no_step),
    program.FetchReplicas: lambda operation: [(SEND, "copies")],
    program.WaitReplicas: lambda operation: [(WAIT, program.FetchReplicas())],
    program.ReturnGrads: lambda operation: [(SEND, "copy_grads")],
    program.WaitGrads: lambda operation: [(WAIT, program.ReturnGrads())],
    program.SendAssignments: lambda operation: [(SEND, "assignments")],
    program.Dispatch: lambda operation: [(COMPUTE, "gather"), (SEND, "exchange"), (COMPUTE, "post")],
    program.SharedExpert: lambda operation: [(COMPUTE, "shared_expert")],
    program.TakeAssignments: lambda operation: [(WAIT, program.SendAssignments()), (COMPUTE, "prepare")],
    program.WaitDispatch: lambda operation: [(WAIT, program.Dispatch(operation.chunk, operation.tensor))],
    program.Experts: lambda operation: [(COMPUTE, "experts")],
    program.Combine: lambda operation: [(SEND, "exchange"), (COMPUTE, "post")],
    program.Offload: lambda operation: [(COMPUTE, "program_copy"), (COPY_HOST, "copy")],
    program.SumCombine: lambda operation: [(WAIT, program.Combine(operation.chunk)), (COMPUTE, "combine_sum")],
    program.Fetch: lambda operation: [(COMPUTE, "program_copy"), (COPY_HOST, "copy")],
    program.SharedExpertGrad: lambda operation: [(COMPUTE, "shared_expert")],
    program.InputGrads: lambda operation: [(WAIT_COPY, program.Fetch(operation.chunk)), (COMPUTE, "input_grads")],
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
    """The steps of a program, and how often each named duration occurs in computation, exchanges and copies."""

    steps: tuple[Step, ...]
    computed: tuple[tuple[str, int], ...]
    sent: tuple[tuple[str, int], ...]
    copied: tuple[tuple[str, int], ...]
    last: tuple[str, ...]  # computations after the last step of any other kind


def timeline(operations: Sequence[Operation]) -> Timeline:
    """Return the timeline of a program. Raises UnknownOperation for an operation that is not in LINES."""
    steps: list[Step] = []
    exchanges: dict[Operation, int] = {}
    host_copies: dict[Operation, int] = {}
    for operation in operations:
        for kind, what in program.line_for(LINES, operation, "planning/timing.py")(operation):
            if kind == WAIT:
                what = exchanges[what]
            elif kind == WAIT_COPY:
                if what not in host_copies:
                    continue  # nothing was offloaded
                what = host_copies[what]
            elif kind in (SEND, COPY_HOST):
                started = exchanges if kind == SEND else host_copies
                started[operation] = len(started)
            steps.append((kind, what))
    computed, sent, copied = (
        tuple(Counter(what for each, what in steps if each == kind).items()) for kind in (COMPUTE, SEND, COPY_HOST)
    )
    last: list[str] = []
    for kind, what in reversed(steps):
        if kind != COMPUTE:
            break
        last.append(what)
    return Timeline(tuple(steps), computed, sent, copied, tuple(last))


@cache
def _timeline(make_program: Callable[..., Sequence[Operation]], *arguments: Any) -> Timeline:
    """Return the timeline of the program that `make_program` makes; results are cached."""
    return timeline(make_program(*arguments))


def run(
    steps: Sequence[Step], seconds: Mapping[str, float], slow_program: float, slow_link: float, now: float
) -> float:
    """Simulate a program that starts at time `now`; return the time at which it and its last copy are finished.

    `slow_program`, `slow_link`: factors on durations while both are busy. The link carries one exchange at a time, so
    its state is a single number: the seconds of exchanges that it has yet to carry.
    """
    compute, send, wait, copy_host = COMPUTE, SEND, WAIT, COPY_HOST
    backlog = sent = copies_end = 0.0
    ends: list[float] = []  # seconds of exchanges up to and including each
    copy_ends: list[float] = []
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
        elif kind == copy_host:
            copies_end = max(copies_end, now) + seconds[what]
            copy_ends.append(copies_end)
        elif copy_ends[what] > now:
            backlog = max(0.0, backlog - (copy_ends[what] - now))
            now = copy_ends[what]
    return max(now, copies_end)


def _least(line: Timeline, seconds: Mapping[str, float]) -> float:
    """Return a lower bound on the seconds of a program: the total work of its busiest resource."""
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
    """The seconds of each operation on one chunk of a load that is split into `degree` equal chunks."""

    def __init__(self, costs: LayerCosts, load: LayerLoad, degree: int) -> None:
        token_rows, assignments = load.token_rows / degree, load.assignments / degree
        row_bytes = load.hidden_size * load.element_size
        self.costs, self.degree, self.has_replicas = costs, degree, load.has_replicas
        # Assignments are sent to other ranks in the same proportion as token rows.
        away = load.assignments * load.away_rows / load.token_rows if load.token_rows else 0.0
        packed_ids, probs_grad = (costs.exchange(size * away) for size in (ASSIGNMENT_BYTES, ASSIGNMENT_GRADIENT_BYTES))
        self.prepare, self.regroup = costs.prepare(assignments), costs.regroup(assignments)
        self.recompute, self.input_grads = costs.recompute(assignments), costs.input_gradients(assignments)
        preactivation_bytes = assignments * load.hidden_columns * load.element_size
        self._copy_out = costs.copy_out(token_rows * row_bytes), costs.copy_out(preactivation_bytes)
        self._copy_in = costs.copy_in(token_rows * row_bytes), costs.copy_in(preactivation_bytes)
        shared: Seconds = {
            "exchange": costs.exchange(load.away_rows / degree * row_bytes),
            "gather": costs.gather(token_rows),
            "post": costs.post(token_rows),
            "combine_sum": costs.combine_sum(token_rows),
        }
        experts, weight_grads = costs.forward(assignments), costs.weight_gradients(assignments)
        fetched, returned = (costs.exchange(n) if n else 0.0 for n in (load.fetched_bytes, load.returned_bytes))
        first = {"assignments": packed_ids, "shared_expert": costs.shared_forward, "copies": fetched}
        self._forward = {**shared, **first, "experts": experts, "prepare": degree * self.prepare}
        last = {"assignments": probs_grad, "shared_expert": costs.shared_backward, "copy_grads": returned}
        self._backward = {**shared, **last, "weight_grads": weight_grads, "input_grads": self.input_grads}
        self._bounds: dict[tuple[bool, bool], float] = {}  # of the forward pass, by offloaded tensors

    def forward(self, strategy: Strategy, other: ChunkSeconds | None = None) -> Seconds:
        """Return the seconds of each kind of step in a forward pass.

        `other`: the chunks of the backward pass, which the forward pass also prepares if their number differs.
        """
        seconds = self._forward.copy()
        if other is not None and other.degree != self.degree:
            seconds["prepare"] += other.degree * other.prepare
        if strategy.offloads:
            seconds |= self._copy_seconds(self._copy_out, strategy)
        return seconds

    def backward(self, strategy: Strategy, same: bool) -> Seconds:
        """Return the seconds of each kind of step in a backward pass; `same`: both passes have as many chunks."""
        seconds = self._backward.copy()
        # Input gradients include the time to recompute or regroup the preactivations.
        if strategy.preactivations == "recompute":
            seconds["input_grads"] = self.recompute + self.input_grads
        elif strategy.preactivations == "keep" and not same:
            seconds["input_grads"] = self.regroup + self.input_grads
        if strategy.offloads:
            seconds |= self._copy_seconds(self._copy_in, strategy)
        return seconds

    def forward_bound(self, strategy: Strategy) -> float:
        """Return a lower bound on the seconds of a forward pass, for any number of chunks of the backward pass."""
        copied = strategy.token_rows == "offload", strategy.preactivations == "offload"
        bound = self._bounds.get(copied)
        if bound is None:
            least = _least(_timeline(program.forward, self.degree, strategy, self.has_replicas), self.forward(strategy))
            rest = self.costs.count_exchange + self.costs.forward_rest(self.degree)
            bound = self._bounds[copied] = max(least + rest, 0.0)
        return bound

    def backward_bound(self, strategy: Strategy, same: bool) -> float:
        """Return a lower bound on the seconds of a backward pass, for any number of chunks by which weight gradients
        lag behind input gradients."""
        line = _timeline(program.backward, self.degree, strategy, 0, self.has_replicas)
        least = _least(line, self.backward(strategy, same))
        return max(least + self.costs.backward_rest(self.degree), 0.0)

    def _copy_seconds(self, both: tuple[float, float], strategy: Strategy) -> Seconds:
        seconds = both[0] * (strategy.token_rows == "offload") + both[1] * (strategy.preactivations == "offload")
        by_program = self.costs.copies_by_program
        return {"program_copy": seconds if by_program else 0.0, "copy": 0.0 if by_program else seconds}


def forward_seconds(costs: LayerCosts, load: LayerLoad, plan: Plan) -> float:
    """Return the seconds of a plan's forward pass, until its output exists and its last copy to the host has ended."""
    chunk, other = ChunkSeconds(costs, load, plan.degree), ChunkSeconds(costs, load, plan.backward_degree)
    return forward_of(chunk, other, STRATEGIES[plan.memory_strategy])


def forward_of(chunk: ChunkSeconds, other: ChunkSeconds, strategy: Strategy) -> float:
    """Return the seconds of a forward pass; `chunk`, `other`: costs of a forward and of a backward chunk."""
    costs, degree = chunk.costs, chunk.degree
    seconds = chunk.forward(strategy, other)
    steps = _timeline(program.forward, degree, strategy, chunk.has_replicas).steps
    end = run(steps, seconds, costs.compute_slowdown, costs.exchange_slowdown, costs.count_exchange)
    mixed = costs.mixed_rest if other.degree != degree else 0.0
    return max(end + costs.forward_rest(degree) + mixed, 0.0)


def backward_seconds(costs: LayerCosts, load: LayerLoad, plan: Plan) -> float:
    """Return the seconds of a plan's backward pass."""
    chunk, same = ChunkSeconds(costs, load, plan.backward_degree), plan.degree == plan.backward_degree
    return backward_of(chunk, STRATEGIES[plan.memory_strategy], plan.weight_lag, same)


def backward_of(chunk: ChunkSeconds, strategy: Strategy, lag: int, same: bool) -> float:
    """Return the seconds of a backward pass in chunks with the costs `chunk`. `same`: the forward pass has as many."""
    costs, seconds = chunk.costs, chunk.backward(strategy, same)
    line = _timeline(program.backward, chunk.degree, strategy, lag, chunk.has_replicas)
    end = run(line.steps, seconds, costs.compute_slowdown, costs.exchange_slowdown, 0.0)
    return max(end + costs.backward_rest(chunk.degree), 0.0)
