"""What to do with a step whose loss or gradients are not finite, or whose loss leaps up: decided before the optimizer is touched.

skip: the batch is passed over, and the next one takes its step. rollback: the last good checkpoint is loaded first. stop: the run ends.
A batch once passed over stays so: its samples are on record in `run_dir/skipped_samples.json`, and every later start passes over
them too, so that the data of a step follows from the checkpoint and that file alone. (Skipping batches at a loss spike: PaLM,
Chowdhery et al. 2022, section 5.1.)
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from configs.schema import Config, ConfigError

SKIPPED = "skipped_samples.json"
WINDOW = 64  # steps whose median loss a spike is measured against
LEAST_STEPS = 8  # of them before a spike can be told from a start
MOST_IN_A_ROW = 10  # batches refused without a step between them: by then it is not the data


class UnhealthyRun(RuntimeError):
    """A step that must not be taken, in a run that shall stop for it. The message says all that is known."""


@dataclass(frozen=True)
class Refusal:
    """Why a step was refused. `kind` is the event's: nonfinite or loss_spike."""

    kind: str
    text: str


@dataclass(frozen=True)
class Skip:
    """Training samples [first, end) that no step may use."""

    first: int
    end: int
    step: int  # that would have been taken
    reason: str


class Health:
    """Judges each step by numbers that are the same on all ranks, so that all decide alike."""

    def __init__(self, config: Config):
        self._settings = config.training
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._refused_in_a_row = 0
        self._furthest = 0

    def judge(self, loss: float, finite: bool) -> Refusal | None:
        """Whether a step with this loss may be taken; `finite` tells of the gradients."""
        if not math.isfinite(loss):
            return Refusal("nonfinite", f"the loss is {loss}")
        if not finite:
            return Refusal("nonfinite", f"the gradients are not finite (the loss is {loss:.4f})")
        factor = self._settings.spike_factor
        if factor is not None and len(self._losses) >= LEAST_STEPS:
            usual = statistics.median(self._losses)
            if loss > factor * usual:
                return Refusal("loss_spike", f"the loss {loss:.4f} is {loss / usual:.2f} times the usual {usual:.4f}")
        return None

    def taken(self, loss: float, step: int) -> None:
        """A step was taken."""
        self._losses.append(loss)
        if step > self._furthest:  # steps taken again after a rollback prove nothing
            self._furthest, self._refused_in_a_row = step, 0

    def policy(self, refusal: Refusal) -> str:
        """skip, rollback or stop. The one that is configured, unless it has led nowhere."""
        self._refused_in_a_row += 1
        if self._refused_in_a_row > MOST_IN_A_ROW:
            return "stop"
        return self._settings.nonfinite if refusal.kind == "nonfinite" else self._settings.spike

    @property
    def gave_up(self) -> bool:
        return self._refused_in_a_row > MOST_IN_A_ROW


class SkippedSamples:
    """The samples that no step may use, as `run_dir` has them on record. All ranks hold the same."""

    def __init__(self, run_dir: Path, skips: Sequence[Skip] = ()):
        self._path, self._skips = run_dir / SKIPPED, list(skips)

    @classmethod
    def load(cls, run_dir: Path, *, afresh: bool) -> SkippedSamples:
        """What is on record; rank 0 reads, all hear. `afresh` takes an earlier run's away. A collective call.

        Raises ConfigError for a file that cannot be read.
        """
        answer: list[str | None] = [None, None]
        path = run_dir / SKIPPED
        if dist.get_rank() == 0 and afresh:
            path.unlink(missing_ok=True)
        if dist.get_rank() == 0 and path.exists():
            try:
                text = path.read_text()
                [Skip(**skip) for skip in json.loads(text)]
                answer[0] = text
            except (OSError, ValueError, TypeError) as error:
                answer[1] = f"{path} cannot be read ({error}). Mend it, or delete it to use all samples again."
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise ConfigError(answer[1])
        return cls(run_dir, [Skip(**skip) for skip in json.loads(answer[0])] if answer[0] else [])

    def next_position(self, position: int, count: int) -> int:
        """The first sample at or after `position` from which `count` may be used in a row."""
        for skip in sorted(self._skips, key=lambda skip: skip.first):
            if skip.first < position + count and position < skip.end:
                position = skip.end
        return position

    def count_before(self, position: int) -> int:
        """How many of the samples before `position` were passed over."""
        return sum(skip.end - skip.first for skip in self._skips if skip.end <= position)

    def add(self, skip: Skip, *, write: bool) -> None:
        """Never use these samples; one rank writes it down."""
        self._skips.append(skip)
        if write:
            temporary = self._path.with_suffix(".tmp")
            with open(temporary, "w") as stream:
                json.dump([asdict(skip) for skip in self._skips], stream, indent=1)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self._path)
