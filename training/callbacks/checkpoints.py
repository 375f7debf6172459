"""A checkpoint every `checkpoint.interval` steps and at the end."""

from __future__ import annotations

from training import checkpoint, events, manifest
from training.run import Callback, Metrics, Run
from training.saver import Saved, Saver


class Checkpoints(Callback):
    """Begins saves, and announces each one once it is complete, on disk and read back."""

    def __init__(self) -> None:
        self._saver: Saver | None = None

    def on_start(self, run: Run) -> None:
        self._saver = checkpoint.saver_of(run.model)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        settings = run.config.checkpoint
        due = settings.interval > 0 and run.progress.step % settings.interval == 0
        if (due or (settings.at_end and run.is_last_step)) and checkpoint.saver_of(run.model).last_step != run.progress.step:
            self.start(run)
            if not settings.async_save:
                self.finish_pending(run)
        elif self._saver is not None:
            self._announce(run, self._saver.poll())

    def on_end(self, run: Run) -> None:
        self.finish_pending(run)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def save_now(self, run: Run) -> None:
        """Have a complete checkpoint of the step just taken when this returns. A collective call. Raises SaveError."""
        if checkpoint.saver_of(run.model).last_step != run.progress.step:
            self.start(run)
        self.finish_pending(run)

    def finish_pending(self, run: Run) -> None:
        """Wait for the save under way, if any, and announce it. A collective call. Raises SaveError."""
        self._announce(run, checkpoint.finish_pending(run.model))

    def start(self, run: Run) -> None:
        """Begin to save the step just taken, after waiting for an earlier save. A collective call. Raises SaveError."""
        self.finish_pending(run)
        settings = run.config.checkpoint
        folder = manifest.folder_of(run.run_dir, run.progress.step)
        if run.health is not None:
            run.progress.health = run.health.state()
        checkpoint.saver_of(run.model).start(run.model, run.progress, folder, run.vocab_size, settings.keep, settings.keep_every, run.facts)

    def _announce(self, run: Run, saved: Saved | None) -> None:
        if saved is None or not run.is_main:
            return
        if run.claim is not None:
            run.claim.note_saved(saved.step)
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
