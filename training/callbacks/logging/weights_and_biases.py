"""The metrics of `metrics.jsonl` as a Weights & Biases run: online with an API key, offline without one."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from configs.schema import ConfigError
from training.callbacks.logging.background import Background
from training.report.metrics import expert_counts, scalars, texts
from training.run import Callback, Metrics, Run


class WeightsAndBiases(Callback):
    """Logs on the main rank unless `logging.wandb` is off or WANDB_MODE disabled; under the run's own id, also when it
    goes on."""

    def __init__(self) -> None:
        self._run: Any = None
        self._soon: Background | None = None

    def on_start(self, run: Run) -> None:
        mode = run.config.logging.wandb
        if not run.is_main or mode == "off":
            return
        asked = os.environ.get("WANDB_MODE")  # wandb's own variable
        if asked == "disabled":
            print(f"logging.wandb={mode}: there is no run of wandb, since WANDB_MODE is disabled", flush=True)
            return
        import wandb  # imports for a second; only where it is used

        wandb.setup(wandb.Settings(silent=True))  # its greetings, hints and warnings are not the run's
        try:
            if mode == "auto":
                has_key = asked != "offline" and wandb.login(prompt=False, verify=False)
                mode = "online" if has_key else "offline"
            self._run = self._begin(run, mode)
        except (wandb.errors.CommError, ValueError) as error:
            reason = " ".join(str(error).splitlines()[0].split()).rstrip(".")
            if run.config.logging.wandb != "auto":
                raise ConfigError(
                    f"logging.wandb (online) must reach its service: {reason}. Try logging.wandb=offline."
                ) from error
            print(f"logging.wandb=auto: its service does not answer ({reason}); the run is logged offline", flush=True)
            self._run = self._begin(run, "offline")
        self._soon = Background("wandb")

    def _begin(self, run: Run, mode: str) -> Any:
        import wandb

        return wandb.init(
            project=run.config.logging.wandb_project,
            name=run.config.name,
            id=run.facts["run"],
            dir=str(run.run_dir),
            config=asdict(run.config),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True),
        )

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._soon is not None:
            self._soon(self._log, dict(metrics))  # a copy: later callbacks may add to it

    def _log(self, metrics: Metrics) -> None:
        import wandb

        # A histogram with a bar per expert; wandb takes at most 512.
        bars = {
            name: wandb.Histogram(np_histogram=(counts, list(range(len(counts) + 1))))
            for name, counts in expert_counts(metrics).items()
            if len(counts) <= wandb.Histogram.MAX_LENGTH
        }
        self._run.log({**scalars(metrics), **texts(metrics), **bars}, step=metrics["step"])

    def close(self) -> None:
        if self._soon is None:
            return
        self._soon.close()
        with self._soon.watched():
            self._run.finish()
