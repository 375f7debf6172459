"""A checkpoint every `checkpoint.interval` steps and at the end."""

from __future__ import annotations

from training import checkpoint, manifest
from training.run import Callback, Metrics, Run


class Checkpoints(Callback):
    """Saves, says so, and prunes old ones after the new one is complete."""

    def after_step(self, run: Run, metrics: Metrics) -> None:
        settings = run.config.checkpoint
        due = settings.interval > 0 and run.progress.step % settings.interval == 0
        if not due and not (settings.at_end and run.is_last_step):
            return
        folder = manifest.folder_of(run.run_dir, run.progress.step)
        checkpoint.save(run.model, run.progress, folder, run.vocab_size)
        run.say(f"checkpoint {folder}")
        if run.is_main:
            checkpoint.prune(run.run_dir, settings.keep)
