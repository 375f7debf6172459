"""Step validation: before the optimizer changes anything, reject steps without predicted tokens, with non-finite loss
or gradients, or with a spike of the loss.

The policy for a rejected step is skip (the batch is skipped, and the next batch takes its step), rollback (the last
good checkpoint is loaded first) or stop (the run ends). A batch without predicted tokens is always skipped; in a run's
first step it ends the run. A skipped batch stays skipped: its samples are recorded in `run_dir/skipped_samples.json`,
and every later start skips them too, so that a step's data depend only on the checkpoint and that file. If too many
steps in a row are rejected, the batches are not the cause: the run ends, and the batches that were skipped in this
series are removed from the record. A batch is never skipped because of damaged weights. (Skipping batches at a loss
spike: PaLM, Chowdhery et al. 2022, section 5.1.)
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from base import checksums
from base.errors import ConfigError
from configs.schema import Config

SKIPPED = "skipped_samples.json"
WINDOW = 64  # steps whose median loss a spike is measured against
LEAST_STEPS = 8  # good steps before spikes are detected: losses change fast at the start
MOST_IN_A_ROW = 10  # rejected steps without a good step between them; more are not caused by single batches
MOST_DAMAGES = 3  # rollbacks because of damaged weights, without a new step between them
NOTHING_PREDICTED = "nothing_predicted"  # the kind of a rejected step whose cause is the data


class UnhealthyRun(RuntimeError):
    """Raised when a step was rejected and the run must stop. The message describes the cause and what to do."""


class RejectedRun(ConfigError):
    """Raised on all ranks together when a run finds between steps that its config cannot be satisfied."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


@dataclass(frozen=True)
class RejectedStep:
    """Reason why a step was rejected. `kind` is the kind of the event: nonfinite, loss_spike or nothing_predicted."""

    kind: str
    text: str


@dataclass(frozen=True)
class Skip:
    """Training samples [first, end) that no step may use."""

    first: int
    end: int
    step: int  # that was rejected
    reason: str


class Health:
    """Decides by loss and gradients whether a step is good, and how the run continues after a rejected step. The
    numbers are equal on all ranks, so that all ranks decide alike."""

    def __init__(self, config: Config):
        self._settings = config.training
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._rejected_in_a_row = 0
        self._damages_in_a_row = 0
        self._furthest = 0
        self._skipped: list[tuple[int, int]] = []  # samples [first, end) skipped by the rejected steps in a row
        self.without_update = 0  # steps whose fp16 gradients overflowed, in total
        self.without_update_in_a_row = 0

    def validate(self, loss: float, finite: bool, predicted_tokens: int) -> RejectedStep | None:
        """Return the reason to reject a step with this loss, or None if the step is good. `finite`: whether its
        gradients are finite."""
        if predicted_tokens == 0:  # the loss is then 0, which would pass for a good loss
            return RejectedStep(NOTHING_PREDICTED, "no token is predicted: each is the last of its document")
        if not math.isfinite(loss):
            return RejectedStep("nonfinite", f"the loss is {loss}")
        if not finite:
            return RejectedStep("nonfinite", f"the gradients are not finite (the loss is {loss:.4f})")
        factor = self._settings.spike_factor
        if factor is not None and len(self._losses) >= LEAST_STEPS:
            usual = statistics.median(self._losses)
            if loss > factor * usual:
                text = f"the loss {loss:.4f} is {loss / usual:.2f} times the usual {usual:.4f}"
                return RejectedStep("loss_spike", text)
        return None

    def taken(self, loss: float, step: int, updated: bool = True) -> None:
        """Record the loss of a finished step. `updated`: whether the step changed the weights."""
        self._losses.append(loss)
        self.without_update += not updated
        self.without_update_in_a_row = 0 if updated else self.without_update_in_a_row + 1
        if step > self._furthest:  # steps repeated after a rollback do not count
            self._furthest = step
            self.start_over()

    def policy(self, rejected: RejectedStep, damaged: bool = False) -> str:
        """Count a rejected step, and return how the run continues: skip, rollback or stop, as configured. A batch
        without predicted tokens is skipped. Returns stop after too many rejected steps in a row, or instead of skip if
        the weights are `damaged` (not finite)."""
        self._rejected_in_a_row += 1
        self._damages_in_a_row += damaged
        if self.gave_up:
            return "stop"
        if rejected.kind == NOTHING_PREDICTED:
            return "skip"  # the same samples would predict nothing again
        configured = self._settings.nonfinite if rejected.kind == "nonfinite" else self._settings.spike
        return "stop" if damaged and configured == "skip" else configured

    @property
    def gave_up(self) -> bool:
        """Return whether more than MOST_IN_A_ROW steps in a row were rejected, or more than MOST_DAMAGES of them had
        damaged weights."""
        return self._rejected_in_a_row > MOST_IN_A_ROW or self._damages_in_a_row > MOST_DAMAGES

    def skip(self, skip: Skip) -> None:
        """Add the samples of a skipped batch to the current series of rejected steps."""
        self._skipped.append((skip.first, skip.end))

    def start_over(self) -> list[tuple[int, int]]:
        """Forget the current series of rejected steps, and return the sample ranges [first, end) that it skipped."""
        skipped, self._skipped = self._skipped, []
        self._rejected_in_a_row = self._damages_in_a_row = 0
        return skipped

    def state(self) -> dict[str, Any]:
        """Return the recent losses and the counts of rejected steps and of steps without an update, for a checkpoint,
        as JSON values that read back exactly."""
        return {
            "losses": list(self._losses),
            "furthest": self._furthest,
            "refused_in_a_row": self._rejected_in_a_row,
            "damages_in_a_row": self._damages_in_a_row,
            "marked": [list(pair) for pair in self._skipped],
            "without_update": self.without_update,
            "without_update_in_a_row": self.without_update_in_a_row,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the recent losses and all counts of steps from a checkpoint. Raises KeyError, TypeError or ValueError
        if `state` is not valid."""
        self._furthest = int(state["furthest"])
        self._rejected_in_a_row, self._damages_in_a_row = int(state["refused_in_a_row"]), int(state["damages_in_a_row"])
        self._skipped = [(int(first), int(end)) for first, end in state["marked"]]
        self.go_back(state)

    def go_back(self, state: dict[str, Any]) -> None:
        """Restore the recorded losses and the counts of steps without an update from an older checkpoint, but keep the
        counts of rejected steps."""
        self._losses = deque((float(loss) for loss in state["losses"]), maxlen=WINDOW)
        self.without_update = int(state["without_update"])
        self.without_update_in_a_row = int(state["without_update_in_a_row"])


class SkippedSamples:
    """Samples that no step may use, equal on all ranks and recorded in `run_dir/skipped_samples.json`."""

    def __init__(self, run_dir: Path, skips: Sequence[Skip] = ()):
        self._path, self._skips = run_dir / SKIPPED, list(skips)

    @classmethod
    def load(cls, run_dir: Path, origin: Path | None = None) -> SkippedSamples:
        """Read skipped_samples.json on rank 0 and broadcast its content. If the run has no such file, copy the skipped
        samples of `origin`, the folder of the run whose checkpoint this run started from. A collective call. Raises
        ConfigError if the file cannot be read."""
        answer: list[str | None] = [None, None]
        path = run_dir / SKIPPED
        if origin is not None and not path.exists():
            path = origin / SKIPPED
        if dist.get_rank() == 0 and path.exists():
            try:
                text = checksums.read_with_sum(path)
                [Skip(**skip) for skip in json.loads(text)]
                answer[0] = text
            except (OSError, ValueError, TypeError) as error:
                rule = "it must be a list of objects with first, end, step and reason"
                why = rule if isinstance(error, TypeError) else error
                answer[1] = f"{path} cannot be read ({why}). Restore it, or delete it to use all samples again."
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise ConfigError(answer[1])
        found = cls(run_dir, [Skip(**skip) for skip in json.loads(answer[0])] if answer[0] else [])
        found._write(dist.get_rank() == 0 and answer[0] is not None and path.parent != run_dir)
        return found

    def next_position(self, position: int, count: int) -> int:
        """Return the first sample at or after `position` from which `count` consecutive samples may be used."""
        for skip in sorted(self._skips, key=lambda skip: skip.first):
            if skip.first < position + count and position < skip.end:
                position = skip.end
        return position

    def count_before(self, position: int) -> int:
        """Return the number of skipped samples before `position`."""
        return sum(skip.end - skip.first for skip in self._skips if skip.end <= position)

    def add(self, skip: Skip, *, write: bool) -> None:
        """Exclude samples from all later steps. `write`: whether this rank writes skipped_samples.json. Raises
        WriteError."""
        self._skips.append(skip)
        self._write(write)

    def take_back(self, ranges: Sequence[tuple[int, int]], *, write: bool) -> None:
        """Stop skipping the sample ranges [first, end). `write`: whether this rank writes skipped_samples.json."""
        self._skips = [skip for skip in self._skips if (skip.first, skip.end) not in ranges]
        self._write(write)

    def _write(self, write: bool) -> None:
        if write:
            checksums.write_with_sum(self._path, json.dumps([asdict(skip) for skip in self._skips], indent=1))
