"""The state of a run that callbacks see, and the shape of a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import Config
from parallel.topology import Topology
from training.health import Health, SkippedSamples
from training.resume import Claim
from training.state_file import Progress
from training.step import Model, StepResult

Metrics = dict[str, Any]


@dataclass
class Run:
    """One training run on this rank. `make_validation_loader()` starts over at the first validation sample."""

    config: Config
    topology: Topology
    model: Model
    vocab_size: int
    tokenizer: Any
    loader: Any
    make_validation_loader: Callable[[], Any]
    progress: Progress = field(default_factory=Progress)
    skipped: SkippedSamples = field(default_factory=lambda: SkippedSamples(Path()))
    health: Health | None = None
    make_loader: Callable[[int], Any] | None = None  # the training loader after so many consumed samples
    stop_reason: str | None = None  # why the run shall end after this step, the same on every rank
    tokens_per_expert: Any = None  # [layers, experts] of the last step, on the host; None for a dense model
    result: StepResult | None = None  # of the last step
    claim: Claim | None = None  # rank 0's hold on run_dir
    facts: dict[str, Any] = field(default_factory=dict)  # whose checkpoints these are, and what they were trained on

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.topology.rank == 0

    @property
    def is_last_step(self) -> bool:
        return self.progress.step >= self.config.training.steps

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.model.sequence_length

    @property
    def tokens_seen(self) -> int:
        """Tokens that the steps so far were taken on, without those that were passed over."""
        samples = self.progress.consumed_samples - self.skipped.count_before(self.progress.consumed_samples)
        return samples * self.config.model.sequence_length

    def seek(self) -> None:
        """Bring the loader to the next samples that may be used."""
        position = self.skipped.next_position(self.progress.consumed_samples, self.config.training.global_batch_size)
        self.progress.consumed_samples = position
        if self.loader.consumed_samples != position:
            assert self.make_loader is not None
            self.loader.close()
            self.loader = self.make_loader(position)

    def say(self, line: str) -> None:
        """Print a line once per job."""
        if self.is_main:
            print(line, flush=True)


class Callback:
    """One concern of a run, beside the loop. Every rank calls every hook, so a hook may communicate.

    `after_step` may add to the metrics of the step; later callbacks see what earlier ones added.
    """

    def on_join(self, topology: Topology) -> None:
        """Called once when the ranks of the job have met, before there is a model."""

    def on_claim(self, step: int) -> None:
        """Called once when it is sure that this job goes on with the run in the folder, after so many steps, or begins one there."""

    def on_start(self, run: Run) -> None:
        """Called once, before the first step of this process, after a resume."""

    def after_step(self, run: Run, metrics: Metrics) -> None:
        """Called after each optimizer step, in the order of the list in training/trainer.py."""

    def on_rollback(self, run: Run) -> None:
        """Called when the run has gone back to an older checkpoint: `run.progress` tells to which step."""

    def on_stop(self, run: Run) -> None:
        """Called once when the run ends early for `run.stop_reason`, in place of `on_end`."""

    def on_error(self, error: BaseException) -> None:
        """Called when this rank raised, before `close`. Other ranks may be gone: it must not communicate."""

    def on_end(self, run: Run) -> None:
        """Called once when all steps are done."""

    def close(self) -> None:
        """Called once in any case, also after an error."""
