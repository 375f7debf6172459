"""Callback for offloaded optimizer state and experts: logs where the state is updated, reports transfers and waits, and
ends all ranks if an update failed."""

from __future__ import annotations

import math
from collections import Counter

import torch

from optim.offload.experts import OffloadedExperts
from optim.offload.optimizer import OffloadedOptimizer, offload_of
from parallel.joint_errors import raise_together
from training.engine import OffloadError
from training.run import Callback, Metrics, Run
from training.step import StepResult

REFIT_STEPS = 100  # between choices of the update engines by measured bandwidths


class OptimizerOffload(Callback):
    """Adds `optimizer_tiers`, counts of optimizer updates on this rank since the start: updates that began before their
    step was known to be good, and were kept or dropped; and updates that waited for a checkpoint to be written.

    With offloaded experts, also adds `expert_tiers`, this rank's transfers in the step, without evaluations. Bytes of
    experts' weights and gradients: copied to the device (`up`), copied from the device (`down`), `read` from disk,
    `written` to disk. `fetched`: fetches of a layer's weights; `asked`: fetches that started only when the weights were
    needed; `wait_seconds`: time that computation waited for fetches. Also the bytes of `weights`, `gradients` and
    `staging` buffers on host and disk.
    """

    def __init__(self) -> None:
        self._offload: OffloadedOptimizer | None = None
        self._before: dict[str, float] = {}  # the experts' traffic and waits before the step

    def on_start(self, run: Run) -> None:
        offload = self._offload = offload_of(run.engine.optimizer)
        if offload is None:
            return
        device, failed = run.topology.device, offload.problem
        run.engine.sums.register(
            "tiers", lambda: torch.full((1,), float(failed() is not None), dtype=torch.float64, device=device)
        )
        self._log_engines(run, offload)

    def before_step(self, run: Run) -> None:
        if self._offload is not None and self._offload.experts is not None:
            self._before = _moved(run, self._offload.experts)

    def before_update(self, run: Run, result: StepResult) -> None:
        """Raise OffloadError on every rank if an earlier update failed on any rank, because the weights there are then
        out of date."""
        if self._offload is not None and float(result.sums["tiers"]) > 0:
            raise_together(self._offload.problem(), OffloadError)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        offload = self._offload
        if offload is None:
            return
        metrics["optimizer_tiers"] = {
            "early_kept": offload.num_committed,
            "early_dropped": offload.num_dropped,
            "waits_for_save": offload.memory.store.waits_for_save,
        }
        if offload.experts is not None:
            moved = _moved(run, offload.experts)
            metrics["expert_tiers"] = {name: value - self._before[name] for name, value in moved.items()}
            metrics["expert_tiers"] |= offload.experts.records.bytes_by_target
        refits = offload.memory.arrangement.flexible and run.progress.step % REFIT_STEPS == 0
        if refits and not run.saver.pending and not run.is_last_step and offload.choose(run.config.optimizer.engine):
            self._log_engines(run, offload)

    def on_end(self, run: Run) -> None:
        """Wait until all weights are updated. Raises OffloadError if an update failed."""
        if self._offload is not None:
            run.engine.synchronize()

    def _log_engines(self, run: Run, offload: OffloadedOptimizer) -> None:
        arrangement = offload.memory.arrangement
        share: Counter[str] = Counter()
        for numel, target, engine in zip(arrangement.numels, arrangement.targets, offload.engines, strict=True):
            share[f"{target}, updated by {engine}" if target != "device" else "device"] += numel
        total = max(sum(arrangement.numels), 1)
        shares = "; ".join(f"{numel / total:.0%} on {where}" for where, numel in share.items())
        text = f"optimizer state of rank 0 in {len(arrangement.numels)} buckets: {shares}"
        if (disk := offload.memory.disk) is not None and not disk.is_direct:
            text += f"; {disk.folder} does not support direct I/O, so the page cache takes host memory"
        measured = {} if offload.rates is None else vars(offload.rates)
        rates = {name: rate for name, rate in measured.items() if math.isfinite(rate)}
        run.log_event("optimizer_ways", text, ways=dict(share), rates=rates)


def _moved(run: Run, experts: OffloadedExperts) -> dict[str, float]:
    """Return the totals of offloaded experts since the engine was built: bytes transferred, fetches, and seconds
    waited."""
    assert run.engine.experts is not None
    counts = run.engine.experts.counts
    counts.add_up()
    return {**experts.moved, "fetched": counts.fetched, "asked": counts.asked, "wait_seconds": counts.waited}
