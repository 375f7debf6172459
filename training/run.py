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
from training.resilience import events
from training.resilience.health import Health, SkippedSamples
from training.step import StepResult

Metrics = dict[str, Any]


@dataclass
class Run:
    """State of one training run on this rank, which callbacks read and change. `make_validation_loaders` maps the name
    of a validation corpus, or of the held-out documents, to a function that returns a loader from the first sample."""

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
    claim: Claim | None = None  # rank 0's lock on run_dir
    facts: dict[str, Any] = field(default_factory=dict)  # stored in checkpoints: the run's id and its training data

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints and writes the run's files."""
        return self.topology.rank == 0

    @property
    def is_last_step(self) -> bool:
        return self.progress.step >= self.config.training.steps

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.model.sequence_length

    def seek(self) -> None:
        """Move the training loader to the next batch that contains no skipped samples."""
        position = self.skipped.next_position(self.progress.consumed_samples, self.config.training.global_batch_size)
        self.progress.consumed_samples = position
        if self.loader.consumed_samples != position:
            assert self.make_loader is not None
            self.loader.close()
            self.loader = self.make_loader(position)

    def take(self, result: StepResult) -> None:
        """Count a finished step, and record its loss, with which later losses are compared."""
        self.progress.step += 1
        self.progress.consumed_samples += self.config.training.global_batch_size
        self.health.taken(result.loss, self.progress.step, result.updated)
        self.result = result

    def log(self, line: str) -> None:
        """Print a line on rank 0 only."""
        if self.is_main:
            print(line, flush=True)

    def log_event(self, kind: str, text: str, **fields: Any) -> None:
        """Print a line and record it as an event, on rank 0 only. The event's step is the number of finished steps,
        unless `fields` has another `step`."""
        if self.is_main:
            events.log(self.run_dir, kind, text, **{"step": self.progress.step, **fields})


class Callback:
    """Base class of a run's features outside the training loop, such as logging or checkpoints. Every rank calls every
    hook, so a hook may communicate, except `on_error`.

    A step calls `before_step`, runs the forward and backward passes, calls `before_update`, runs the optimizer and
    calls `after_step`. To sum numbers over ranks, a callback registers them with `run.engine.sums`, which adds them to
    the all-reduce of the loss.
    """

    name = ""  # of the callback's state in checkpoints, if it has a state; must not change between versions
    follows: tuple[str, ...] = ()  # class names of the callbacks that, if present, are called before this one

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint: small, JSON-serializable and independent of the layout; {}
        without a state. Only rank 0's state is written. The Checkpoints callback calls this in its `after_step`, so a
        callback whose state changes in every step must precede Checkpoints in the list."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the callback's state from a checkpoint, on every rank. Called before `on_start` and before
        `on_rollback`, unless the checkpoint has no state for this callback."""

    def on_join(self, topology: Topology) -> None:
        """Called once when all ranks have connected, before the model is built."""

    def on_claim(self, step: int) -> None:
        """Called once when this job has locked the run's folder. The job starts or resumes after step `step`."""

    def on_start(self, run: Run) -> None:
        """Called once, after resuming and before this process's first step."""

    def before_step(self, run: Run) -> None:
        """Called before each step, and again before a rejected step is repeated. May register sums for the step."""

    def before_update(self, run: Run, result: StepResult) -> None:
        """Called after the passes and before the weights change, but not for a rejected step. Must not wait for the
        device, because a step allows only one such wait."""

    def after_step(self, run: Run, metrics: Metrics) -> None:
        """Called after each optimizer step, in the order of the list in training/callbacks. May add to the step's
        metrics, which later callbacks then see."""

    def on_rollback(self, run: Run) -> None:
        """Called when the run has rolled back to the checkpoint of step `run.progress.step`."""

    def on_stop(self, run: Run) -> None:
        """Called once, instead of `on_end`, when the run stops before its last step because of `run.stop_reason`."""

    def on_error(self, error: BaseException) -> None:
        """Called before `close` when an exception ends training on this rank. Must not communicate, because other ranks
        may have ended."""

    def on_end(self, run: Run) -> None:
        """Called once when all steps are done."""

    def close(self) -> None:
        """Called once when training ends, also after an error."""


def states_of(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """Return the states of all callbacks that have a state, by the callback's name."""
    found = [(callback.name, state) for callback in callbacks if (state := callback.state_dict())]
    assert all(name for name, _ in found) and len(dict(found)) == len(found), f"names of stateful callbacks: {found}"
    return dict(found)


def restore_callbacks(run: Run) -> None:
    """Restore each callback's state from the loaded checkpoint. Logs the states that belong to no callback of this
    run."""
    states = dict(run.progress.callbacks)
    for callback in run.callbacks:
        if callback.name in states:
            callback.load_state_dict(states.pop(callback.name))
    for name in states:
        run.log(
            f"the checkpoint of step {run.progress.step} has a state of {name}, but this run has no such callback: the "
            "state is ignored"
        )
