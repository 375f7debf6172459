"""What people watch: a progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections import deque
from datetime import timedelta

from training.callbacks.logging.console import Bar, stamp
from training.run import Callback, Metrics, Run

LOG_EVERY_SECONDS = 5.0
WINDOW = 50  # steps that rates are means over


class ProgressLine(Callback):
    """Shows loss, gradient norm, tokens/s, MFU, memory and time to go, on the main rank. Rates are means over the last
    WINDOW steps. Where experts are placed: the busiest rank's load by the mean rank's; with activation offload, what
    the host keeps of layer inputs."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._last_line = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens and seconds of a step
        self._warm = False

    def on_start(self, run: Run) -> None:
        if run.is_main and run.config.logging.progress and sys.stderr.isatty():
            self._bar = Bar(run.config.training.steps, run.progress.step)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not run.is_main or not run.config.logging.progress:
            return
        if not self._warm and self._recent:  # a process's first step has its start in it
            self._recent.clear()
            self._warm = True
        self._recent.append((metrics["tokens"], metrics["step_seconds"]))
        step, steps = metrics["step"], run.config.training.steps
        if self._bar is not None:
            self._bar.show(
                step,
                [f"{step:>{len(str(steps))}}/{steps}", f"eta {self._time_to_go(steps - step)}", *self._parts(metrics)],
                now=run.is_last_step,
            )
            return
        now = time.monotonic()
        if now - self._last_line >= LOG_EVERY_SECONDS or run.is_last_step or step == 1:
            self._last_line = now
            run.say(
                f"{stamp()} step {step}/{steps} | "
                + " | ".join(self._parts(metrics))
                + f" | eta {self._time_to_go(steps - step)}"
            )

    def on_rollback(self, run: Run) -> None:
        if self._bar is not None:
            steps = run.config.training.steps
            self._bar.show(run.progress.step, [f"{run.progress.step}/{steps}", "went back"], now=True)

    def _time_to_go(self, steps: int) -> timedelta:
        return timedelta(seconds=round(steps * sum(seconds for _, seconds in self._recent) / len(self._recent)))

    def _parts(self, metrics: Metrics) -> list[str]:
        rate = sum(tokens for tokens, _ in self._recent) / sum(seconds for _, seconds in self._recent)
        parts = [
            f"loss {metrics['loss']:.4f}",
            f"{rate:,.0f} tok/s",
            f"grad {metrics['grad_norm']:.3f}",
            f"lr {metrics['learning_rate']:.2e}",
        ]
        if metrics.get("mfu") is not None:
            parts.append(f"MFU {metrics['mfu'] * rate / metrics['tokens_per_second']:.1%}")
        parts.append(f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB")
        placed, offloaded = (metrics.get(key) or {} for key in ("placement", "memory"))
        if placed.get("placed") is not None:
            parts.append(f"busiest rank {placed['placed']:.2f}x")
        if "layer_inputs_host" in offloaded:
            parts.append(f"offload {offloaded['layer_inputs_host'] / 2**20:,.0f} MiB")
        return parts

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
