"""The planner of an MoE layer: it finds the best chunk plan for measured costs and a load, and predicts its time.

Pure functions, without communication. The time of a plan follows from its schedule, operation by operation (timing.py),
with what a plain startup-plus-rate model leaves out: the host's work per chunk, and how much computation and
communication slow each other down. The time that whole passes take beyond that (caches that single operations find
warm, ranks that wait for each other) is added as it was measured. The score of a pass is its predicted time, plus a
margin for known gaps of the model. The search is exact: it tries every plan whose lower bound is not above the best
score. After PipeMoE (Shi et al., INFOCOM 2023) and MPipeMoE (Zhang et al., IPDPS 2023).
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
    """Predict the seconds of a call with a chunk plan, and peak bytes of `live_calls` calls plus `replica_bytes`."""
    forward, backward = timing.forward_seconds(costs, load, plan), timing.backward_seconds(costs, load, plan)
    return CallPrediction(forward, backward, replica_bytes + memory_bytes(load, plan, live_calls))


def weight_lags(degree: int) -> list[int]:
    """Return the weight lags to try: 0, and with several chunks also 1, which fills waits as well as longer lags."""
    return list(range(min(degree, 2)))


def allowed_degrees(degrees: Sequence[int], tokens: int) -> list[int]:
    """Return the degrees with at least one token per chunk, ascending; if there are none, only the least degree."""
    return [degree for degree in sorted(set(degrees)) if degree <= tokens] or [min(degrees)]


def _margin(degree: int) -> float:
    return 1.0 + MARGIN if degree > 1 else 1.0


def score(seconds: float, pass_plan: PassPlan, factors: Mapping[PassPlan, float]) -> float:
    """Return the score of a pass with a predicted time of `seconds`; a plan's score is the sum over both passes.

    `factors`: measured divided by predicted time of passes that have run. MARGIN is added for several chunks. For a
    pass that has not run, the share that the model omits is added, too (see `unseen`).
    """
    if pass_plan in factors:
        return seconds * _margin(pass_plan.degree) * factors[pass_plan]
    return seconds * (_margin(pass_plan.degree) + unseen(pass_plan))


def unseen(pass_plan: PassPlan) -> float:
    """Return the share by which a pass is expected to exceed its predicted time, because the model omits some waits."""
    return NO_SLACK if pass_plan.name == "backward" and pass_plan.degree > 1 and pass_plan.weight_lag == 0 else 0.0


def best_plan(
    costs: LayerCosts, load: LayerLoad, limits: Limits | None = None, factors: Mapping[PassPlan, float] | None = None
) -> Decision:
    """Return the plan with the least sum of both passes' scores among all that fit the memory budget.

    `factors`: measured divided by predicted time of passes that have run. Among equal scores, the lower degrees win,
    then the lower weight lag, then the strategy that `limits` names first. Raises ValueError if no plan fits (the
    message has the least sufficient budget) or none is allowed, and for an unknown strategy or a degree below 1.
    """
    return close_plans(costs, load, limits, factors, within=0.0)[0]


def close_plans(
    costs: LayerCosts,
    load: LayerLoad,
    limits: Limits | None = None,
    factors: Mapping[PassPlan, float] | None = None,
    within: float = CLOSE,
) -> list[Decision]:
    """Return the best plan, then sufficiently different plans whose scores are higher by at most the share `within`.

    Two passes are different if their strategies or weight lags differ, or their numbers of chunks differ by a factor of
    2 or more. Plans whose two passes differ from all earlier ones are first, then plans with one such pass; each kind
    is sorted by score. Raises ValueError as `best_plan` does.
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
    """A search over all chunk plans for one load; scores are computed when they are first needed."""

    def __init__(self, costs: LayerCosts, load: LayerLoad, limits: Limits, factors: Mapping[PassPlan, float]) -> None:
        self.load, self.limits, self.factors = load, limits, factors
        self.degrees = allowed_degrees(limits.degrees, load.tokens)
        self.backward_degrees = allowed_degrees(limits.backward_degrees, load.tokens)
        self._chunks = {degree: ChunkSeconds(costs, load, degree) for degree in {*self.degrees, *self.backward_degrees}}
        self._lags: dict[tuple[str, int, bool], list[int]] = {}  # lags that fit the budget
        self._forward: dict[tuple[bool, bool, int, int], float] = {}
        self._backward: dict[tuple[str, int, bool], list[tuple[float, int]]] = {}

    def candidates(self) -> list[tuple[float, int, int, int]]:
        """Return all plans that fit the memory budget, sorted by the lower bound of their score.

        A plan is (lower bound of the score, degree, backward degree, index of the strategy).
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
        """Return the score of a forward pass in `degree` chunks with the memory strategy `name`.

        The forward pass also prepares the chunks of the backward pass.
        """
        # Strategies differ only in the tensors that they copy out.
        strategy = STRATEGIES[name]
        key = (strategy.token_rows == "offload", strategy.preactivations == "offload", degree, backward_degree)
        if key not in self._forward:
            self._forward[key] = timing.forward_of(self._chunks[degree], self._chunks[backward_degree], strategy)
        return score(self._forward[key], PassPlan("forward", degree, name), self.factors)

    def backward(self, name: str, degree: int, same: bool) -> list[tuple[float, int]]:
        """Return (score, weight lag) of a backward pass for each lag that fits the memory budget, the best first."""
        key = name, degree, same
        if key not in self._backward:
            strategy, chunk = STRATEGIES[name], self._chunks[degree]
            seconds = [(timing.backward_of(chunk, strategy, lag, same), lag) for lag in self._lags[key]]
            self._backward[key] = sorted(
                (score(of_lag, PassPlan("backward", degree, name, lag), self.factors), lag) for of_lag, lag in seconds
            )
        return self._backward[key]


def all_plans(limits: Limits, tokens: int) -> Iterator[Plan]:
    """Yield every chunk plan that the limits allow, without regard to the memory budget."""
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
    plan = min(plans, key=lambda plan: memory_bytes(load, plan, limits.live_calls))
    least = limits.replica_bytes + memory_bytes(load, plan, limits.live_calls)
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
    """The planner of one layer, which chooses a chunk plan for each new load (MPipeMoE's adaptive granularity).

    A decision depends only on the load and the factors of `learn`, so ranks with equal inputs decide equally. Loads are
    rounded up by at most 1/STEPS_PER_DOUBLING, and the decision for each rounded load is stored. A plan that fits the
    memory budget with the rounded load also fits with the exact load.
    """

    def __init__(self, costs: LayerCosts, limits: Limits | None = None) -> None:
        self.costs, self.limits = costs, limits or Limits()
        self.num_decisions = self.num_solved = 0  # calls of `decide`, and those that ran a search
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
        limits, budget = self.limits, self.limits.memory_budget
        if budget is None:
            return True
        return limits.replica_bytes + memory_bytes(rounded_up(load), plan, limits.live_calls) <= budget

    def expected(self, decision: Decision) -> float:
        """Return the sum of the scores of a decision's passes, in seconds, corrected by the factors of `learn`."""
        return total(decision, self._factors)

    def learn(self, factors: Mapping[PassPlan, float]) -> None:
        """Set the ratio of measured to predicted time of each pass that has run, and drop all stored decisions."""
        self._factors = dict(factors)
        self._decisions.clear()


def rounded_up(load: LayerLoad) -> LayerLoad:
    """Return the load with its counts rounded up, so that similar loads become equal."""
    rounded: dict[str, Any] = {}
    counts = "tokens", "token_rows", "away_rows", "assignments", "expert_assignments", "fetched_bytes", "returned_bytes"
    for name in counts:
        count = getattr(load, name)
        step = max((1 << max(count - 1, 1).bit_length() - 1) // STEPS_PER_DOUBLING, 1)
        rounded[name] = -(-count // step) * step
    return replace(load, **rounded)
