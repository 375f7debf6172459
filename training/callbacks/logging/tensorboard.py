"""The metrics of `metrics.jsonl` for TensorBoard, under `run_dir/tensorboard`: scalars, and a histogram of each layer's
experts."""

from __future__ import annotations

from typing import Any

from training.callbacks.logging.background import Background
from training.report.metrics import expert_counts, scalars, texts
from training.run import Callback, Metrics, Run


class TensorBoard(Callback):
    """Writes on the main rank when `logging.tensorboard` is true; a resumed run hides the steps that it takes again."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._soon: Background | None = None
        self._texts: dict[str, str] = {}

    def on_start(self, run: Run) -> None:
        if run.is_main and run.config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imports for a second; only where it is used

            self._soon = Background("tensorboard")
            with self._soon.watched():
                self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.progress.step + 1)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._soon is not None:
            self._soon(self._log, dict(metrics))  # a copy: later callbacks may add to it

    def _log(self, metrics: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One record for the whole step: a record for each number costs ten times as much.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(metrics).items()]
        values += [_histogram(name, counts) for name, counts in expert_counts(metrics).items()]
        self._writer.file_writer.add_summary(Summary(value=values), metrics["step"])
        for name, text in texts(metrics).items():
            if self._texts.get(name) != text:
                self._texts[name] = text
                self._writer.add_text(name, text, metrics["step"])

    def on_rollback(self, run: Run) -> None:
        self.close()
        self.on_start(run)

    def close(self) -> None:
        if self._soon is None:
            return
        self._soon.close()
        if self._writer is not None:
            with self._soon.watched():
                self._writer.close()


def _histogram(name: str, counts: list[int]) -> Any:
    """A bar per expert, from its number to the next."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    total = sum(counts)
    histogram = HistogramProto(
        min=0.0,
        max=float(len(counts)),
        num=float(total),
        sum=float(sum(i * count for i, count in enumerate(counts))),
        sum_squares=float(sum(i * i * count for i, count in enumerate(counts))),
        bucket_limit=[float(i + 1) for i in range(len(counts))],
        bucket=[float(count) for count in counts],
    )
    return Summary.Value(tag=name, histo=histogram)
