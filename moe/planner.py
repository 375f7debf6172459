"""How an MoE layer runs best: measured costs and a load go in, a plan and its prediction come out (PipeMoE, Shi et al., INFOCOM
2023; MPipeMoE, Zhang et al., IPDPS 2023).

Pure functions, no processes. A plan's time follows from its schedule, operation by operation, with what a plain startup-plus-rate
model leaves out: the host's work per chunk, and how much computation and communication slow each other down. The best plan is
found by trying all; PipeMoE's closed form, which holds for its own order and without those two, stands beside it as a check.

Two things run at once. The program is what one rank does in order: it computes, starts exchanges and waits for them. The link
carries the exchanges one after the other, in the order in which they were started. While both are busy, the program runs
`compute_slowdown` times slower and the link `exchange_slowdown` times. Copies to and from the host run on an engine of their own.
What whole passes, run in a few numbers of chunks, take beyond that (caches that operations alone find warm, ranks that wait for each
other) is added as it was measured.
All numbers are those of the busiest rank, and its chunks are equal parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from moe import footprint
from moe.plan import DEPTH, STRATEGIES, Load, Plan, Strategy, Way, ways
from parallel.costs import NOTHING, Curve, Line

DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
# A pass in several chunks must be predicted to be faster than in one by more than this share: models and machines are not more
# exact, and nothing shall be pipelined for noise.
MARGIN = 0.02
# A backward pass in several chunks that has no weight gradients in hand when it must wait (lag 0) counts this much longer on top.
# The model's ranks never wait for each other, real ones do: 2 ranks, 500 Mbit/s, 2048 tokens, hidden 512, 8 experts of 512, top 2,
# fp32: lag 0 takes 170 ms in 2 chunks, 173 in 4, 186 in 8; lag 1 takes 148, 164, 174; the model sees no difference.
NO_SLACK = 0.05
CLOSE = 0.1  # plans that are predicted to take up to so much longer than the best one may be as fast
PAIR_BYTES, PAIR_GRADIENT_BYTES = 8, 4  # what travels of each pair besides its row: code and weight; the weight's gradient
ROUNDING = 1e-9  # two sums of the same times differ by less
STEPS_PER_DOUBLING = 32  # loads are rounded up to 1/32 of a power of two, at most 3%, so that drifting counts find old decisions


@dataclass(frozen=True)
class LayerCosts:
    """What one layer's operations take, in seconds, without anything beside them."""

    exchange: Line  # over bytes that the busiest rank sends to others or receives from them
    gather: Line  # over rows: collecting a chunk's rows for an exchange
    home_sum: Line  # over rows: adding up the rows that came back, per token
    forward: Curve  # over a chunk's pairs, as are the next three: its experts, and the sum per row
    recompute: Curve  # what the input gradients take longer when the hidden activation is computed again
    input_gradients: Curve
    weight_gradients: Curve
    post: Line = NOTHING  # over rows: the program's part in an exchange, while the link is already at it
    prepare: Line | Curve = NOTHING  # over a chunk's pairs: sorting them, before the first chunk is there; for both passes' chunks
    regroup: Line | Curve = NOTHING  # over a chunk's pairs: kept hidden activations for chunks that are not the forward pass's
    copy_out: Line = NOTHING  # over bytes, device to host
    copy_in: Line = NOTHING  # over bytes, host to device
    compute_slowdown: float = 1.0  # factor on the program's times while the link is busy
    exchange_slowdown: float = 1.0  # factor on the link's times while the program computes
    count_exchange: float = 0.0  # from the router's choice to the counts on all ranks, before the forward pass
    shared_forward: float = 0.0  # the shared expert, which runs while the first chunk travels
    shared_backward: float = 0.0
    copies_by_program: bool = False  # no engine copies: the program does, as on a host
    # What whole passes in some number of chunks took longer than all of that explains (or less), and a forward pass longer still
    # where the backward pass has another number.
    forward_rest: Line | Curve = NOTHING
    backward_rest: Line | Curve = NOTHING
    mixed_rest: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Numbers, lists and dicts, as JSON takes them."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> LayerCosts:
        """Undo `as_dict`, also after JSON. Raises TypeError or KeyError for something else."""
        return LayerCosts(**{field.name: _model(values[field.name]) for field in fields(LayerCosts)})


def _model(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Line(**value) if "alpha" in value else Curve(tuple(value["sizes"]), tuple(value["seconds"]))


@dataclass(frozen=True)
class Limits:
    """What a plan may be. `degrees` and `backward_degrees` beyond the number of tokens are passed over where others are left."""

    degrees: tuple[int, ...] = DEGREES
    backward_degrees: tuple[int, ...] = DEGREES
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    memory_budget: int | None = None  # bytes of buffers per rank, as `memory_bytes` counts; None: no limit
    live_calls: int = 1  # calls (layers times micro-batches) that are between their passes at once


@dataclass(frozen=True)
class Prediction:
    """Seconds of both passes and peak bytes of a plan."""

    forward: float
    backward: float
    memory: int


@dataclass(frozen=True)
class Decision:
    """A plan and the prediction that led to it."""

    plan: Plan
    prediction: Prediction


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------


class _Clock:
    """The program's time, and what the link has yet to carry: exchanges follow one another, so their sum says it all."""

    __slots__ = ("now", "_backlog", "_copies_end", "_sent", "_slow_link", "_slow_program")

    def __init__(self, costs: LayerCosts) -> None:
        self.now = self._backlog = self._sent = self._copies_end = 0.0
        self._slow_program, self._slow_link = costs.compute_slowdown, costs.exchange_slowdown

    def compute(self, work: float) -> None:
        """The program works for `work` seconds, more beside the link."""
        backlog = self._backlog
        if backlog > 0.0:
            together, link_alone = work * self._slow_program, backlog * self._slow_link
            if together < link_alone:
                self._backlog = backlog - together / self._slow_link
                self.now += together
                return
            self._backlog = 0.0
            self.now += link_alone
            work -= link_alone / self._slow_program
        self.now += work

    def send(self, seconds: float) -> float:
        """Start an exchange; the result stands for it in `wait`."""
        self._backlog += seconds
        self._sent += seconds
        return self._sent

    def wait(self, exchange: float) -> None:
        """Until an exchange and all before it are over."""
        ahead = self._backlog - (self._sent - exchange)
        if ahead > 0.0:
            self._backlog -= ahead
            self.now += ahead

    def copy(self, seconds: float) -> float:
        """Start a copy; the result is when it ends."""
        self._copies_end = max(self._copies_end, self.now) + seconds
        return self._copies_end

    def wait_until(self, end: float) -> None:
        """Idle until then."""
        if end > self.now:
            self._backlog = max(0.0, self._backlog - (end - self.now))
            self.now = end


class _Work:
    """What a chunk's operations take where the load is cut into `degree` chunks."""

    def __init__(self, costs: LayerCosts, load: Load, degree: int) -> None:
        rows, pairs = load.rows / degree, load.pairs / degree
        row_bytes = load.hidden_size * load.element_size
        self.degree = degree
        self.exchange = costs.exchange(load.away_rows / degree * row_bytes)
        self.gather, self.post, self.home_sum = costs.gather(rows), costs.post(rows), costs.home_sum(rows)
        self.prepare, self.regroup = costs.prepare(pairs), costs.regroup(pairs)
        self.forward, self.recompute = costs.forward(pairs), costs.recompute(pairs)
        self.input_gradients, self.weight_gradients = costs.input_gradients(pairs), costs.weight_gradients(pairs)
        hidden_bytes = pairs * load.hidden_columns * load.element_size
        self.rows_out, self.hidden_out = costs.copy_out(rows * row_bytes), costs.copy_out(hidden_bytes)
        self.rows_in, self.hidden_in = costs.copy_in(rows * row_bytes), costs.copy_in(hidden_bytes)

    def copy_out(self, strategy: Strategy) -> float:
        return (self.rows_out if strategy.rows == "offload" else 0.0) + (self.hidden_out if strategy.hidden == "offload" else 0.0)

    def copy_in(self, strategy: Strategy) -> float:
        return (self.rows_in if strategy.rows == "offload" else 0.0) + (self.hidden_in if strategy.hidden == "offload" else 0.0)

    def all_input_gradients(self, strategy: Strategy, same: bool) -> float:
        """With what it takes to have the hidden activation in this pass's chunks."""
        if strategy.hidden == "recompute":
            return self.recompute + self.input_gradients
        return self.input_gradients if same or strategy.hidden == "offload" else self.regroup + self.input_gradients


def forward_seconds(costs: LayerCosts, load: Load, plan: Plan) -> float:
    """Seconds of the forward pass, until the output is there and, if it offloads, the last copy is out.

    Counts are exchanged, then each pair's code and weight; the first DEPTH chunks are sent. The shared expert runs, and the pairs
    that came are sorted into both passes' chunks. For each chunk i: i + DEPTH is sent, i is waited for, computed and answered (and
    copied out), the answer i - DEPTH is waited for and added up.
    """
    work, backward_work = _Work(costs, load, plan.degree), _Work(costs, load, plan.backward_degree)
    return _forward_seconds(costs, load, STRATEGIES[plan.memory_strategy], work, backward_work)


def _preparing(work: _Work, backward_work: _Work) -> float:
    both = backward_work.degree * backward_work.prepare if backward_work.degree != work.degree else 0.0
    return work.degree * work.prepare + both


def _forward_seconds(costs: LayerCosts, load: Load, strategy: Strategy, work: _Work, backward_work: _Work) -> float:
    exchange, gather, post, copy_out = work.exchange, work.gather, work.post, work.copy_out(strategy)
    clock = _Clock(costs)
    compute, send, wait, degree = clock.compute, clock.send, clock.wait, work.degree
    clock.now = costs.count_exchange
    pairs_sent = send(_pair_seconds(costs, load, PAIR_BYTES))
    dispatches, answers = [], []

    def start() -> None:
        compute(gather)
        dispatches.append(send(exchange))
        compute(post)

    for _ in range(min(DEPTH, degree)):
        start()
    compute(costs.shared_forward)
    wait(pairs_sent)
    compute(_preparing(work, backward_work))
    copies_end = 0.0
    for i in range(degree):
        if i + DEPTH < degree:
            start()
        wait(dispatches[i])
        compute(work.forward)
        answers.append(send(exchange))
        compute(post)
        if copy_out > 0.0:
            if costs.copies_by_program:
                compute(copy_out)
            else:
                copies_end = clock.copy(copy_out)
        if i >= DEPTH:
            wait(answers[i - DEPTH])
            compute(work.home_sum)
    for answer in answers[-DEPTH:]:
        wait(answer)
        compute(work.home_sum)
    mixed = costs.mixed_rest if backward_work.degree != degree else 0.0
    return max(max(clock.now, copies_end) + costs.forward_rest(degree) + mixed, 0.0)


def _forward_bound(costs: LayerCosts, load: Load, strategy: Strategy, work: _Work) -> float:
    """No more than `_forward_seconds`: what each resource has to do at least."""
    degree, copies = work.degree, work.degree * work.copy_out(strategy)
    program = degree * (work.gather + 2 * work.post + work.prepare + work.forward + work.home_sum) + costs.shared_forward
    link = _pair_seconds(costs, load, PAIR_BYTES) + 2 * degree * work.exchange + work.home_sum
    busiest = max(program + copies, link) if costs.copies_by_program else max(program, link, copies)
    return max(costs.count_exchange + busiest + costs.forward_rest(degree), 0.0)


def backward_seconds(costs: LayerCosts, load: Load, plan: Plan) -> float:
    """Seconds of the backward pass.

    The gradients of the first DEPTH chunks are sent (and, where the strategy says so, their rows again; or they come from the
    host, one chunk ahead), and the shared expert runs. For each chunk i: i + DEPTH is sent, i is waited for, its hidden activation
    recomputed if it is not there, its input gradients are computed and answered (and after the last chunk, the gradients of the
    pairs' weights are sent); then come the weight gradients of chunk i - weight_lag, and the answer i - DEPTH is waited for and
    added up. At the end the remaining weight gradients are computed, and the last answers added up.
    """
    strategy, same = STRATEGIES[plan.memory_strategy], plan.degree == plan.backward_degree
    return _backward_seconds(costs, load, strategy, _Work(costs, load, plan.backward_degree), plan.weight_lag, same)


def _backward_seconds(costs: LayerCosts, load: Load, strategy: Strategy, work: _Work, weight_lag: int, same: bool) -> float:
    exchange, gather, post, weight_gradients = work.exchange, work.gather, work.post, work.weight_gradients
    gradients, copy_in = work.all_input_gradients(strategy, same), work.copy_in(strategy)
    sends = 2 if strategy.rows == "communicate" else 1
    clock = _Clock(costs)
    compute, send, wait, degree = clock.compute, clock.send, clock.wait, work.degree
    dispatches, copies, answers = [], [], []

    def start() -> None:
        for _ in range(sends):
            compute(gather)
            dispatch = send(exchange)
            compute(post)
        dispatches.append(dispatch)

    def fetch() -> None:
        if copy_in > 0.0 and costs.copies_by_program:
            compute(copy_in)
        copies.append(clock.copy(copy_in) if copy_in > 0.0 and not costs.copies_by_program else 0.0)

    for _ in range(min(DEPTH, degree)):
        start()
    fetch()
    compute(costs.shared_backward)
    pairs_sent = 0.0
    for i in range(degree):
        if i + DEPTH < degree:
            start()
        if i + 1 < degree:
            fetch()
        wait(dispatches[i])
        clock.wait_until(copies[i])
        compute(gradients)
        answers.append(send(exchange))
        compute(post)
        if i + 1 == degree:
            pairs_sent = send(_pair_seconds(costs, load, PAIR_GRADIENT_BYTES))
        if i >= weight_lag:
            compute(weight_gradients)
        if i >= DEPTH:
            wait(answers[i - DEPTH])
            compute(work.home_sum)
    for _ in range(min(weight_lag, degree)):
        compute(weight_gradients)
    for answer in answers[-DEPTH:]:
        wait(answer)
        compute(work.home_sum)
    wait(pairs_sent)
    return max(clock.now + costs.backward_rest(degree), 0.0)


def _backward_bound(costs: LayerCosts, load: Load, strategy: Strategy, work: _Work, same: bool) -> float:
    """No more than `_backward_seconds` with any lag."""
    degree, sends, copies = work.degree, 2 if strategy.rows == "communicate" else 1, work.degree * work.copy_in(strategy)
    gradients = work.all_input_gradients(strategy, same) + work.weight_gradients
    program = degree * (sends * work.gather + (sends + 1) * work.post + gradients + work.home_sum) + costs.shared_backward
    link = (sends + 1) * degree * work.exchange + _pair_seconds(costs, load, PAIR_GRADIENT_BYTES)
    busiest = max(program + copies, link) if costs.copies_by_program else max(program, link, copies)
    return max(busiest + costs.backward_rest(degree), 0.0)


def _pair_seconds(costs: LayerCosts, load: Load, num_bytes: int) -> float:
    """The exchange of `num_bytes` per pair; of the pairs the same share travels as of the rows."""
    return costs.exchange(num_bytes * load.pairs * load.away_rows / load.rows) if load.rows else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def memory_bytes(load: Load, plan: Plan, live_calls: int = 1) -> int:
    """Peak bytes of buffers on the busiest rank: what `live_calls` calls keep between their passes, and the workspaces of one of
    their passes, the larger one's: passes follow one another."""
    strategy, same = STRATEGIES[plan.memory_strategy], plan.degree == plan.backward_degree
    forward = footprint.forward_bytes(load, strategy, plan.degree)
    backward = footprint.backward_bytes(load, strategy, plan.backward_degree, plan.weight_lag, same)
    return live_calls * footprint.kept_bytes(load, strategy) + max(forward, backward)


# ---------------------------------------------------------------------------------------------------------------------
# The best plan
# ---------------------------------------------------------------------------------------------------------------------


def predict(costs: LayerCosts, load: Load, plan: Plan, live_calls: int = 1) -> Prediction:
    """What a plan should take: a call's times, and the memory of `live_calls` calls."""
    return Prediction(forward_seconds(costs, load, plan), backward_seconds(costs, load, plan), memory_bytes(load, plan, live_calls))


def weight_lags(degree: int) -> list[int]:
    """The lags that are tried: weight gradients at once, or one chunk later, which fills a wait as well as any longer lag."""
    return list(range(min(degree, 2)))


def allowed_degrees(degrees: Sequence[int], tokens: int) -> list[int]:
    """Those with at least a token per chunk, else the least."""
    return [degree for degree in sorted(set(degrees)) if degree <= tokens] or [min(degrees)]


def _margin(degree: int) -> float:
    return 1.0 + MARGIN if degree > 1 else 1.0


def score(seconds: float, way: Way, factors: Mapping[Way, float]) -> float:
    """What is compared of a pass that is predicted to take `seconds`, where `factors` are what some took by what was predicted.

    In several chunks it counts MARGIN longer than it is; if it was never run, what the model does not see comes on top.
    """
    if way in factors:
        return seconds * _margin(way.degree) * factors[way]
    return seconds * (_margin(way.degree) + unseen(way))


def unseen(way: Way) -> float:
    """By how much of what is predicted a pass is expected to take longer, for what the model does not see."""
    return NO_SLACK if way.name == "backward" and way.degree > 1 and way.weight_lag == 0 else 0.0


def best_plan(costs: LayerCosts, load: Load, limits: Limits | None = None, factors: Mapping[Way, float] | None = None) -> Decision:
    """The plan with the least sum of both passes' scores among all that fit the memory budget, exactly.

    `factors` are what some passes took by what was predicted; others are taken to take just that. Ties go to the lower degrees, then
    to the lower weight lag, then to the strategy that `limits` names first. Raises ValueError if nothing fits, naming the least that
    does; for an unknown strategy or a degree below 1; and if nothing is allowed at all.
    """
    return close_plans(costs, load, limits, factors, within=0.0)[0]


def close_plans(
    costs: LayerCosts, load: Load, limits: Limits | None = None, factors: Mapping[Way, float] | None = None, within: float = CLOSE
) -> list[Decision]:
    """The best plan, then those with scores up to `within` higher in which a pass runs in another way than in each before: with another
    strategy, with a number of chunks that differs by a factor of 2, or with another weight lag. Plans in which both
    passes do come first, and in each part the better one. Raises ValueError as `best_plan` does."""
    limits = limits or Limits()
    _check(limits)
    search = _Search(costs, load, limits, factors or {})
    found: list[tuple[float, int, int, int, int]] = []
    best = math.inf
    for bound, degree, backward_degree, index in search.candidates():
        if bound * (1.0 - ROUNDING) > best * (1.0 + within):
            break  # and so are all that follow
        strategy = limits.strategies[index]
        backward = search.backward(strategy, backward_degree, degree == backward_degree)
        # What the forward pass prepares for other chunks backward cannot make it faster: without it, this is a bound too.
        bound = search.forward(strategy, degree, degree) + backward[0][0]
        if bound * (1.0 - ROUNDING) > best * (1.0 + within):
            continue
        forward = search.forward(strategy, degree, backward_degree)
        found.extend((forward + seconds, degree, backward_degree, lag, index) for seconds, lag in backward)
        best = min(best, forward + backward[0][0])
    if not found:
        raise ValueError(_refusal(load, limits))
    close = sorted(each for each in found if each[0] <= best * (1.0 + within))
    plans = _different([Plan(degree, other, limits.strategies[index], lag) for _, degree, other, lag, index in close])
    return [Decision(plan, predict(costs, load, plan, limits.live_calls)) for plan in plans]


def _different(plans: Sequence[Plan]) -> list[Plan]:
    """Those in which both passes run in another way than in each before, then those in which one does."""
    chosen: list[Plan] = []
    known: list[Way] = []
    for at_least in (2, 1):
        for plan in plans:
            new = [way for way in ways(plan) if all(_differ(way, other) for other in known)]
            if len(new) >= at_least:
                chosen.append(plan)
                known.extend(new)
    return chosen


def _differ(one: Way, other: Way) -> bool:
    if (one.name, one.memory_strategy) != (other.name, other.memory_strategy):
        return True
    return max(one.degree, other.degree) >= 2 * min(one.degree, other.degree) or one.weight_lag != other.weight_lag


class _Search:
    """The scores of one load's plans, each computed when first asked for."""

    def __init__(self, costs: LayerCosts, load: Load, limits: Limits, factors: Mapping[Way, float]) -> None:
        self.costs, self.load, self.limits, self.factors = costs, load, limits, factors
        self.degrees, self.backward_degrees = (allowed_degrees(each, load.tokens) for each in (limits.degrees, limits.backward_degrees))
        self._work = {degree: _Work(costs, load, degree) for degree in {*self.degrees, *self.backward_degrees}}
        self._lags: dict[tuple[str, int, bool], list[int]] = {}  # those that fit the budget
        self._forward: dict[tuple[bool, bool, int, int], float] = {}
        self._backward: dict[tuple[str, int, bool], list[tuple[float, int]]] = {}

    def candidates(self) -> list[tuple[float, int, int, int]]:
        """(a lower bound of the score, degree, backward degree, number of the strategy) of all that fit, by rising bound."""
        costs, load, limits = self.costs, self.load, self.limits
        least_factor = min(1.0, *self.factors.values()) if self.factors else 1.0
        result: list[tuple[float, int, int, int]] = []
        for index, name in enumerate(limits.strategies):
            strategy, left = STRATEGIES[name], math.inf
            if limits.memory_budget is not None:
                left = limits.memory_budget - limits.live_calls * footprint.kept_bytes(load, strategy)
            forward = {
                degree: _margin(degree) * _forward_bound(costs, load, strategy, self._work[degree])
                for degree in self.degrees
                if left == math.inf or footprint.forward_bytes(load, strategy, degree) <= left
            }
            backward = {}
            for degree, same in itertools.product(self.backward_degrees, (True, False)):
                lags = weight_lags(degree)
                if left < math.inf:
                    lags = [lag for lag in lags if footprint.backward_bytes(load, strategy, degree, lag, same) <= left]
                if lags and (same or not strategy.offloads):
                    self._lags[name, degree, same] = lags
                    backward[degree, same] = _margin(degree) * _backward_bound(costs, load, strategy, self._work[degree], same)
            result.extend(
                (least_factor * (forward[degree] + backward[other, degree == other]), degree, other, index)
                for degree, other in itertools.product(forward, self.backward_degrees)
                if (other, degree == other) in backward
            )
        return sorted(result)

    def forward(self, name: str, degree: int, backward_degree: int) -> float:
        """The forward pass's score with the strategy of this name."""
        # Strategies differ only in what they copy out.
        strategy = STRATEGIES[name]
        key = (strategy.rows == "offload", strategy.hidden == "offload", degree, backward_degree)
        if key not in self._forward:
            work, other = self._work[degree], self._work[backward_degree]
            self._forward[key] = _forward_seconds(self.costs, self.load, strategy, work, other)
        return score(self._forward[key], Way("forward", degree, name), self.factors)

    def backward(self, name: str, degree: int, same: bool) -> list[tuple[float, int]]:
        """The backward pass's scores with each lag that fits, and the lag: the best first."""
        key = name, degree, same
        if key not in self._backward:
            strategy, work = STRATEGIES[name], self._work[degree]
            seconds = [(_backward_seconds(self.costs, self.load, strategy, work, lag, same), lag) for lag in self._lags[key]]
            self._backward[key] = sorted((score(of_lag, Way("backward", degree, name, lag), self.factors), lag) for of_lag, lag in seconds)
        return self._backward[key]


def all_plans(limits: Limits, tokens: int) -> Iterator[Plan]:
    """Every plan that is allowed, whatever memory it takes."""
    degrees, backward_degrees = (allowed_degrees(each, tokens) for each in (limits.degrees, limits.backward_degrees))
    for name, degree, other in itertools.product(limits.strategies, degrees, backward_degrees):
        if degree == other or not STRATEGIES[name].offloads:
            for lag in weight_lags(other):
                yield Plan(degree, other, name, lag)


def _refusal(load: Load, limits: Limits) -> str:
    plans = list(all_plans(limits, load.tokens))
    if not plans:
        return (
            f"strategies ({limits.strategies}) bring back the forward pass's chunks, so both passes need a common number of them; "
            f"allowed are {limits.degrees} and {limits.backward_degrees}. Try the same for both."
        )
    least, plan = min(((memory_bytes(load, plan, limits.live_calls), plan) for plan in plans), key=lambda pair: pair[0])
    return (
        f"moe.memory_budget ({(limits.memory_budget or 0) / 2**20:.6g} MiB) is less than any allowed plan needs for {load.tokens} tokens, "
        f"{load.rows} rows, {load.pairs} pairs and {limits.live_calls} calls at once: the least is {least} bytes, with "
        f"memory_strategy={plan.memory_strategy}, {plan.degree} chunks forward and {plan.backward_degree} backward. "
        f"Try moe.memory_budget={math.ceil(least / 2**20 * 1000) / 1000}."
    )


def _check(limits: Limits) -> None:
    for name, degrees in (("degrees", limits.degrees), ("backward_degrees", limits.backward_degrees)):
        if not degrees or min(degrees) < 1:
            raise ValueError(f"{name} ({degrees}) must be numbers of chunks, at least one, all at least 1. Try {DEGREES}.")
    unknown = [name for name in limits.strategies if name not in STRATEGIES]
    if unknown or not limits.strategies:
        raise ValueError(f"strategies ({limits.strategies}) must be some of {', '.join(STRATEGIES)}. Try ('keep',).")


class Planner:
    """Decides for one layer, again whenever its load has drifted to where nothing was decided yet (MPipeMoE's adaptive granularity).

    A decision depends on the load and on what `learn` was told, not on earlier ones: so ranks that plan with the same numbers decide
    alike. It is that of the load rounded up, at most 1/STEPS_PER_DOUBLING more: what fits the memory budget rounded up fits it.
    """

    def __init__(self, costs: LayerCosts, limits: Limits | None = None) -> None:
        self.costs, self.limits = costs, limits or Limits()
        self.num_decisions = self.num_solved = 0  # asked for; not found among earlier ones
        self._decisions: dict[Load, Decision] = {}
        self._factors: dict[Way, float] = {}

    def decide(self, load: Load) -> Decision:
        """The best plan, with the model's prediction for the rounded load. Raises ValueError as `best_plan` does."""
        rounded = rounded_up(load)
        decision = self._decisions.get(rounded)
        if decision is None:
            decision = self._decisions[rounded] = best_plan(self.costs, rounded, self.limits, self._factors)
            self.num_solved += 1
        self.num_decisions += 1
        return decision

    def close(self, load: Load) -> list[Decision]:
        """That and what might be as fast, see `close_plans`."""
        return close_plans(self.costs, rounded_up(load), self.limits, self._factors)

    def fits(self, plan: Plan, load: Load) -> bool:
        """Whether a plan fits the memory budget with this load."""
        limits = self.limits
        return limits.memory_budget is None or memory_bytes(rounded_up(load), plan, limits.live_calls) <= limits.memory_budget

    def expected(self, decision: Decision) -> float:
        """The score of both passes after what `learn` was told."""
        return total(decision, self._factors)

    def learn(self, factors: Mapping[Way, float]) -> None:
        """What these passes took by what was predicted, where others are taken to take just that."""
        self._factors = dict(factors)
        self._decisions.clear()


def total(decision: Decision, factors: Mapping[Way, float] | None = None) -> float:
    """The score of both passes."""
    forward, backward = ways(decision.plan)
    prediction, factors = decision.prediction, factors or {}
    return score(prediction.forward, forward, factors) + score(prediction.backward, backward, factors)


def rounded_up(load: Load) -> Load:
    """The load with its counts rounded up, so that loads that hardly differ are one."""
    counts = ("tokens", "rows", "away_rows", "pairs", "expert_pairs")
    rounded: dict[str, Any] = {name: _rounded_up(getattr(load, name)) for name in counts}
    return replace(load, **rounded)


def _rounded_up(count: int) -> int:
    step = (1 << max(count - 1, 1).bit_length() - 1) // STEPS_PER_DOUBLING
    return count if step <= 1 else -(-count // step) * step


# ---------------------------------------------------------------------------------------------------------------------
# PipeMoE's own model
# ---------------------------------------------------------------------------------------------------------------------


def closed_form_seconds(exchange: Line, compute: Line, size: float, work: float, degree: int) -> float:
    """PipeMoE's time of a forward pass in its order: all dispatches, then all combines as their chunks are computed.

    `size` bytes are exchanged each way and `work` is computed, in `degree` equal chunks. It has four cases: one chunk;
    communication takes longer throughout (dispatch never waits for computation); computation does; or the chunks' computation
    is longer, but over before all that must be sent first is sent.
    """
    send, experts = exchange.alpha + exchange.beta * size / degree, compute.alpha + compute.beta * work / degree
    if degree == 1:
        return 2 * send + experts
    if send >= experts or degree * experts < 2 * (degree - 1) * send:
        return 2 * degree * send
    return 2 * send + degree * experts


def closed_form_degree(exchange: Line, compute: Line, size: float, work: float, max_degree: int) -> int:
    """The degree from 1 to `max_degree` with the least `closed_form_seconds`, the lowest of equals, without trying them all.

    Where communication takes longer, time grows with the degree, so the lowest degree of each such range is its best; where
    computation does, time falls until sqrt(2 * exchange time / startup of computation) and grows beyond. So the best stands at
    that number or where the cases meet. (The authors' program rounds their roots, which can lead out of the case's range, and
    divides by the difference of startups whatever its sign.)
    """
    a, b = exchange.alpha, exchange.beta * size
    e, f = compute.alpha, compute.beta * work
    roots: list[float] = []
    if e > 0:
        roots.append(math.sqrt(2 * b / e))
    if a != e:  # a + b / r = e + f / r
        roots.append((f - b) / (a - e))
    # r (e + f / r) = 2 (r - 1) (a + b / r)
    square, linear, constant = 2 * a - e, 2 * b - 2 * a - f, -2 * b
    if square == 0:
        if linear != 0:
            roots.append(-constant / linear)
    elif (inside := linear * linear - 4 * square * constant) >= 0:
        roots.extend((-linear + sign * math.sqrt(inside)) / (2 * square) for sign in (1.0, -1.0))
    around = [math.floor(min(max(root, 0.0), max_degree)) + step for root in roots for step in (-1, 0, 1, 2)]
    candidates = {degree for degree in (1, 2, max_degree, *around) if 1 <= degree <= max_degree}
    return min(candidates, key=lambda degree: (closed_form_seconds(exchange, compute, size, work, degree), degree))
