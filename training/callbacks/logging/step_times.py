"""How long steps take, by percentile: what the mean hides (stragglers, garbage collection, a slow file system)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from training.run import Callback, Metrics, Run

WINDOW = 200  # steps
PERCENTILES = (50, 95, 99)


class StepTimes(Callback):
    """Adds `step_seconds_percentiles` (p50, p95, p99) over the last WINDOW steps of this process."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def after_step(self, run: Run, metrics: Metrics) -> None:
        seconds = metrics["step_seconds"]
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        metrics["step_seconds_percentiles"] = {
            f"p{percent}": nearest_rank(self._sorted, percent) for percent in PERCENTILES
        }


def nearest_rank(ordered: list[float], percent: int) -> float:
    """The smallest value that `percent` % of the values, in ascending order, do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]
