"""Step validation: a step that predicts nothing, whose loss or gradients are not finite, or whose loss leaps up, is
judged before the optimizer is touched.

skip: the batch is passed over, and the next one takes its step. rollback: the last good checkpoint is loaded first.
stop: the run ends. A batch that predicts nothing is always skipped; in a run's first step it ends the run. A batch once
passed over stays so: its samples are on record in `run_dir/skipped_samples.json`, and every later start passes over
them too, so that the data of a step follows from the checkpoint and that file alone. Where refusals go on and on it was
not single batches: the run ends, and the batches that it passed over on the way are taken off the record. Damaged
weights never count against a batch. (Skipping batches at a loss spike: PaLM, Chowdhery et al. 2022, section 5.1.)
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

from configs import checksums
from configs.schema import Config, ConfigError

SKIPPED = "skipped_samples.json"
WINDOW = 64  # steps whose median loss a spike is measured against
LEAST_STEPS = 8  # of them before a spike can be told from a start
MOST_IN_A_ROW = 10  # batches refused without a step between them: by then it is not single batches
# times that the run goes back to a checkpoint because its weights were damaged, without a new step between them
MOST_DAMAGES = 3
NOTHING_PREDICTED = "nothing_predicted"  # the kind of a refusal whose cause is the data


class UnhealthyRun(RuntimeError):
    """A step that must not be taken, in a run that shall stop for it. The message says all that is known."""


class RefusedRun(ConfigError):
    """What the config asks for cannot be had, as a run found out between steps: on all ranks, and by agreement."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


@dataclass(frozen=True)
class Refusal:
    """Why a step was refused. `kind` is the event's: nonfinite, loss_spike or nothing_predicted."""

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
    """Judges each step by numbers that are the same on all ranks, so that all decide alike. Its state is in every
    checkpoint."""

    def __init__(self, config: Config):
        self._settings = config.training
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._refused_in_a_row = 0
        self._damages_in_a_row = 0
        self._furthest = 0
        self._marked: list[tuple[int, int]] = []  # samples [first, end) passed over by the refusals in a row
        self.without_update = 0  # steps whose fp16 gradients overflowed, in all
        self.without_update_in_a_row = 0

    def judge(self, loss: float, finite: bool, predicted_tokens: int) -> Refusal | None:
        """Whether a step with this loss, of all its predicted tokens, may be taken; `finite` tells of the
        gradients."""
        if predicted_tokens == 0:  # there is no loss: what was made of it is 0, and would be taken for a good one
            return Refusal(NOTHING_PREDICTED, "no token is predicted: each is the last of its document")
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

    def taken(self, loss: float, step: int, updated: bool = True) -> None:
        """A step was taken; `updated` tells whether it changed the weights."""
        self._losses.append(loss)
        self.without_update += not updated
        self.without_update_in_a_row = 0 if updated else self.without_update_in_a_row + 1
        if step > self._furthest:  # steps taken again after a rollback prove nothing
            self._furthest = step
            self.start_over()

    def policy(self, refusal: Refusal, damaged: bool = False) -> str:
        """skip, rollback or stop. The one that is configured, unless it has led nowhere; no batch is skipped for
        damaged weights."""
        self._refused_in_a_row += 1
        self._damages_in_a_row += damaged
        if self.gave_up:
            return "stop"
        if refusal.kind == NOTHING_PREDICTED:
            return "skip"  # the same samples would predict nothing again
        configured = self._settings.nonfinite if refusal.kind == "nonfinite" else self._settings.spike
        return "stop" if damaged and configured == "skip" else configured

    @property
    def gave_up(self) -> bool:
        """Whether the configured policy has led nowhere."""
        return self._refused_in_a_row > MOST_IN_A_ROW or self._damages_in_a_row > MOST_DAMAGES

    def passed_over(self, skip: Skip) -> None:
        """A batch is passed over for good, unless this leads nowhere."""
        self._marked.append((skip.first, skip.end))

    def start_over(self) -> list[tuple[int, int]]:
        """Forget the refusals in a row. The samples [first, end) that were passed over meanwhile."""
        marked, self._marked = self._marked, []
        self._refused_in_a_row = self._damages_in_a_row = 0
        return marked

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON has it: floats read back exactly."""
        return {
            "losses": list(self._losses),
            "furthest": self._furthest,
            "refused_in_a_row": self._refused_in_a_row,
            "damages_in_a_row": self._damages_in_a_row,
            "marked": [list(pair) for pair in self._marked],
            "without_update": self.without_update,
            "without_update_in_a_row": self.without_update_in_a_row,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Undo `state`. Raises KeyError, TypeError or ValueError where it is none."""
        self._furthest = int(state["furthest"])
        self._refused_in_a_row, self._damages_in_a_row = int(state["refused_in_a_row"]), int(state["damages_in_a_row"])
        self._marked = [(int(first), int(end)) for first, end in state["marked"]]
        self.go_back(state)

    def go_back(self, state: dict[str, Any]) -> None:
        """Take the losses of an older checkpoint, where the run goes on; what leads nowhere is counted on."""
        self._losses = deque((float(loss) for loss in state["losses"]), maxlen=WINDOW)
        self.without_update, self.without_update_in_a_row = (
            int(state["without_update"]),
            int(state["without_update_in_a_row"]),
        )


class SkippedSamples:
    """The samples that no step may use, as `run_dir` has them on record. All ranks hold the same."""

    def __init__(self, run_dir: Path, skips: Sequence[Skip] = ()):
        self._path, self._skips = run_dir / SKIPPED, list(skips)

    @classmethod
    def load(cls, run_dir: Path, origin: Path | None = None) -> SkippedSamples:
        """What is on record; rank 0 reads, all hear. A run that began from another run's checkpoint, in the folder
        `origin`, takes over what is on record there. A collective call.

        Raises ConfigError for a file that cannot be read.
        """
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
                answer[1] = f"{path} cannot be read ({error}). Mend it, or delete it to use all samples again."
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise ConfigError(answer[1])
        found = cls(run_dir, [Skip(**skip) for skip in json.loads(answer[0])] if answer[0] else [])
        found._write(dist.get_rank() == 0 and answer[0] is not None and path.parent != run_dir)
        return found

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
        """Never use these samples; one rank writes it down. Raises WriteError."""
        self._skips.append(skip)
        self._write(write)

    def take_back(self, ranges: Sequence[tuple[int, int]], *, write: bool) -> None:
        """Allow samples [first, end) after all; one rank writes it down."""
        self._skips = [skip for skip in self._skips if (skip.first, skip.end) not in ranges]
        self._write(write)

    def _write(self, write: bool) -> None:
        if write:
            checksums.write_with_sum(self._path, json.dumps([asdict(skip) for skip in self._skips], indent=1))
