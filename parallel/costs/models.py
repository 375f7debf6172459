"""Cost models: seconds as a function of a size, without torch.

A model is a straight line (startup time plus time per byte, as in PipeMoE, Shi et al., INFOCOM 2023) or, if small sizes
are slower than a line predicts, a piecewise linear curve.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Line:
    """Seconds as a linear function of a size: `alpha` + `beta` * size, but 0 for size 0, when nothing is started."""

    alpha: float
    beta: float
    r2: float = 1.0  # of the fit, on plain times

    def __call__(self, size: float) -> float:
        return self.alpha + self.beta * size if size > 0 else 0.0


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of a size: constant up to the first size, then linear between and beyond the sizes."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        i = min(bisect_left(sizes, size), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + slope * (size - sizes[i - 1])


NOTHING = Line(0.0, 0.0)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line with alpha, beta >= 0 by least squares with weights 1 / seconds^2. Raises ValueError without
    points."""
    if not sizes or len(sizes) != len(seconds):
        raise ValueError(f"A line needs at least one size and a time for each; got {len(sizes)} and {len(seconds)}.")
    weights = [1.0 / max(t, 1e-12) ** 2 for t in seconds]
    total = sum(weights)
    mean_size = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (n - mean_size) ** 2 for w, n in zip(weights, sizes, strict=True))
    together = sum(w * (n - mean_size) * (t - mean_time) for w, n, t in zip(weights, sizes, seconds, strict=True))
    beta = together / spread if spread > 0 else 0.0
    alpha = mean_time - beta * mean_size
    if beta <= 0:  # best fit without slope
        alpha, beta = mean_time, 0.0
    elif alpha < 0:  # best fit through the origin
        products = sum(w * n * t for w, n, t in zip(weights, sizes, seconds, strict=True))
        alpha, beta = 0.0, products / sum(w * n * n for w, n in zip(weights, sizes, strict=True))
    plain_mean = statistics.fmean(seconds)
    variance = sum((t - plain_mean) ** 2 for t in seconds)
    errors = sum((alpha + beta * n - t) ** 2 for n, t in zip(sizes, seconds, strict=True))
    return Line(alpha, beta, 1.0 - errors / variance if variance > 0 else 1.0)


def fit_curve(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Fit a curve to measured times, so that time never falls with size, and time per item never rises.

    So a large size never costs more than the sum of its chunks: chunks that were measured to be cheaper are a
    disturbance, or profit from a cache. Neighbouring points that contradict this get their mean time per item. Raises
    ValueError unless sizes are positive and increasing, with one time each.
    """
    if not sizes or len(sizes) != len(seconds) or any(small >= large for small, large in pairwise([0, *sizes])):
        raise ValueError(
            f"A curve needs positive, increasing sizes, and one time for each; got {list(sizes)}, {len(seconds)} times."
        )
    pools: list[tuple[float, int]] = []  # (time per item, number of points that share it), with falling times
    for size, time_of_size in zip(sizes, seconds, strict=True):
        rate, count = time_of_size / size, 1
        while pools and rate > pools[-1][0]:
            other, points = pools.pop()
            rate, count = (rate * count + other * points) / (count + points), count + points
        pools.append((rate, count))
    rates = [rate for rate, count in pools for _ in range(count)]
    rising = accumulate((rate * size for rate, size in zip(rates, sizes, strict=True)), max)
    return Curve(tuple(map(float, sizes)), tuple(rising))
