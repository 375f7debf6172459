"""Which of a few plans that are predicted to be about as fast is the fastest: they run in turn in a training's first steps.

A model of costs is right to some percent, and the best plans differ by less. What decides between them is to run them; it costs a
training next to nothing, since any of them computes the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from moe.plan import Plan
from moe.planner import CLOSE, Decision, total

TURNS = 8  # calls of each plan that count, at least
MOST = 4  # plans

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
        self._seconds: list[list[list[float]]] = [[[] for _ in self.choices] for _ in range(num_layers)]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try."""
        return len(self.choices) < 2 or self._step >= self._last

    def choice(self, layer: int) -> Choice:
        """What a layer (counted from 0) runs in the next step."""
        return self.choices[self._index(layer)]

    def took(self, seconds: Sequence[float]) -> None:
        """The step is over; `seconds` of a call of each layer, the same on all ranks."""
        if self._step >= self._first:
            for layer, of_call in enumerate(seconds):
                self._seconds[layer][self._index(layer)].append(of_call)
        self._step += 1

    def stop(self) -> None:
        """Try no more."""
        self._last = self._step

    def factors(self, kind: str) -> dict[Plan, float]:
        """What each plan with this all-to-all took by what was predicted, by the middle of all."""
        if len(self.choices) < 2:
            return {}
        by_choice: list[list[float]] = [[] for _ in self.choices]  # of each call, by the mean of its layer's
        for of_layer in self._seconds:
            mean = statistics.fmean(seconds for of_choice in of_layer for seconds in of_choice)
            for relative, of_choice in zip(by_choice, of_layer, strict=True):
                relative.extend(seconds / mean for seconds in of_choice)
        predicted = [decision.prediction.forward + decision.prediction.backward for _, decision in self.choices]
        ratios = [statistics.median(relative) / seconds for relative, seconds in zip(by_choice, predicted, strict=True)]
        middle = statistics.median(ratios)
        return {decision.plan: ratio / middle for (of, decision), ratio in zip(self.choices, ratios, strict=True) if of == kind}

    def _index(self, layer: int) -> int:
        return (self._step + layer) % len(self.choices)
