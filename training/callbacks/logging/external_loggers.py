"""Send the metrics to TensorBoard and Weights & Biases. Each logger runs in a separate thread, so that a slow service
does not delay the step."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from base.errors import ConfigError
from training.report.metrics import expert_counts, scalars, texts
from training.run import Callback, Metrics, Run

MAX_WAITING_CALLS = 64  # queued calls beyond which the caller waits, so that the queue's memory stays small
CALL_SECONDS = 120.0  # after which a call counts as failed


class Background:
    """Runs the calls of one logger in a thread, in order. A logger must not end the run, so its first error is printed
    and stops further calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._calls: deque[Future[Any]] = deque()
        self.failed = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        """Queue a call, unless an earlier call failed or hangs."""
        with self.watched():
            while self._calls and (self._calls[0].done() or len(self._calls) >= MAX_WAITING_CALLS):
                self._calls.popleft().result(timeout=CALL_SECONDS)
            if not self.failed:
                self._calls.append(self._thread.submit(function, *args))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context for using the logger in the caller's thread. An error in the context is handled like an
        error of a queued call."""
        try:
            yield
        except Exception as error:  # of any kind: of the service, or of the disk
            if not self.failed:
                cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
                line = f"{self._name}: nothing more is logged there, because of {cause}"
                print(line, file=sys.stderr, flush=True)
            self.failed = True
            self._calls.clear()

    def close(self) -> None:
        """Wait until all queued calls have ended."""
        with self.watched():
            while self._calls:
                self._calls.popleft().result(timeout=CALL_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)


class TensorBoard(Callback):
    """Writes scalars and a histogram of each layer's tokens per expert to `run_dir/tensorboard`, on rank 0 if
    `logging.tensorboard` is true. A resumed run hides the old values of steps that it repeats."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._background: Background | None = None
        self._texts: dict[str, str] = {}

    def on_start(self, run: Run) -> None:
        if run.is_main and run.config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imports for a second; only where it is used

            self._background = Background("tensorboard")
            with self._background.watched():
                self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.progress.step + 1)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._background is not None:
            self._background(self._log, dict(metrics))  # a copy: later callbacks may add to it

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
        if self._background is None:
            return
        self._background.close()
        if self._writer is not None:
            with self._background.watched():
                self._writer.close()


def _histogram(name: str, counts: list[int]) -> Any:
    """Return a TensorBoard histogram with one bar per expert, from the expert's number to the next number."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    histogram = HistogramProto(
        min=0.0,
        max=float(len(counts)),
        num=float(sum(counts)),
        sum=float(sum(i * count for i, count in enumerate(counts))),
        sum_squares=float(sum(i * i * count for i, count in enumerate(counts))),
        bucket_limit=[float(i + 1) for i in range(len(counts))],
        bucket=[float(count) for count in counts],
    )
    return Summary.Value(tag=name, histo=histogram)


class WeightsAndBiases(Callback):
    """Logs the metrics to Weights & Biases on rank 0, unless `logging.wandb` is off or WANDB_MODE is disabled.
    `logging.wandb=auto` means online if there is an API key, else offline. A resumed run keeps its id at Weights &
    Biases."""

    def __init__(self) -> None:
        self._run: Any = None
        self._background: Background | None = None

    def on_start(self, run: Run) -> None:
        mode = run.config.logging.wandb
        if not run.is_main or mode == "off":
            return
        asked = os.environ.get("WANDB_MODE")  # wandb's own variable
        if asked == "disabled":
            print(f"logging.wandb={mode}: nothing is logged to wandb, because WANDB_MODE is disabled", flush=True)
            return
        import wandb  # imports for a second; only where it is used

        wandb.setup(wandb.Settings(silent=True))  # without wandb's greetings, hints and warnings
        try:
            if mode == "auto":
                has_key = asked != "offline" and wandb.login(prompt=False, verify=False)
                mode = "online" if has_key else "offline"
            self._run = self._begin(run, mode)
        except (wandb.errors.CommError, ValueError) as error:
            reason = " ".join(str(error).splitlines()[0].split()).rstrip(".")
            if run.config.logging.wandb != "auto":
                raise ConfigError(
                    f"logging.wandb (online) needs the wandb service, which is not reachable: {reason}. Try "
                    "logging.wandb=offline."
                ) from error
            line = f"logging.wandb=auto: the wandb service does not answer ({reason}); the run is logged offline"
            print(line, flush=True)
            self._run = self._begin(run, "offline")
        self._background = Background("wandb")

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
        if self._background is not None:
            self._background(self._log, dict(metrics))  # a copy: later callbacks may add to it

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
        if self._background is None:
            return
        self._background.close()
        with self._background.watched():
            self._run.finish()
