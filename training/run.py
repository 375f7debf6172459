"""The state of a run that callbacks see, and the base class of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.resume import Claim
from checkpoint.saver import Saver
from configs.schema import Config
from parallel.topology import Topology
from training.engine import Engine
from training.progress import Progress
from training.resilience.health import Health, SkippedSamples
from training.step import StepResult

Metrics = dict[str, Any]


@dataclass
class Run:
    """One training run on this rank. `make_validation_loaders`: by the name of a validation corpus, or HELD_OUT of
    data/loader.py; each call returns a loader that starts at the first sample."""

    config: Config
    topology: Topology
    engine: Engine
    vocab_size: int
    tokenizer: Any
    loader: Any
    make_validation_loaders: Mapping[str, Callable[[], Any]]
    saver: Saver
    health: Health
    progress: Progress = field(default_factory=Progress)
    skipped: SkippedSamples = field(default_factory=lambda: SkippedSamples(Path()))
    callbacks: Sequence[Callback] = ()
    make_loader: Callable[[int], Any] | None = None  # a training loader that starts after this number of samples
    stop_reason: str | None = None  # why the run ends after this step, the same on every rank
    result: StepResult | None = None  # of the last step
    claim: Claim | None = None  # rank 0's hold on run_dir
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # stored in checkpoints: the run's id, and what it was trained on

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

    def seek(self) -> None:
        """Move the loader to the next samples that may be used."""
        position = self.skipped.next_position(self.progress.consumed_samples, self.config.training.global_batch_size)
        self.progress.consumed_samples = position
        if self.loader.consumed_samples != position:
            assert self.make_loader is not None
            self.loader.close()
            self.loader = self.make_loader(position)

    def take(self, result: StepResult) -> None:
        """Count a step that was taken."""
        self.progress.step += 1
        self.progress.consumed_samples += self.config.training.global_batch_size
        self.health.taken(result.loss, self.progress.step, result.updated)
        self.result = result

    def log(self, line: str) -> None:
        """Print a line once per job."""
        if self.is_main:
            print(line, flush=True)


class Callback:
    """One concern of a run, kept out of the loop. Every rank calls every hook, so a hook may communicate.

    A step calls `before_step`, then forward and backward passes, then `before_update`, then the optimizer, then
    `after_step`. A callback registers the sums over ranks that it needs with `run.engine.sums`: they share the loss's
    all-reduce, so they cost no message of their own.
    """

    name = ""  # of its state in checkpoints, if it has one; it must not change
    follows: tuple[str, ...] = ()  # names of the classes whose callbacks, if present, are called before this one

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: small, made of JSON values, independent of the layout; empty for none.
        Rank 0's is written.

        Checkpoints calls it in its `after_step`: a callback whose state depends on the step must precede it in the
        list.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, on every rank: before `on_start`, and before `on_rollback`.

        Not called if the checkpoint has none.
        """

    def on_join(self, topology: Topology) -> None:
        """Called once when the ranks of the job have met, before there is a model."""

    def on_claim(self, step: int) -> None:
        """Called once when this job has claimed the run's folder, with the step at which it starts or resumes."""

    def on_start(self, run: Run) -> None:
        """Called once, before the first step of this process, after a resume."""

    def before_step(self, run: Run) -> None:
        """Called before each step, also when a rejected one is repeated. It may register sums of the step."""

    def before_update(self, run: Run, result: StepResult) -> None:
        """Called before the weights are changed, with the result of the passes: on the host, the same on every rank.

        Not called for a rejected step. It must not wait for the device, so that a step keeps its one wait.
        """

    def after_step(self, run: Run, metrics: Metrics) -> None:
        """Called after each optimizer step, in the order of the list in training/callbacks.

        It may add to the metrics of the step; later callbacks see what earlier ones added.
        """

    def on_rollback(self, run: Run) -> None:
        """Called when the run has gone back to an older checkpoint, that of step `run.progress.step`."""

    def on_stop(self, run: Run) -> None:
        """Called once when the run ends early for `run.stop_reason`, in place of `on_end`."""

    def on_error(self, error: BaseException) -> None:
        """Called when this rank raised, before `close`. Other ranks may be gone: it must not communicate."""

    def on_end(self, run: Run) -> None:
        """Called once when all steps are done."""

    def close(self) -> None:
        """Called once at the end, also after an error."""


def states_of(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """Return the states of the callbacks that have one, by their names."""
    found = [(callback.name, state) for callback in callbacks if (state := callback.state_dict())]
    assert all(name for name, _ in found) and len(dict(found)) == len(found), (
        f"names of callbacks with a state: {found}"
    )
    return dict(found)


def restore_callbacks(run: Run) -> None:
    """Restore each callback's state from the loaded checkpoint, and log the names of states without a callback."""
    states = dict(run.progress.callbacks)
    for callback in run.callbacks:
        if callback.name in states:
            callback.load_state_dict(states.pop(callback.name))
    for name in states:
        run.log(
            f"the checkpoint of step {run.progress.step} keeps the state of {name}, which this run is without: it is "
            "left out"
        )
