"""What lies off the device: which way buckets of optimizer state go, what experts move and wait for, and that all ranks
end where one can go on no more."""

from __future__ import annotations

import math
from collections import Counter

import torch

from optim.tiers.expert_tier import ExpertTier
from optim.tiers.tiers import Tiers, tiers_of
from parallel.refusal import raise_together
from training.engine import TierError
from training.resilience import events
from training.run import Callback, Metrics, Run
from training.step import StepResult

REFIT_STEPS = 100  # between measurements of the tiers, where the ways follow from them


class OptimizerTiers(Callback):
    """Adds `optimizer_tiers`: this rank's early updates that were kept and dropped, and changes that waited for a save,
    since the start.

    With experts off the device also `expert_tiers`, this rank's: bytes of experts' weights and gradients that went `up`
    to the device and `down` from it, were `read` from the disk and `written` to it in the step, without evaluations;
    `fetched`, how often a layer's weights came, and `asked`, how often only when they were needed; `wait_seconds`, how
    long what computes waited for them; and the bytes that `weights`, `gradients` and `staging` take of host and disk.
    """

    def __init__(self) -> None:
        self._tiers: Tiers | None = None
        self._before: dict[str, float] = {}  # what experts had moved and waited when the step began

    def on_start(self, run: Run) -> None:
        tiers = self._tiers = tiers_of(run.engine.optimizer)
        if tiers is None:
            return
        device, failed = run.topology.device, tiers.problem
        run.engine.sums.register(
            "tiers", lambda: torch.full((1,), float(failed() is not None), dtype=torch.float64, device=device)
        )
        self._say_ways(run, tiers)

    def before_step(self, run: Run) -> None:
        if self._tiers is not None and self._tiers.experts is not None:
            self._before = _moved(run, self._tiers.experts)

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
        if tiers.experts is not None:
            moved = _moved(run, tiers.experts)
            metrics["expert_tiers"] = {name: value - self._before[name] for name, value in moved.items()}
            metrics["expert_tiers"] |= tiers.experts.records.by_tier
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


def _moved(run: Run, experts: ExpertTier) -> dict[str, float]:
    """What experts off the device have moved and waited for since the engine was built."""
    assert run.engine.experts is not None
    counts = run.engine.experts.counts
    counts.add_up()
    return {**experts.moved, "fetched": counts.fetched, "asked": counts.asked, "wait_seconds": counts.waited}
