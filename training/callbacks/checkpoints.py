"""A checkpoint every `checkpoint.interval` steps and at the end."""

from __future__ import annotations

from collections.abc import Callable

from checkpoint import manifest
from checkpoint.record import RECORD
from checkpoint.run_files import GrowingFiles
from checkpoint.saver import Saved, SaveError, Saver
from training import progress
from training.resilience import events
from training.run import Callback, Metrics, Run, states_of


class Checkpoints(Callback):
    """Begins saves, and announces each one once it is complete, on disk and read back.

    A save that fails in the midst of a run is said, and the next one is tried when it is due: who makes room in time
    loses nothing. A run whose last save failed ends with its error. on_record: called on the main rank before a save
    begins; it sees to it that the steps up to it are on record, and raises where they are not. on_disk: called before a
    checkpoint gets its name, in another thread; it sees to it that this record is on the disk.
    """

    follows = ("MetricsFile", "HomeMoves", "LossScale", "LoadLimit")

    def __init__(
        self, on_record: Callable[[], None] = lambda: None, on_disk: Callable[[], None] = lambda: None
    ) -> None:
        self._on_record, self._on_disk = on_record, on_disk
        self._saver: Saver | None = None
        self._files: GrowingFiles | None = None
        self._failed: str | None = None  # of the newest save

    def on_start(self, run: Run) -> None:
        self._saver = run.saver
        self._saver.before_name = self._on_disk
        self._files = GrowingFiles(run.run_dir) if run.is_main else None

    def on_rollback(self, run: Run) -> None:
        if self._files is not None:
            self._files.forget()

    def after_step(self, run: Run, metrics: Metrics) -> None:
        settings = run.config.checkpoint
        due = settings.interval > 0 and run.progress.step % settings.interval == 0
        if (due or (settings.at_end and run.is_last_step)) and run.saver.last_step != run.progress.step:
            self.start(run)
            if not settings.async_save:
                self.finish_pending(run)
        else:
            self._take(run, run.saver.poll)

    def on_end(self, run: Run) -> None:
        """Raises SaveError."""
        self.finish_pending(run)
        if self._failed is not None:
            raise SaveError(self._failed)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def save_now(self, run: Run) -> None:
        """Have a complete checkpoint of the step just taken when this returns. A collective call. Raises SaveError."""
        self.finish_pending(run)
        if run.saver.last_step != run.progress.step:
            self.start(run)
        self.on_end(run)

    def finish_pending(self, run: Run) -> None:
        """Wait for the save under way, if any, and announce it, or say why it failed. A collective call."""
        self._take(run, run.saver.finish)

    def start(self, run: Run) -> None:
        """Begin to save the step just taken, after waiting for an earlier save. A collective call."""
        self.finish_pending(run)
        run.engine.settle()
        if run.is_main:
            self._on_record()
        settings = run.config.checkpoint
        folder = manifest.folder_of(run.run_dir, run.progress.step)
        run.progress.health, run.progress.callbacks = run.health.state(), states_of(run.callbacks)
        facts = run.facts if self._files is None else {**run.facts, "files": self._files.sums()}
        state = progress.state(run.engine, run.progress, facts)
        run.saver.start(run.engine.chunks, run.engine.optimizer, state, folder, settings.keep, settings.keep_every)

    def _take(self, run: Run, work: Callable[[], Saved | None]) -> None:
        try:
            saved = work()
        except SaveError as error:
            self._failed = str(error)
            run.say(
                self._failed
                + ("" if run.is_last_step else " Training goes on, and the next save is tried when it is due")
            )
            if run.is_main:
                events.record(run.run_dir, "checkpoint_failed", self._failed, step=run.progress.step)
            return
        if saved is not None:
            self._failed = None
        self._announce(run, saved)

    def _announce(self, run: Run, saved: Saved | None) -> None:
        if saved is None or not run.is_main:
            return
        if run.claim is not None:
            try:
                run.claim.note_saved(saved.step)
            except OSError as error:  # it is there all the same, and the next sign of life notes it again
                run.say(
                    f"{run.run_dir / RECORD} does not name the checkpoint of step {saved.step} yet: {error.strerror}"
                )
        run.say(f"checkpoint {saved.folder}")
        if saved.complaint is not None:
            run.say(saved.complaint)
        events.record(
            run.run_dir,
            "checkpoint_saved",
            f"step {saved.step} is saved",
            step=saved.step,
            folder=str(saved.folder),
            bytes=saved.num_bytes,
            seconds=saved.seconds,
            pause_seconds=saved.pause_seconds,
        )
