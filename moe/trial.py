"""Which of a few plans that are predicted to be about as fast is the fastest: they run in turn in a training's first steps.

A model of costs is right to some percent, and the best plans differ by less. What decides between them is to run them; it costs a
training next to nothing, since any of them computes the same. Each pass is learned by itself, so that the best forward pass of one
plan and the best backward pass of another make the plan that stays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from moe.plan import Way, ways
from moe.planner import CLOSE, Decision, total

TURNS = 8  # calls of each plan that count, at least
ROUNDS = 3  # in each of which all plans run, at least
MOST = 6  # plans
LEAST = 1e-9  # seconds that a pass is predicted to take, at least
SPREAD = 0.03  # of what passes take by what is predicted, as far as is known before they run
DEVIATION = 1.48  # standard deviations in a median of deviations, of the normal distribution
MEDIAN_ERROR = 1.25  # standard deviations, times the root of the number of samples

Choice = tuple[str, Decision]  # of an all-to-all and a plan for it
Passes = tuple[float, float]  # seconds of the forward and the backward pass


class Trial:
    """All layers run one of the plans, then all the next one, and so on, in some rounds. What a plan takes in a round is compared with
    what all take in that round, so that a machine that becomes slower does not matter.

    A plan's first step makes its buffers (and drops those of the plan before): it should run at least two steps, of which the last
    counts.
    """

    def __init__(self, choices: Sequence[Choice], num_layers: int) -> None:
        best = min(total(decision) for _, decision in choices)
        close = [choice for choice in choices if total(choice[1]) <= (1.0 + CLOSE) * best]
        self.choices = sorted(close, key=lambda choice: total(choice[1]))[:MOST]
        self._turns_left = 0 if len(self.choices) < 2 else max(ROUNDS, math.ceil(TURNS / num_layers)) * len(self.choices)
        self._seconds: list[list[Passes]] = []  # of each layer, by turn

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try."""
        return self._turns_left == 0

    @property
    def choice(self) -> Choice:
        """What all layers run now."""
        return self.choices[len(self._seconds) % len(self.choices)]

    def took(self, seconds: Sequence[Passes]) -> None:
        """A plan's turn is over; `seconds` of the forward and the backward pass of a call of each layer, the same on all ranks."""
        self._seconds.append(list(seconds))
        self._turns_left -= 1

    def stop(self) -> None:
        """Try no more."""
        self._turns_left = 0

    def factors(self, kind: str) -> dict[Way, float]:
        """What each pass with this all-to-all took by what was predicted, by the middle of all forward or all backward passes: the median
        of its turns, believed as far as their noise allows."""
        if len(self.choices) < 2:
            return {}
        return {way: factor for part in (0, 1) for (of, way), factor in self._of_pass(part).items() if of == kind}

    def _of_pass(self, part: int) -> dict[tuple[str, Way], float]:
        ratios: dict[tuple[str, Way], list[float]] = {}
        for start in range(0, len(self._seconds), len(self.choices)):
            this_round = self._seconds[start : start + len(self.choices)]
            means = [statistics.fmean(of_plan[part] for of_plan in of_layer) for of_layer in zip(*this_round, strict=True)]
            for (kind, decision), of_plan in zip(self.choices, this_round, strict=True):
                predicted = max((decision.prediction.forward, decision.prediction.backward)[part], LEAST)
                relative = [seconds[part] / mean / predicted for seconds, mean in zip(of_plan, means, strict=True)]
                ratios.setdefault((kind, ways(decision.plan)[part]), []).extend(relative)
        factors = {key: statistics.median(of_key) for key, of_key in ratios.items()}
        middle = statistics.median(factors.values())
        off = sorted(abs(ratio / factors[key] - 1.0) for key, of_key in ratios.items() for ratio in of_key)
        noise = DEVIATION * statistics.median(off[len(factors) :] or [0.0])  # as many as there are medians are off by nothing
        errors = {key: MEDIAN_ERROR * noise / math.sqrt(len(of_key)) for key, of_key in ratios.items()}
        believed = {key: SPREAD**2 / (SPREAD**2 + error**2) for key, error in errors.items()}
        return {key: 1.0 + believed[key] * (factor / middle - 1.0) for key, factor in factors.items()}
