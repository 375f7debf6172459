"""`metrics.jsonl`: one JSON object per optimizer step, each step once, floats that read back exactly."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TextIO

from training import events
from training.run import Callback, Metrics, Run


class MetricsFile(Callback):
    """Appends each step's metrics on the main rank; a resumed run first drops the lines of steps that it will take again."""

    def __init__(self) -> None:
        self._stream: TextIO | None = None

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        self._path = path = run.run_dir / "metrics.jsonl"
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    step = json.loads(line)["step"]
                except (ValueError, KeyError, TypeError):
                    continue  # the end of a line that a kill cut off
                if step <= run.progress.step:
                    kept.append(line + "\n")
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, path)
        self._stream = open(path, "a")

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._stream is not None:
            with events.writing(self._path):
                self._stream.write(json.dumps(metrics) + "\n")
                self._stream.flush()

    def on_rollback(self, run: Run) -> None:
        self.close()
        self.on_start(run)

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # a line that could not be written was reported then
                self._stream.close()
