"""The metrics of `metrics.jsonl` as TensorBoard scalars under `run_dir/tensorboard`."""

from __future__ import annotations

from typing import Any

from training.metrics import scalars
from training.run import Callback, Metrics, Run


class TensorBoard(Callback):
    """Writes on the main rank when `logging.tensorboard` is true; a resumed run hides the steps that it takes again."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, run: Run) -> None:
        if run.is_main and run.config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imports for a second; only where it is used

            self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.progress.step + 1)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._writer is not None:
            for name, value in scalars(metrics).items():
                self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
