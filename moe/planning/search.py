"""The best plan of all: predictions, and an exact search.

A pass's score is what it is predicted to take, and more where the model is known to see too little. The best plan is
found by trying all whose lower bound is not beyond it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from moe.chunk_plan import STRATEGIES, LayerLoad, PassPlan, Plan, pass_plans
from moe.planning import footprint, timing
from moe.planning.costs import DEGREES, CallPrediction, Decision, LayerCosts, Limits
from moe.planning.footprint import memory_bytes
from moe.planning.timing import ChunkSeconds

# A pass in several chunks must be predicted to be faster than in one by more than this share: models and machines are
# not more exact, and nothing shall be pipelined for noise.
MARGIN = 0.02
# A backward pass in several chunks that has no weight gradients in hand when it must wait (lag 0) counts this much
# longer on top. The model's ranks never wait for each other, real ones do: 2 ranks, 500 Mbit/s, 2048 tokens, hidden
# 512, 8 experts of 512, top 2, fp32: lag 0 takes 170 ms in 2 chunks, 173 in 4, 186 in 8; lag 1 takes 148, 164, 174; the
# model sees no difference.
NO_SLACK = 0.05
CLOSE = 0.1  # plans that are predicted to take up to so much longer than the best one may be as fast
ROUNDING = 1e-9  # two sums of the same times differ by less


def predict(costs: LayerCosts, load: LayerLoad, plan: Plan, live_calls: int = 1, slot_bytes: int = 0) -> CallPrediction:
    """What a plan should take: a call's times, and the memory of `live_calls` calls and of slots for copies."""
    forward, backward = timing.forward_seconds(costs, load, plan), timing.backward_seconds(costs, load, plan)
    return CallPrediction(forward, backward, slot_bytes + memory_bytes(load, plan, live_calls))


def weight_lags(degree: int) -> list[int]:
    """The lags that are tried: weight gradients at once, or one chunk later, which fills a wait as well as any longer
    lag."""
    return list(range(min(degree, 2)))


def allowed_degrees(degrees: Sequence[int], tokens: int) -> list[int]:
    """The degrees with at least a token per chunk, else the least."""
    return [degree for degree in sorted(set(degrees)) if degree <= tokens] or [min(degrees)]


def _margin(degree: int) -> float:
    return 1.0 + MARGIN if degree > 1 else 1.0


def score(seconds: float, pass_plan: PassPlan, factors: Mapping[PassPlan, float]) -> float:
    """What is compared of a pass that is predicted to take `seconds`, where `factors` are what some took by what was
    predicted.

    In several chunks it counts MARGIN longer than it is; if it was never run, what the model does not see comes on top.
    """
    if pass_plan in factors:
        return seconds * _margin(pass_plan.degree) * factors[pass_plan]
    return seconds * (_margin(pass_plan.degree) + unseen(pass_plan))


def unseen(pass_plan: PassPlan) -> float:
    """By how much of what is predicted a pass is expected to take longer, for what the model does not see."""
    return NO_SLACK if pass_plan.name == "backward" and pass_plan.degree > 1 and pass_plan.weight_lag == 0 else 0.0


def best_plan(
    costs: LayerCosts, load: LayerLoad, limits: Limits | None = None, factors: Mapping[PassPlan, float] | None = None
) -> Decision:
    """The plan with the least sum of both passes' scores among all that fit the memory budget, exactly.

    `factors` are what some passes took by what was predicted; others are taken to take just that. Ties go to the lower
    degrees, then to the lower weight lag, then to the strategy that `limits` names first. Raises ValueError if nothing
    fits, naming the least that does; for an unknown strategy or a degree below 1; and if nothing is allowed at all.
    """
    return close_plans(costs, load, limits, factors, within=0.0)[0]


def close_plans(
    costs: LayerCosts,
    load: LayerLoad,
    limits: Limits | None = None,
    factors: Mapping[PassPlan, float] | None = None,
    within: float = CLOSE,
) -> list[Decision]:
    """The best plan, then those with scores up to `within` higher in which a pass runs in another way than in each
    before: with another strategy, with a number of chunks that differs by a factor of 2, or with another weight lag.
    Plans in which both passes do come first, and in each part the better one. Raises ValueError as `best_plan` does."""
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
        # What the forward pass prepares for other chunks backward cannot make it faster: without it, this is a bound
        # too.
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
    return [Decision(plan, predict(costs, load, plan, limits.live_calls, limits.slot_bytes)) for plan in plans]


def _different(plans: Sequence[Plan]) -> list[Plan]:
    """The plans in which both passes run in another way than in each before, then those in which one does."""
    chosen: list[Plan] = []
    known: list[PassPlan] = []
    for at_least in (2, 1):
        for plan in plans:
            new = [pass_plan for pass_plan in pass_plans(plan) if all(_differ(pass_plan, other) for other in known)]
            if len(new) >= at_least:
                chosen.append(plan)
                known.extend(new)
    return chosen


def _differ(one: PassPlan, other: PassPlan) -> bool:
    if (one.name, one.memory_strategy) != (other.name, other.memory_strategy):
        return True
    return max(one.degree, other.degree) >= 2 * min(one.degree, other.degree) or one.weight_lag != other.weight_lag


class _Search:
    """The scores of one load's plans, each computed when first asked for."""

    def __init__(self, costs: LayerCosts, load: LayerLoad, limits: Limits, factors: Mapping[PassPlan, float]) -> None:
        self.load, self.limits, self.factors = load, limits, factors
        self.degrees, self.backward_degrees = (
            allowed_degrees(each, load.tokens) for each in (limits.degrees, limits.backward_degrees)
        )
        self._chunks = {degree: ChunkSeconds(costs, load, degree) for degree in {*self.degrees, *self.backward_degrees}}
        self._lags: dict[tuple[str, int, bool], list[int]] = {}  # those that fit the budget
        self._forward: dict[tuple[bool, bool, int, int], float] = {}
        self._backward: dict[tuple[str, int, bool], list[tuple[float, int]]] = {}

    def candidates(self) -> list[tuple[float, int, int, int]]:
        """(a lower bound of the score, degree, backward degree, number of the strategy) of all that fit, by rising
        bound."""
        load, limits = self.load, self.limits
        least_factor = min(1.0, *self.factors.values()) if self.factors else 1.0
        result: list[tuple[float, int, int, int]] = []
        for index, name in enumerate(limits.strategies):
            strategy, left = STRATEGIES[name], math.inf
            if limits.memory_budget is not None:
                kept = limits.live_calls * footprint.kept_bytes(load, strategy)
                left = limits.memory_budget - limits.slot_bytes - kept
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
        """The forward pass's score with the strategy of this name."""
        # Strategies differ only in what they copy out.
        strategy = STRATEGIES[name]
        key = (strategy.rows == "offload", strategy.preactivations == "offload", degree, backward_degree)
        if key not in self._forward:
            self._forward[key] = timing.forward_of(self._chunks[degree], self._chunks[backward_degree], strategy)
        return score(self._forward[key], PassPlan("forward", degree, name), self.factors)

    def backward(self, name: str, degree: int, same: bool) -> list[tuple[float, int]]:
        """The backward pass's scores with each lag that fits, and the lag: the best first."""
        key = name, degree, same
        if key not in self._backward:
            strategy, chunk = STRATEGIES[name], self._chunks[degree]
            seconds = [(timing.backward_of(chunk, strategy, lag, same), lag) for lag in self._lags[key]]
            self._backward[key] = sorted(
                (score(of_lag, PassPlan("backward", degree, name, lag), self.factors), lag) for of_lag, lag in seconds
            )
        return self._backward[key]


def all_plans(limits: Limits, tokens: int) -> Iterator[Plan]:
    """Every plan that is allowed, whatever memory it takes."""
    degrees, backward_degrees = (allowed_degrees(each, tokens) for each in (limits.degrees, limits.backward_degrees))
    for name, degree, other in itertools.product(limits.strategies, degrees, backward_degrees):
        if degree == other or not STRATEGIES[name].offloads:
            for lag in weight_lags(other):
                yield Plan(degree, other, name, lag)


def _refusal(load: LayerLoad, limits: Limits) -> str:
    plans = list(all_plans(limits, load.tokens))
    if not plans:
        return (
            f"strategies ({limits.strategies}) bring back the forward pass's chunks, so both passes need a common "
            f"number of them; allowed are {limits.degrees} and {limits.backward_degrees}. Try the same for both."
        )
    least, plan = min(
        ((limits.slot_bytes + memory_bytes(load, plan, limits.live_calls), plan) for plan in plans),
        key=lambda pair: pair[0],
    )
    return (
        f"moe.memory_budget ({(limits.memory_budget or 0) / 2**20:.6g} MiB) is less than any allowed plan needs for "
        f"{load.tokens} tokens, {load.rows} rows, {load.assignments} assignments and {limits.live_calls} calls at "
        f"once: the least is {least} bytes, with memory_strategy={plan.memory_strategy}, {plan.degree} chunks forward "
        f"and {plan.backward_degree} backward. Try moe.memory_budget={math.ceil(least / 2**20 * 1000) / 1000}."
    )


def _check(limits: Limits) -> None:
    for name, degrees in (("degrees", limits.degrees), ("backward_degrees", limits.backward_degrees)):
        if not degrees or min(degrees) < 1:
            raise ValueError(
                f"{name} ({degrees}) must be numbers of chunks, at least one, all at least 1. Try {DEGREES}."
            )
    unknown = [name for name in limits.strategies if name not in STRATEGIES]
    if unknown or not limits.strategies:
        raise ValueError(f"strategies ({limits.strategies}) must be some of {', '.join(STRATEGIES)}. Try ('keep',).")


def total(decision: Decision, factors: Mapping[PassPlan, float] | None = None) -> float:
    """The score of both passes."""
    forward, backward = pass_plans(decision.plan)
    prediction, factors = decision.prediction, factors or {}
    return score(prediction.forward, forward, factors) + score(prediction.backward, backward, factors)
