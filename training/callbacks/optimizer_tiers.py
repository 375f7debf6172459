"""Optimizer state off the device: which way its buckets go, and that all ranks end where one can go on no more."""

from __future__ import annotations

import math
from collections import Counter

import torch

from optim.tiers.tiers import Tiers, tiers_of
from parallel.refusal import raise_together
from training.engine import TierError
from training.resilience import events
from training.run import Callback, Metrics, Run
from training.step import StepResult

REFIT_STEPS = 100  # between measurements of the tiers, where the ways follow from them


class OptimizerTiers(Callback):
    """Adds `optimizer_tiers`: this rank's early updates that were kept and dropped, and changes that waited for a save,
    since the start."""

    def __init__(self) -> None:
        self._tiers: Tiers | None = None

    def on_start(self, run: Run) -> None:
        tiers = self._tiers = tiers_of(run.engine.optimizer)
        if tiers is None:
            return
        device, failed = run.topology.device, tiers.problem
        run.engine.sums.register(
            "tiers", lambda: torch.full((1,), float(failed() is not None), dtype=torch.float64, device=device)
        )
        self._say_ways(run, tiers)

    def before_update(self, run: Run, result: StepResult) -> None:
        """Raises TierError on every rank where a rank's earlier update failed: its weights are old ones."""
        if self._tiers is not None and float(result.sums["tiers"]) > 0:
            raise_together(self._tiers.problem(), TierError)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        tiers = self._tiers
        if tiers is None:
            return
        metrics["optimizer_tiers"] = {
            "early_kept": tiers.num_committed,
            "early_dropped": tiers.num_dropped,
            "waits_for_save": tiers.store.waits_for_save,
        }
        flexible = tiers.memory.arrangement.flexible
        if flexible and run.progress.step % REFIT_STEPS == 0 and not run.saver.pending and not run.is_last_step:
            if tiers.choose(run.config.optimizer.engine):
                self._say_ways(run, tiers)

    def on_end(self, run: Run) -> None:
        """Raises TierError."""
        if self._tiers is not None:
            run.engine.settle()

    def _say_ways(self, run: Run, tiers: Tiers) -> None:
        if not run.is_main:
            return
        numels, arrangement = tiers.memory.arrangement.numels, tiers.memory.arrangement
        share: Counter[str] = Counter()
        for numel, tier, way in zip(numels, arrangement.tiers, tiers.ways, strict=True):
            share[f"{tier}, updated by {way}" if tier != "device" else "device"] += numel
        total = max(sum(numels), 1)
        ways = "; ".join(f"{part / total:.0%} on {where}" for where, part in share.items())
        text = f"optimizer state of rank 0 in {len(numels)} buckets: {ways}"
        if (disk := tiers.memory.disk) is not None and not disk.is_direct:
            text += f"; {disk.folder} refuses direct I/O: the page cache, which is the host's memory, is used"
        run.say(text)
        measured = {} if tiers.rates is None else vars(tiers.rates)
        rates = {name: rate for name, rate in measured.items() if math.isfinite(rate)}
        events.record(run.run_dir, "optimizer_ways", text, step=run.progress.step, ways=dict(share), rates=rates)
