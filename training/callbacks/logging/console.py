"""Print the progress of a run: a progress bar on a terminal, lines with a time stamp elsewhere."""

from __future__ import annotations

import io
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TextIO

from tqdm import tqdm

from training.run import Callback, Metrics, Run

MAX_COLUMNS = 100  # of the bar's line, however wide the terminal is
BAR_COLUMNS = 10  # of the bar itself
REDRAW_SECONDS = 0.1
LOG_EVERY_SECONDS = 5.0
WINDOW = 50  # steps over which rates are averaged


def stamp() -> str:
    """Return the current local time as text, for the beginning of log lines."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


class Bar:
    """A progress bar on the last line of the terminal, drawn on standard error until `close`. Until then, sys.stdout
    and sys.stderr are replaced, so that everything that this process prints appears in complete lines above the bar."""

    def __init__(self, total: int, done: int):
        self._stderr, self._shown = sys.stderr, 0.0
        form = f"{{percentage:3.0f}}%|{{bar:{BAR_COLUMNS}}}| {{desc}}"
        self._bar: Any = tqdm(
            total=total, initial=done, file=self._stderr, bar_format=form, ncols=self._columns(), desc="starting"
        )
        self._streams = [_Above(sys.stdout, self._bar), _Above(sys.stderr, self._bar)]
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._streams  # type: ignore[assignment]

    def show(self, done: int, fields: Sequence[str], *, now: bool = False) -> None:
        """Draw the bar at `done` steps, followed by the first `fields` that fit on the line. Draws at most every
        REDRAW_SECONDS, unless `now` is true."""
        if not now and time.monotonic() - self._shown < REDRAW_SECONDS:
            return
        self._shown = time.monotonic()
        self._bar.n, self._bar.ncols = done, self._columns()
        self._bar.set_description_str(fitting(fields, self._bar.ncols - BAR_COLUMNS - len("100%|| ")))  # which draws

    def close(self) -> None:
        """Leave the bar on the screen, and restore sys.stdout and sys.stderr."""
        for name, stream, before in zip(("stdout", "stderr"), self._streams, self._before):
            stream.finish()
            if getattr(sys, name) is stream:  # else other code replaced it meanwhile, and removes ours
                setattr(sys, name, before)
        self._bar.close()

    def _columns(self) -> int:
        """Return the width of the bar's line: one column less than the terminal, as some terminals wrap full lines."""
        try:
            columns = os.get_terminal_size(self._stderr.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return min(MAX_COLUMNS, columns or 80) - 1


def fitting(fields: Sequence[str], columns: int) -> str:
    """Return the first fields that fit into `columns` characters, joined with " | "."""
    line = fields[0] if fields else ""
    for field in fields[1:]:
        if len(line) + len(" | ") + len(field) > columns:
            break
        line += f" | {field}"
    return line[:columns]


class _Above(io.TextIOBase):
    """A text stream that writes complete lines above a progress bar. Text after the last newline is buffered until the
    next newline."""

    def __init__(self, stream: TextIO, bar: Any):
        self._stream, self._bar, self._rest = stream, bar, ""

    def write(self, text: str) -> int:
        with self._bar.get_lock():
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            if newline:
                self._bar.clear(nolock=True)
                self._stream.write(lines + newline)
                self._stream.flush()
                self._bar.refresh(nolock=True)
        return len(text)

    def finish(self) -> None:
        """Write the buffered text, if any, followed by a newline."""
        if self._rest:
            self.write("\n")

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def __getattr__(self, name: str) -> Any:  # buffer, mode and what else a text stream has
        return getattr(self._stream, name)


class ProgressLine(Callback):
    """Prints loss, gradient norm, learning rate, tokens/s, MFU, memory and remaining time on rank 0. Rates are means
    over the last WINDOW steps. With expert placement, also prints the busiest rank's load divided by the mean load;
    with activation offload, the MiB of layer inputs on the host."""

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
        if not self._warm and self._recent:  # the first step of a process includes its start
            self._recent.clear()
            self._warm = True
        self._recent.append((metrics["tokens"], metrics["step_seconds"]))
        step, steps = metrics["step"], run.config.training.steps
        if self._bar is not None:
            fields = [f"{step:>{len(str(steps))}}/{steps}", self._eta(steps - step), *self._fields(metrics)]
            self._bar.show(step, fields, now=run.is_last_step)
            return
        now = time.monotonic()
        if now - self._last_line >= LOG_EVERY_SECONDS or run.is_last_step or step == 1:
            self._last_line = now
            run.log(" | ".join([f"{stamp()} step {step}/{steps}", *self._fields(metrics), self._eta(steps - step)]))

    def on_rollback(self, run: Run) -> None:
        if self._bar is not None:
            steps = run.config.training.steps
            self._bar.show(run.progress.step, [f"{run.progress.step}/{steps}", "went back"], now=True)

    def _eta(self, steps: int) -> str:
        seconds = round(steps * sum(seconds for _, seconds in self._recent) / len(self._recent))
        return f"eta {timedelta(seconds=seconds)}"

    def _fields(self, metrics: Metrics) -> list[str]:
        rate = sum(tokens for tokens, _ in self._recent) / sum(seconds for _, seconds in self._recent)
        fields = [
            f"loss {metrics['loss']:.4f}",
            f"{rate:,.0f} tok/s",
            f"grad {metrics['grad_norm']:.3f}",
            f"lr {metrics['learning_rate']:.2e}",
        ]
        if metrics.get("mfu") is not None:
            fields.append(f"MFU {metrics['mfu'] * rate / metrics['tokens_per_second']:.1%}")
        fields.append(f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB")
        placed, offloaded = (metrics.get(key) or {} for key in ("placement", "memory"))
        if placed.get("placed") is not None:
            fields.append(f"busiest rank {placed['placed']:.2f}x")
        if "layer_inputs_host" in offloaded:
            fields.append(f"offload {offloaded['layer_inputs_host'] / 2**20:,.0f} MiB")
        return fields

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
