"""Save a checkpoint every `checkpoint.interval` steps and at the end."""

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
    """Saves checkpoints, and logs each one when it is complete on disk and was read back.

    A failed save is logged, and the next save is tried when it is due. A run whose last save failed ends with that
    error. `on_record` is called on rank 0 before a save starts, and must write the metrics of all steps so far or
    raise. `on_disk` is called in a different thread before the checkpoint gets its final name, and must flush these
    metrics to disk.
    """

    follows = ("MetricsFile", "ExpertMigration", "LossScale", "LoadLimit")

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
        """Wait for the save in progress. Raises SaveError if the run's last save failed."""
        self.finish_pending(run)
        if self._failed is not None:
            raise SaveError(self._failed)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def save_now(self, run: Run) -> None:
        """Save the last finished step, and return when its checkpoint is complete. A collective call. Raises
        SaveError."""
        self.finish_pending(run)
        if run.saver.last_step != run.progress.step:
            self.start(run)
        self.on_end(run)

    def finish_pending(self, run: Run) -> None:
        """Wait for the save in progress, if any, and log its checkpoint or its failure. A collective call."""
        self._take(run, run.saver.finish)

    def start(self, run: Run) -> None:
        """Start to save the last finished step, after waiting for an earlier save. A collective call."""
        self.finish_pending(run)
        run.engine.synchronize()
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
            continues = "" if run.is_last_step else " Training continues, and the next save is tried when it is due"
            run.log(f"{self._failed}{continues}")
            if run.is_main:
                events.record(run.run_dir, "checkpoint_failed", self._failed, step=run.progress.step)
            return
        if saved is None:
            return
        self._failed = None
        if not run.is_main:
            return
        if run.claim is not None:
            try:
                run.claim.note_saved(saved.step)
            except OSError as error:  # the checkpoint exists nevertheless, and the next heartbeat notes it again
                record = run.run_dir / RECORD
                run.log(f"{record} does not record the checkpoint of step {saved.step} yet: {error.strerror}")
        run.log(f"checkpoint {saved.folder}")
        if saved.complaint is not None:
            run.log(saved.complaint)
        fields = {"step": saved.step, "folder": str(saved.folder), "bytes": saved.num_bytes}
        fields |= {"seconds": saved.seconds, "pause_seconds": saved.pause_seconds}
        events.record(run.run_dir, "checkpoint_saved", f"step {saved.step} is saved", **fields)
