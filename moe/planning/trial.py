"""Trials: plans that are predicted to be about equally fast run in turn in the first steps, and the fastest is kept.

The cost model has an error of a few percent, and the best plans differ by less, so they are tried. This costs a
training run almost nothing, because all plans compute the same result. Each pass is measured separately, so that the
final plan may combine the forward pass of one plan with the backward pass of a different plan.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moe.chunk_plan import PassPlan, pass_plans
from moe.planning.costs import Decision
from moe.planning.planner import CLOSE, total, unseen

LEAST = 1e-9  # lower bound of the predicted seconds of a pass
DEVIATION = 1.48  # standard deviation over median absolute deviation, of the normal distribution
MEDIAN_ERROR = 1.25  # standard error of a median, times the sample count's root, divided by the standard deviation

PlanChoice = tuple[str, Decision]  # name of an all-to-all, and a plan for it
Passes = tuple[float, float]  # seconds of the forward and the backward pass


@dataclass(frozen=True)
class TrialPolicy:
    """Settings for a trial of chunk plans: its length, and its tolerance for noise."""

    most_plans: int = 6  # most plans that are tried; 1: there is no trial
    within: float = CLOSE  # largest share by which the predicted time of a tried plan may exceed the best one's
    steps: int = 2  # consecutive steps of a plan; the last one is measured
    rounds: int = 3  # least number of rounds, in each of which all plans run
    turns: int = 8  # least number of measured calls of each plan, and most rounds
    quiet: float = 0.01  # standard error of the measured factors at which the trial ends
    doubt: float = 1.5  # standard errors of a measured factor that are treated as noise


class Trial:
    """A trial of chunk plans in rounds: all layers run the first plan, then the second one, and so on.

    The time of a plan in a round is compared with the mean of that round, so a machine that becomes slower does not
    distort the comparison. The first step of a plan allocates its buffers (and frees those of the plan before), so a
    plan should run at least two steps, of which the last counts.
    """

    def __init__(self, choices: Sequence[PlanChoice], num_layers: int, policy: TrialPolicy | None = None) -> None:
        self.policy = policy = policy or TrialPolicy()
        best = min(total(decision) for _, decision in choices)
        close = [choice for choice in choices if total(choice[1]) <= (1.0 + policy.within) * best]
        self.choices = sorted(close, key=lambda choice: total(choice[1]))[: policy.most_plans]
        self._num_rounds = 0 if len(self.choices) < 2 else max(policy.rounds, math.ceil(policy.turns / num_layers))
        self._seconds: list[list[Passes]] = []  # of each layer, by turn

    @property
    def is_over(self) -> bool:
        """Return whether the trial has ended or was stopped."""
        return len(self._seconds) >= self._num_rounds * len(self.choices)

    @property
    def choice(self) -> PlanChoice:
        """The all-to-all and the chunk plan that all layers use now."""
        return self.choices[len(self._seconds) % len(self.choices)]

    def took(self, seconds: Sequence[Passes]) -> None:
        """Record the measured seconds of the current plan, and switch to the next plan.

        `seconds`: the seconds of each layer's forward and backward pass in a call, which must be equal on all ranks.
        """
        self._seconds.append(list(seconds))
        if self.is_over and self._num_rounds < self.policy.turns:
            error = max(error for index in (0, 1) for _, error in self._deviations(index).values())
            self._num_rounds += error > self.policy.quiet

    def stop(self) -> None:
        """End the trial, even if it is incomplete."""
        self._num_rounds = 0

    def factors(self, kind: str) -> dict[PassPlan, float]:
        """Return a factor for each pass that ran with the all-to-all `kind`: measured divided by predicted time.

        Factors are relative to the median of all forward, or all backward, passes. Each is a median over the rounds,
        and its deviation from the expected factor is reduced by the estimated noise.
        """
        if len(self.choices) < 2:
            return {}
        return {
            # the deviation, reduced by its noise, but not beyond zero
            pass_plan: (1.0 + unseen(pass_plan))
            * (1.0 + math.copysign(max(abs(off) - self.policy.doubt * error, 0.0), off))
            for index in (0, 1)
            for (of, pass_plan), (off, error) in self._deviations(index).items()
            if of == kind
        }

    def _deviations(self, index: int) -> dict[tuple[str, PassPlan], tuple[float, float]]:
        """Return (relative deviation, standard error) by (kind of all-to-all, pass plan), of forward passes (`index` 0)
        or backward passes (1).

        The deviation compares a pass's ratio of measured to expected time with the median of this ratio over all
        passes.
        """
        ratios: dict[tuple[str, PassPlan], list[float]] = {}
        for start in range(0, len(self._seconds), len(self.choices)):
            this_round = self._seconds[start : start + len(self.choices)]
            means = [statistics.fmean(each[index] for each in of_layer) for of_layer in zip(*this_round, strict=True)]
            for (kind, decision), of_plan in zip(self.choices, this_round, strict=True):
                pass_plan = pass_plans(decision.plan)[index]
                predicted = (decision.prediction.forward, decision.prediction.backward)[index]
                expected = max(predicted, LEAST) * (1.0 + unseen(pass_plan))
                relative = [seconds[index] / mean / expected for seconds, mean in zip(of_plan, means, strict=True)]
                ratios.setdefault((kind, pass_plan), []).extend(relative)
        factors = {key: statistics.median(of_key) for key, of_key in ratios.items()}
        middle = statistics.median(factors.values())
        deviations = sorted(abs(ratio / factors[key] - 1.0) for key, of_key in ratios.items() for ratio in of_key)
        # the first entries are those of the medians themselves, which do not deviate
        noise = DEVIATION * statistics.median(deviations[len(factors) :] or [0.0])
        return {
            key: (factors[key] / middle - 1.0, MEDIAN_ERROR * noise / math.sqrt(len(of_key)))
            for key, of_key in ratios.items()
        }
