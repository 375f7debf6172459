"""Add numbers that are derived from a step to its metrics: model FLOPs utilisation (MFU), the experts' loads,
percentiles of the step time, and gradient norms of the model's components."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from configs import derived
from simulator.flops import training_flops_per_token
from training.report.metrics import expert_load, peak_flops
from training.run import Callback, Metrics, Run

WINDOW = 200  # last steps whose times the percentiles summarize
PERCENTILES = (50, 95, 99)


class StepNumbers(Callback):
    """Adds `mfu` (model FLOPs utilization) if the device's peak is known, `attended_share` (share of token pairs that
    attention uses) for separate documents, and `tokens_per_expert` for MoE models."""

    def on_start(self, run: Run) -> None:
        # FLOPs per token are linear in the share of attended token pairs, which separate documents change in each step.
        nothing, everything = (training_flops_per_token(run.config, run.vocab_size, share) for share in (0.0, 1.0))
        self._flops_without_pairs, self._flops_of_pairs = nothing, everything - nothing
        self._share = derived.attended_share(run.config)
        self._peak_flops = peak_flops(run.config, run.topology.device)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None
        share = run.result.attended_share
        if share is not None:
            metrics["attended_share"] = share
        if self._peak_flops is not None:
            flops = self._flops_without_pairs + self._flops_of_pairs * (self._share if share is None else share)
            metrics["mfu"] = flops * metrics["tokens_per_second"] / (self._peak_flops * run.topology.world_size)
        if run.result.tokens_per_expert is not None:
            metrics["tokens_per_expert"] = expert_load(run.result.tokens_per_expert)


class StepTimes(Callback):
    """Adds `step_seconds_percentiles` (p50, p95, p99) over this process's last WINDOW steps. They show effects that a
    mean hides, such as stragglers, garbage collection and a slow file system."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def after_step(self, run: Run, metrics: Metrics) -> None:
        seconds = metrics["step_seconds"]
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        percentiles = {f"p{percent}": nearest_rank(self._sorted, percent) for percent in PERCENTILES}
        metrics["step_seconds_percentiles"] = percentiles


def nearest_rank(ordered: list[float], percent: int) -> float:
    """Return the percentile `percent` of values in ascending order by the nearest-rank method: the smallest value that
    at least `percent` % of the values do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


class GradientNorms(Callback):
    """Adds `grad_norm_by_part`: the gradient norm before clipping of each model component, such as embedding,
    attention, experts and router. The squares of these norms add up to the square of `grad_norm`."""

    def after_step(self, run: Run, metrics: Metrics) -> None:
        # A step whose gradients overflowed (fp16) is skipped before its norm is known.
        metrics["grad_norm_by_part"] = run.engine.norms.by_component if metrics["updated"] else {}
