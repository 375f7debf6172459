"""Which of a few plans that are predicted to be about as fast is the fastest: they run in turn in a training's first
steps.

A model of costs is right to some percent, and the best plans differ by less. What decides between them is to run them;
it costs a training next to nothing, since any of them computes the same. Each pass is learned by itself, so that the
best forward pass of one plan and the best backward pass of another make the plan that stays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moe.chunk_plan import PassPlan, pass_plans
from moe.planning.costs import Decision
from moe.planning.search import CLOSE, total, unseen

LEAST = 1e-9  # seconds that a pass is predicted to take, at least
DEVIATION = 1.48  # standard deviations in a median of deviations, of the normal distribution
MEDIAN_ERROR = 1.25  # standard deviations, times the root of the number of samples

PlanChoice = tuple[str, Decision]  # of an all-to-all and a plan for it
Passes = tuple[float, float]  # seconds of the forward and the backward pass


@dataclass(frozen=True)
class TrialPolicy:
    """How much a trial tries, and what it believes."""

    most_plans: int = 6  # that are tried; 1: there is nothing to try
    within: float = CLOSE  # plans that are predicted to take up to so much longer than the best one are tried
    steps: int = 2  # that a plan runs at a time; the last one is measured
    rounds: int = 3  # in each of which all plans run, at least
    turns: int = 8  # calls of each plan that count, at least; and rounds, at most
    quiet: float = 0.01  # standard error of what was learned that is small enough to stop
    doubt: float = 1.5  # standard errors of what was learned that are taken for noise


class Trial:
    """All layers run one of the plans, then all the next one, and so on, in some rounds. What a plan takes in a round
    is compared with what all take in that round, so that a machine that becomes slower does not matter.

    A plan's first step makes its buffers (and drops those of the plan before): it should run at least two steps, of
    which the last counts.
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
        """Whether nothing is left to try."""
        return len(self._seconds) >= self._num_rounds * len(self.choices)

    @property
    def choice(self) -> PlanChoice:
        """What all layers run now."""
        return self.choices[len(self._seconds) % len(self.choices)]

    def took(self, seconds: Sequence[Passes]) -> None:
        """A plan's turn is over; `seconds` of the forward and the backward pass of a call of each layer, the same on
        all ranks."""
        self._seconds.append(list(seconds))
        if self.is_over and self._num_rounds < self.policy.turns:
            error = max(error for part in (0, 1) for _, error in self._of_pass(part).values())
            self._num_rounds += error > self.policy.quiet

    def stop(self) -> None:
        """Try no more."""
        self._num_rounds = 0

    def factors(self, kind: str) -> dict[PassPlan, float]:
        """What each pass with this all-to-all took by what was predicted, by the middle of all forward or all backward
        passes: the median of its turns, or what was expected where the difference may be noise."""
        if len(self.choices) < 2:
            return {}
        return {
            pass_plan: (1.0 + unseen(pass_plan)) * (1.0 + _beyond(off, self.policy.doubt * error))
            for part in (0, 1)
            for (of, pass_plan), (off, error) in self._of_pass(part).items()
            if of == kind
        }

    def _of_pass(self, part: int) -> dict[tuple[str, PassPlan], tuple[float, float]]:
        """By how much of what was expected each forward or each backward pass took more than their middle, and the
        standard error."""
        ratios: dict[tuple[str, PassPlan], list[float]] = {}
        for start in range(0, len(self._seconds), len(self.choices)):
            this_round = self._seconds[start : start + len(self.choices)]
            means = [
                statistics.fmean(of_plan[part] for of_plan in of_layer) for of_layer in zip(*this_round, strict=True)
            ]
            for (kind, decision), of_plan in zip(self.choices, this_round, strict=True):
                pass_plan = pass_plans(decision.plan)[part]
                expected = max((decision.prediction.forward, decision.prediction.backward)[part], LEAST) * (
                    1.0 + unseen(pass_plan)
                )
                relative = [seconds[part] / mean / expected for seconds, mean in zip(of_plan, means, strict=True)]
                ratios.setdefault((kind, pass_plan), []).extend(relative)
        factors = {key: statistics.median(of_key) for key, of_key in ratios.items()}
        middle = statistics.median(factors.values())
        deviations = sorted(abs(ratio / factors[key] - 1.0) for key, of_key in ratios.items() for ratio in of_key)
        # as many are medians, which do not deviate
        noise = DEVIATION * statistics.median(deviations[len(factors) :] or [0.0])
        return {
            key: (factors[key] / middle - 1.0, MEDIAN_ERROR * noise / math.sqrt(len(of_key)))
            for key, of_key in ratios.items()
        }


def _beyond(value: float, error: float) -> float:
    """`value`, nearer to zero by `error` but not past it."""
    return math.copysign(max(abs(value) - error, 0.0), value)
