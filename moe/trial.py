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
MOST = 6  # plans
LEAST = 1e-9  # seconds that a pass is predicted to take, at least

Choice = tuple[str, Decision]  # of an all-to-all and a plan for it


class Trial:
    """In each step every layer runs one of the plans, the next layer another one, and in the next step each another one: so in as many
    steps as there are plans each layer runs each of them. The first steps, in which every plan makes its buffers, do not count."""

    def __init__(self, choices: Sequence[Choice], num_layers: int) -> None:
        best = min(total(decision) for _, decision in choices)
        close = [choice for choice in choices if total(choice[1]) <= (1.0 + CLOSE) * best]
        self.choices, self._step = sorted(close, key=lambda choice: total(choice[1]))[:MOST], 0
        self._first = math.ceil(len(self.choices) / num_layers)  # that counts
        self._last = self._first + math.ceil(TURNS / num_layers) * len(self.choices)
        self._seconds: list[list[list[tuple[float, float]]]] = [[[] for _ in self.choices] for _ in range(num_layers)]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try."""
        return len(self.choices) < 2 or self._step >= self._last

    def choice(self, layer: int) -> Choice:
        """What a layer (counted from 0) runs in the next step."""
        return self.choices[self._index(layer)]

    def took(self, seconds: Sequence[tuple[float, float]]) -> None:
        """The step is over; `seconds` of the forward and the backward pass of a call of each layer, the same on all ranks."""
        if self._step >= self._first:
            for layer, of_call in enumerate(seconds):
                self._seconds[layer][self._index(layer)].append(of_call)
        self._step += 1

    def stop(self) -> None:
        """Try no more."""
        self._last = self._step

    def factors(self, kind: str) -> dict[Way, float]:
        """What each pass with this all-to-all took by what was predicted, by the middle of all forward or all backward passes."""
        if len(self.choices) < 2:
            return {}
        return {way: factor for part in (0, 1) for (of, way), factor in self._of_pass(part).items() if of == kind}

    def _of_pass(self, part: int) -> dict[tuple[str, Way], float]:
        ratios: dict[tuple[str, Way], list[float]] = {}
        for of_layer in self._seconds:
            mean = statistics.fmean(of_call[part] for of_choice in of_layer for of_call in of_choice)
            for (kind, decision), of_choice in zip(self.choices, of_layer, strict=True):
                predicted = max((decision.prediction.forward, decision.prediction.backward)[part], LEAST)
                relative = [of_call[part] / mean / predicted for of_call in of_choice]
                ratios.setdefault((kind, ways(decision.plan)[part]), []).extend(relative)
        factors = {key: statistics.median(of_key) for key, of_key in ratios.items()}
        middle = statistics.median(factors.values())
        return {key: factor / middle for key, factor in factors.items()}

    def _index(self, layer: int) -> int:
        return (self._step + layer) % len(self.choices)
