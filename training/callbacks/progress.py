"""The line that people watch: a progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections import deque
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from training.run import Callback, Metrics, Run

LOG_EVERY_SECONDS = 5.0
ETA_WINDOW = 50  # steps


class Progress(Callback):
    """Shows loss, gradient norm, tokens/s, MFU, memory and time to go, on the main rank."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._last_line = 0.0
        self._seconds: deque[float] = deque(maxlen=ETA_WINDOW)

    def on_start(self, run: Run) -> None:
        if run.is_main and run.config.logging.progress and sys.stderr.isatty():
            self._bar = tqdm(total=run.config.training.steps, initial=run.progress.step, unit="step", dynamic_ncols=True)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not run.is_main or not run.config.logging.progress:
            return
        self._seconds.append(metrics["step_seconds"])
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix_str(" | ".join(self._parts(metrics)), refresh=False)
            return
        now = time.monotonic()
        if now - self._last_line >= LOG_EVERY_SECONDS or run.is_last_step or metrics["step"] == 1:
            self._last_line = now
            steps = run.config.training.steps
            eta = timedelta(seconds=round((steps - metrics["step"]) * sum(self._seconds) / len(self._seconds)))
            print(f"step {metrics['step']}/{steps} | " + " | ".join(self._parts(metrics)) + f" | eta {eta}", flush=True)

    def on_rollback(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.n = run.progress.step
            self._bar.refresh()

    def _parts(self, metrics: Metrics) -> list[str]:
        parts = [f"loss {metrics['loss']:.4f}", f"grad {metrics['grad_norm']:.3f}", f"lr {metrics['learning_rate']:.2e}"]
        if "validation_loss" in metrics:
            parts.append(f"validation {metrics['validation_loss']:.4f}")
        parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
        if metrics.get("mfu") is not None:
            parts.append(f"MFU {metrics['mfu']:.1%}")
        parts.append(f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB")
        return parts

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
