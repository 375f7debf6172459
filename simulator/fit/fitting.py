"""Figures of a hardware from measured steps: the most probable ones, where what sources state is the first guess.

Each figure that a fit may change is free by a factor (its prior), all errors of predictions count by their share, and
those far off count less (Huber), as a step that swapped or was disturbed says nothing of the rest. So a few rows change
a few figures, and many rows all of them. Steps on as many ranks are off alike: four times as many count twice as much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from configs.schema import ConfigError
from simulator.clock.hardware import FIGURES, Hardware
from simulator.clock.predict import StepClock
from simulator.fit.rows import MeasuredStep

NOISE = 0.06  # share of a step by which a prediction is off for what no figure explains
FAR = 1.0  # times that: from here errors count by their size, not its square
RATE_PRIOR, TIME_PRIOR = 0.5, 1.0  # how far figures may lie from what is stated: standard deviations of the logarithm
ITERATIONS = 25
LEAST_GAIN = 1e-3  # of the cost, below which it is settled
SAME = 1e-6  # of a logarithm: a figure that no step says anything of
NUDGE = 1e-2  # of a logarithm, to see what a figure changes


def predicted(step: MeasuredStep, hardware: Hardware) -> float:
    """Seconds of a measured step as the clock has them."""
    clock = StepClock(step.config, step.world_size, step.vocab_size, step.on(hardware), recipe=step.recipe)
    return clock.predict().seconds


def fit(hardware: Hardware, steps: Sequence[MeasuredStep], source: str) -> Hardware:
    """The hardware with figures that explain the steps. A fit begins with what was stated, not with an earlier fit.

    Raises ConfigError without steps.
    """
    if not steps:
        raise ConfigError("a fit needs at least one measured step; there is none.")
    start = hardware.as_stated()
    names = [name for name, (_, _, may_change) in FIGURES.items() if may_change and start[name] > 0]
    measured = np.log([step.seconds for step in steps])
    of_ranks = Counter(step.world_size for step in steps)
    counts = np.array([of_ranks[step.world_size] ** -0.5 for step in steps])
    counts *= len(steps) / counts.sum()
    first = np.log([start[name] for name in names])
    prior = np.array([TIME_PRIOR if FIGURES[name][0] == "s" else RATE_PRIOR for name in names])

    def machine(values: np.ndarray) -> Hardware:
        return start.with_values(dict(zip(names, np.exp(values).tolist(), strict=True)), source)

    def log_seconds(values: np.ndarray) -> np.ndarray:
        hardware = machine(values)
        return np.log([predicted(step, hardware) for step in steps])

    def cost(values: np.ndarray, error: np.ndarray) -> float:
        size = np.abs(error) / NOISE
        far = np.where(size < FAR, size**2 / 2, FAR * (size - FAR / 2))
        return float(counts @ far + (((values - first) / prior) ** 2).sum() / 2)

    values, now = first.copy(), log_seconds(first)
    best, damping = cost(values, now - measured), 1e-2
    free = np.arange(len(names))
    for _ in range(ITERATIONS):
        slopes = np.zeros((len(steps), len(names)))
        for index in free:
            nudged = values.copy()
            nudged[index] += NUDGE
            slopes[:, index] = (log_seconds(nudged) - now) / NUDGE
        free = np.flatnonzero(np.abs(slopes).max(0) > 0)  # what changes nothing here is not asked again
        error = (now - measured) / NOISE
        weights = counts * np.minimum(1.0, FAR / np.maximum(np.abs(error), 1e-9))
        curvature = (slopes.T * weights) @ slopes / NOISE**2 + np.diag(1 / prior**2)
        gradient = (slopes.T * weights) @ error / NOISE + (values - first) / prior**2
        before = best
        for _ in range(8):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            tried = values + step
            seconds = log_seconds(tried)
            if (tried_cost := cost(tried, seconds - measured)) < best:
                values, now, best, damping = tried, seconds, tried_cost, max(damping / 5, 1e-7)
                break
            damping *= 5
        if before - best <= LEAST_GAIN * best:
            break
    changed = np.abs(values - first) > SAME
    found = {name: math.exp(value) for name, value, new in zip(names, values, changed, strict=True) if new}
    return start.with_values(found, source)


def mean_error(steps: Sequence[MeasuredStep], hardware: Hardware) -> float:
    """Mean absolute error of the predicted seconds, in percent."""
    return 100 * sum(abs(predicted(step, hardware) / step.seconds - 1) for step in steps) / len(steps)


def kendall(measured: Sequence[float], predicted_seconds: Sequence[float]) -> float:
    """Kendall's tau-b: pairs that both order alike, less those that they order otherwise, over pairs without ties."""
    pairs = agree = ties_a = ties_b = 0
    for i, (a, x) in enumerate(zip(measured, predicted_seconds, strict=True)):
        for b, y in zip(measured[:i], predicted_seconds[:i], strict=True):
            first, second = (a > b) - (a < b), (x > y) - (x < y)
            pairs += 1
            agree += first * second
            ties_a += first == 0
            ties_b += second == 0
    below = math.sqrt((pairs - ties_a) * (pairs - ties_b))
    return agree / below if below else 1.0
