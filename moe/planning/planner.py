"""The planner of an MoE layer: it finds the best chunk plan for measured costs and a load, and predicts its time.

Pure functions, without communication. The time of a plan follows from its schedule, operation by operation (timing.py),
with what a plain startup-plus-rate model leaves out: the host's work per chunk, and how much computation and
communication slow each other down. The time that whole passes take beyond that (caches that single operations find
warm, ranks that wait for each other) is added as it was measured. The score of a pass is its predicted time, plus a
margin where the model is known to see too little. The search is exact: it tries every plan whose lower bound is not
above the best score. After PipeMoE (Shi et al., INFOCOM 2023) and MPipeMoE (Zhang et al., IPDPS 2023).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe.chunk_plan import STRATEGIES, LayerLoad, PassPlan, Plan, pass_plans
from moe.planning import footprint, timing
from moe.planning.costs import DEGREES, CallPrediction, Decision, LayerCosts, Limits
from moe.planning.footprint import memory_bytes
from moe.planning.timing import ChunkSeconds

# A pass in several chunks must be predicted to be faster than in one chunk by more than this share, which is the error
# of the model: noise must not decide for a pipeline.
MARGIN = 0.02
# Share that is added to a backward pass in several chunks with lag 0, which has no weight gradients to compute while it
# waits. The model's ranks never wait for each other, real ones do: 2 ranks, 500 Mbit/s, 2048 tokens, hidden
# 512, 8 experts of 512, top 2, fp32: lag 0 takes 170 ms in 2 chunks, 173 in 4, 186 in 8; lag 1 takes 148, 164, 174; the
# model sees no difference.
NO_SLACK = 0.05
CLOSE = 0.1  # plans with a predicted time up to this share above the best one's may be as fast
ROUNDING = 1e-9  # two sums of the same times differ by less


def predict(
    costs: LayerCosts, load: LayerLoad, plan: Plan, live_calls: int = 1, replica_bytes: int = 0
) -> CallPrediction:
    """Return a call's predicted seconds, and the memory of `live_calls` calls plus `replica_bytes`."""
    forward, backward = timing.forward_seconds(costs, load, plan), timing.backward_seconds(costs, load, plan)
    return CallPrediction(forward, backward, replica_bytes + memory_bytes(load, plan, live_calls))


def weight_lags(degree: int) -> list[int]:
    """Return the weight lags to try: 0, and with several chunks 1, which fills a wait as well as any longer lag."""
    return list(range(min(degree, 2)))


def allowed_degrees(degrees: Sequence[int], tokens: int) -> list[int]:
    """Return the numbers of chunks with at least one token per chunk; if there are none, the least number."""
    return [degree for degree in sorted(set(degrees)) if degree <= tokens] or [min(degrees)]


def _margin(degree: int) -> float:
    return 1.0 + MARGIN if degree > 1 else 1.0


def score(seconds: float, pass_plan: PassPlan, factors: Mapping[PassPlan, float]) -> float:
    """Return the score of a pass with a predicted time of `seconds`; plans are compared by the sum of their scores.

    `factors`: measured over predicted time of passes that were run. A pass in several chunks has MARGIN added; one that
    was never run has the share added that the model does not see.
    """
    if pass_plan in factors:
        return seconds * _margin(pass_plan.degree) * factors[pass_plan]
    return seconds * (_margin(pass_plan.degree) + unseen(pass_plan))


def unseen(pass_plan: PassPlan) -> float:
    """Return the share by which a pass is expected to exceed its prediction, because the model omits some waits."""
    return NO_SLACK if pass_plan.name == "backward" and pass_plan.degree > 1 and pass_plan.weight_lag == 0 else 0.0


def best_plan(
    costs: LayerCosts, load: LayerLoad, limits: Limits | None = None, factors: Mapping[PassPlan, float] | None = None
) -> Decision:
    """Return the plan with the least sum of both passes' scores among all that fit the memory budget.

    `factors`: measured over predicted time of passes that were run; others count as predicted. Ties go to the lower
    degrees, then to the lower weight lag, then to the strategy that `limits` names first. Raises ValueError if no plan
    fits, with the least budget that does; for an unknown strategy or a degree below 1; and if no plan is allowed.
    """
    return close_plans(costs, load, limits, factors, within=0.0)[0]


def close_plans(
    costs: LayerCosts,
    load: LayerLoad,
    limits: Limits | None = None,
    factors: Mapping[PassPlan, float] | None = None,
    within: float = CLOSE,
) -> list[Decision]:
    """Return the best plan, then different plans with scores up to the share `within` higher.

    A pass differs from those of the plans before by its strategy, by a factor of 2 in its number of chunks, or by its
    weight lag. Plans with two such passes are first, then those with one; better plans are first among them. Raises
    ValueError as `best_plan` does.
    """
    limits = limits or Limits()
    _check(limits)
    search = _Search(costs, load, limits, factors or {})
    found: list[tuple[float, int, int, int, int]] = []
    best = math.inf
    for bound, degree, backward_degree, index in search.candidates():
        if bound * (1.0 - ROUNDING) > best * (1.0 + within):
            break  # all that follow have a higher bound
        strategy = limits.strategies[index]
        backward = search.backward(strategy, backward_degree, degree == backward_degree)
        # Preparing other chunks for the backward pass only adds time: without it, this is a lower bound as well.
        bound = search.forward(strategy, degree, degree) + backward[0][0]
        if bound * (1.0 - ROUNDING) > best * (1.0 + within):
            continue
        forward = search.forward(strategy, degree, backward_degree)
        found.extend((forward + seconds, degree, backward_degree, lag, index) for seconds, lag in backward)
        best = min(best, forward + backward[0][0])
    if not found:
        raise ValueError(_why_none_fits(load, limits))
    close = sorted(each for each in found if each[0] <= best * (1.0 + within))
    plans = [Plan(degree, other, limits.strategies[index], lag) for _, degree, other, lag, index in close]
    chosen: list[Plan] = []
    known: list[PassPlan] = []
    for at_least in (2, 1):
        for plan in plans:
            new = [pass_plan for pass_plan in pass_plans(plan) if all(_differ(pass_plan, other) for other in known)]
            if len(new) >= at_least:
                chosen.append(plan)
                known.extend(new)
    return [Decision(plan, predict(costs, load, plan, limits.live_calls, limits.replica_bytes)) for plan in chosen]


def _differ(one: PassPlan, other: PassPlan) -> bool:
    if (one.name, one.memory_strategy) != (other.name, other.memory_strategy):
        return True
    return max(one.degree, other.degree) >= 2 * min(one.degree, other.degree) or one.weight_lag != other.weight_lag


class _Search:
    """The search over all plans of one load, with scores that are computed when they are first needed."""

    def __init__(self, costs: LayerCosts, load: LayerLoad, limits: Limits, factors: Mapping[PassPlan, float]) -> None:
        self.load, self.limits, self.factors = load, limits, factors
        self.degrees, self.backward_degrees = (
            allowed_degrees(each, load.tokens) for each in (limits.degrees, limits.backward_degrees)
        )
        self._chunks = {degree: ChunkSeconds(costs, load, degree) for degree in {*self.degrees, *self.backward_degrees}}
        self._lags: dict[tuple[str, int, bool], list[int]] = {}  # lags that fit the budget
        self._forward: dict[tuple[bool, bool, int, int], float] = {}
        self._backward: dict[tuple[str, int, bool], list[tuple[float, int]]] = {}

    def candidates(self) -> list[tuple[float, int, int, int]]:
        """Return (lower bound of the score, degree, backward degree, index of the strategy) of all plans that fit.

        They are sorted by their bound.
        """
        load, limits = self.load, self.limits
        least_factor = min(1.0, *self.factors.values()) if self.factors else 1.0
        result: list[tuple[float, int, int, int]] = []
        for index, name in enumerate(limits.strategies):
            strategy, left = STRATEGIES[name], math.inf
            if limits.memory_budget is not None:
                kept = limits.live_calls * footprint.kept_bytes(load, strategy)
                left = limits.memory_budget - limits.replica_bytes - kept
            forward = {
                degree: _margin(degree) * self._chunks[degree].forward_bound(strategy)
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
                    bound = self._chunks[degree].backward_bound(strategy, same)
                    backward[degree, same] = _margin(degree) * bound
            result.extend(
                (least_factor * (forward[degree] + backward[other, degree == other]), degree, other, index)
                for degree, other in itertools.product(forward, self.backward_degrees)
                if (other, degree == other) in backward
            )
        return sorted(result)

    def forward(self, name: str, degree: int, backward_degree: int) -> float:
        """Return the score of the forward pass with the strategy of this name."""
        # Strategies differ only in the tensors that they copy out.
        strategy = STRATEGIES[name]
        key = (strategy.token_rows == "offload", strategy.preactivations == "offload", degree, backward_degree)
        if key not in self._forward:
            self._forward[key] = timing.forward_of(self._chunks[degree], self._chunks[backward_degree], strategy)
        return score(self._forward[key], PassPlan("forward", degree, name), self.factors)

    def backward(self, name: str, degree: int, same: bool) -> list[tuple[float, int]]:
        """Return (score, lag) of the backward pass for each lag that fits, the best first."""
        key = name, degree, same
        if key not in self._backward:
            strategy, chunk = STRATEGIES[name], self._chunks[degree]
            seconds = [(timing.backward_of(chunk, strategy, lag, same), lag) for lag in self._lags[key]]
            self._backward[key] = sorted(
                (score(of_lag, PassPlan("backward", degree, name, lag), self.factors), lag) for of_lag, lag in seconds
            )
        return self._backward[key]


def all_plans(limits: Limits, tokens: int) -> Iterator[Plan]:
    """Yield every chunk plan within the limits, whatever memory it needs."""
    degrees, backward_degrees = (allowed_degrees(each, tokens) for each in (limits.degrees, limits.backward_degrees))
    for name, degree, other in itertools.product(limits.strategies, degrees, backward_degrees):
        if degree == other or not STRATEGIES[name].offloads:
            for lag in weight_lags(other):
                yield Plan(degree, other, name, lag)


def _why_none_fits(load: LayerLoad, limits: Limits) -> str:
    plans = list(all_plans(limits, load.tokens))
    if not plans:
        return (
            f"degrees ({limits.degrees}) and backward_degrees ({limits.backward_degrees}) must have a number of chunks "
            f"in common, as strategies ({limits.strategies}) copy the chunks of the forward pass back from the host. "
            "Try the same numbers for both."
        )
    least, plan = min(
        ((limits.replica_bytes + memory_bytes(load, plan, limits.live_calls), plan) for plan in plans),
        key=lambda pair: pair[0],
    )
    return (
        f"moe.memory_budget ({(limits.memory_budget or 0) / 2**20:.6g} MiB) is less than any allowed plan needs for "
        f"{load.tokens} tokens, {load.token_rows} rows, {load.assignments} assignments and {limits.live_calls} calls "
        f"at once: the least is {least} bytes, with memory_strategy={plan.memory_strategy}, {plan.degree} chunks "
        f"forward and {plan.backward_degree} backward. Try moe.memory_budget={math.ceil(least / 2**20 * 1000) / 1000}."
    )


def _check(limits: Limits) -> None:
    for name, degrees in (("degrees", limits.degrees), ("backward_degrees", limits.backward_degrees)):
        if not degrees or min(degrees) < 1:
            raise ValueError(
                f"{name} ({degrees}) must be one or more numbers of chunks, each at least 1. Try {DEGREES}."
            )
    unknown = [name for name in limits.strategies if name not in STRATEGIES]
    if unknown or not limits.strategies:
        raise ValueError(
            f"strategies ({limits.strategies}) must be one or more of {', '.join(STRATEGIES)}. Try ('keep',)."
        )


def total(decision: Decision, factors: Mapping[PassPlan, float] | None = None) -> float:
    """Return the sum of the scores of both passes of a decision, in seconds."""
    forward, backward = pass_plans(decision.plan)
    prediction, factors = decision.prediction, factors or {}
    return score(prediction.forward, forward, factors) + score(prediction.backward, backward, factors)


# Loads are rounded up to 1/32 of a power of two, at most 3%, so that slightly changed counts find earlier decisions.
STEPS_PER_DOUBLING = 32


class Planner:
    """The planner of one layer, which decides again whenever the load has changed (MPipeMoE's adaptive granularity).

    A decision depends on the load and on the factors of `learn`, not on earlier decisions, so ranks that plan with the
    same numbers decide alike. Loads are rounded up by at most 1/STEPS_PER_DOUBLING, and the decision for each rounded
    load is stored; a plan that fits the memory budget with the rounded load also fits with the load.
    """

    def __init__(self, costs: LayerCosts, limits: Limits | None = None) -> None:
        self.costs, self.limits = costs, limits or Limits()
        self.num_decisions = self.num_solved = 0  # calls of `decide`; those of them that ran a search
        self._decisions: dict[LayerLoad, Decision] = {}
        self._factors: dict[PassPlan, float] = {}

    def decide(self, load: LayerLoad) -> Decision:
        """Return the best plan for the rounded load, and its prediction. Raises ValueError as `best_plan` does."""
        rounded = rounded_up(load)
        decision = self._decisions.get(rounded)
        if decision is None:
            decision = self._decisions[rounded] = best_plan(self.costs, rounded, self.limits, self._factors)
            self.num_solved += 1
        self.num_decisions += 1
        return decision

    def close(self, load: LayerLoad, within: float = CLOSE) -> list[Decision]:
        """Return the best plan, then the plans that might be as fast (see `close_plans`)."""
        return close_plans(self.costs, rounded_up(load), self.limits, self._factors, within)

    def fits(self, plan: Plan, load: LayerLoad) -> bool:
        """Return whether a plan fits the memory budget with this load."""
        limits = self.limits
        return (
            limits.memory_budget is None
            or limits.replica_bytes + memory_bytes(rounded_up(load), plan, limits.live_calls) <= limits.memory_budget
        )

    def expected(self, decision: Decision) -> float:
        """Return the sum of the scores of both passes of a decision, with the factors of `learn`."""
        return total(decision, self._factors)

    def learn(self, factors: Mapping[PassPlan, float]) -> None:
        """Set each executed pass's ratio of measured to predicted time; for other passes the ratio is 1."""
        self._factors = dict(factors)
        self._decisions.clear()


def rounded_up(load: LayerLoad) -> LayerLoad:
    """Return the load with its counts rounded up, so that almost equal loads become equal."""
    rounded: dict[str, Any] = {}
    counts = "tokens", "token_rows", "away_rows", "assignments", "expert_assignments", "fetched_bytes", "returned_bytes"
    for name in counts:
        count = getattr(load, name)
        step = max((1 << max(count - 1, 1).bit_length() - 1) // STEPS_PER_DOUBLING, 1)
        rounded[name] = -(-count // step) * step
    return replace(load, **rounded)
