"""End a run between two steps, after saving a checkpoint, on a signal or at its time limit; all ranks stop after the
same step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from checkpoint import record
from configs import derived
from memory.transfer import to_device
from training import status
from training.resilience import events, launcher
from training.resilience.signals import ASKING, StopSignals
from training.run import Callback, Metrics, Run

TIME_LIMIT = "training.time_limit_minutes is reached"
REASONS = [*(f"a {signum.name}" for signum in ASKING), TIME_LIMIT]


class EarlyStop(Callback):
    """Sets `run.stop_reason` on all ranks as soon as any rank has a reason to stop. The reasons share the all-reduce of
    the loss. `save_now` writes a checkpoint of the current state. `signals` collects received signals; it is None if
    this process also runs other code."""

    follows = ("Evaluation", "Checkpoints")

    def __init__(self, save_now: Callable[[Run], None], signals: StopSignals | None = None):
        self._save_now, self._signals = save_now, signals

    def on_start(self, run: Run) -> None:
        limit, now = run.config.training.time_limit_minutes, time.time()
        # The limit counts from the launch: ranks that torchrun started again have no more time than the first ones.
        started = launcher.first_start(now)
        self._end = None if limit is None else time.monotonic() + 60.0 * limit - (now - started)
        run.engine.sums.register(
            "early_stop", lambda: to_device(torch.tensor(self._votes(), dtype=torch.float64), run.topology.device)
        )
        if run.is_main:
            who = {"run": run.facts.get("run"), **record.this_process()}
            fields = {"steps": run.config.training.steps, "started": started, **who}
            status.write(run.run_dir, "running", run.progress.step, "running", **fields)
        if self._signals is not None:
            self._signals.install()

    def _votes(self) -> list[float]:
        received = self._signals.received if self._signals is not None else []
        is_over = self._end is not None and time.monotonic() >= self._end
        return [*(float(signum in received) for signum in ASKING), float(is_over)]

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None
        votes = run.result.sums["early_stop"].tolist()
        reasons = [reason for reason, count in zip(REASONS, votes) if count > 0]
        run.stop_reason = " and ".join(reasons) or None

    def on_stop(self, run: Run) -> None:
        step, may_save = run.progress.step, derived.may_save(run.config)
        end = "NOTHING WAS SAVED: checkpoint.interval=0 and checkpoint.at_end=false allow no checkpoint"
        if may_save:
            self._save_now(run)
            end = "Start it again to continue"
        text = f"stopped early after step {step} of {run.config.training.steps}: {run.stop_reason}. {end}"
        launcher.note_stop()
        if run.is_main:
            events.record(run.run_dir, "stopped_early", text, step=step, saved=may_save)
            status.write(run.run_dir, "stopped_early", step, text, steps=run.config.training.steps, saved=may_save)
        run.log(text)

    def on_end(self, run: Run) -> None:
        if run.is_main:
            text = f"all {run.progress.step} steps are done"
            events.record(run.run_dir, "finished", text, step=run.progress.step)
            status.write(run.run_dir, "finished", run.progress.step, text, steps=run.config.training.steps)

    def close(self) -> None:
        if self._signals is not None:
            self._signals.restore(ignore=True)
