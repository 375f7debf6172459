"""`metrics.jsonl`: one JSON object per optimizer step, each step once, floats that read back exactly."""

from __future__ import annotations

import json

from base.files import FULL, Log, WriteError, cut_steps
from training.resilience import events
from training.run import Callback, Metrics, Run


class MetricsFile(Callback):
    """Appends each step's metrics to metrics.jsonl on rank 0. A resumed run first removes the lines of steps that it
    will repeat, and logs which steps a damaged file lacks. If the disk is full while a checkpoint is being written, the
    checkpoint is cancelled; if metrics still cannot be written, the run ends."""

    follows = (
        *("StepNumbers", "GlobalAuxLoss", "MoELayers", "ExpertPlacement", "ExpertMigration", "Environment"),
        *("Evaluation", "StepTimes", "GradientNorms", "MemoryUsage", "OptimizerOffload"),
    )

    def __init__(self) -> None:
        self._log: Log | None = None
        self._waiting: list[str] = []  # lines that could not be written yet

    def on_start(self, run: Run) -> None:
        """Open metrics.jsonl, after removing the lines of steps that will be repeated. Raises WriteError."""
        if not run.is_main:
            return
        path = run.run_dir / "metrics.jsonl"
        if (line := cut_steps(path, run.progress.step)) is not None:
            events.log(run.run_dir, events.INCOMPLETE, line)
        self._log, self._waiting = Log(path), []

    def after_step(self, run: Run, metrics: Metrics) -> None:
        """Append the step's metrics. If the disk is full, cancel a checkpoint that is being written, and append them
        later. Raises WriteError."""
        if self._log is None:
            return
        self._waiting.append(json.dumps(metrics))
        try:
            self.flush()
        except WriteError as error:
            if error.errno not in FULL or not run.saver.pending:
                raise
            run.saver.cancel(f"cancelled to free disk space for {self._log.path.name}")
            if len(self._waiting) == 1:
                run.log(f"{error} The checkpoint that is being written is cancelled to free disk space")

    def flush(self) -> None:
        """Write all lines that could not be written yet. Raises WriteError."""
        while self._log is not None and self._waiting:
            self._log.write(self._waiting[0])
            del self._waiting[0]

    def sync(self) -> None:
        """Sync the written lines to the disk. Raises WriteError."""
        if (log := self._log) is not None:  # another thread may set it to None
            log.sync()

    def on_rollback(self, run: Run) -> None:
        self.close()
        self.on_start(run)

    def on_stop(self, run: Run) -> None:
        self.flush()

    on_end = on_stop

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
