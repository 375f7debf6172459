"""Handle a rejected step as the config says: skip its batch, roll back to a checkpoint, or end the run."""

from __future__ import annotations

from collections.abc import Sequence

from checkpoint import manifest, resume, start
from checkpoint.saver import SaveError
from configs import derived
from configs.values import as_typed
from training import progress
from training.callbacks.checkpoints import Checkpoints
from training.resilience import diagnosis
from training.resilience.health import (
    MOST_DAMAGES,
    MOST_IN_A_ROW,
    NOTHING_PREDICTED,
    Health,
    RejectedRun,
    RejectedStep,
    Skip,
    UnhealthyRun,
)
from training.run import Run, restore_callbacks
from training.starting import start_log
from training.step import Batch, StepResult

MORE_TO_PREDICT = "Try data.documents=joined, or a data.corpus with documents of two tokens or more"


def handle(run: Run, batches: Sequence[Batch], result: StepResult, rejected: RejectedStep) -> None:
    """Find the cause of a rejected step, and apply the configured policy. A collective call. Raises UnhealthyRun if the
    run must stop, and RejectedRun if the first step of the run has no predicted tokens."""
    health = run.health
    (checkpoints,) = (callback for callback in run.callbacks if isinstance(callback, Checkpoints))
    first, step = run.progress.consumed_samples, run.progress.step + 1
    end = first + run.config.training.global_batch_size
    finding = diagnosis.find_first(run.engine, batches, result.own_losses) if rejected.kind == "nonfinite" else None
    damaged = finding is not None and finding.phase == diagnosis.WEIGHTS
    text = f"step {step}, samples {first} to {end - 1}: {rejected.text}"
    if finding is not None:
        text += f"; first {finding}"
    elif rejected.kind == "nonfinite":
        text += "; a second pass over these samples found nothing, as after a transient hardware fault"
    if rejected.kind == NOTHING_PREDICTED and run.progress.step == 0:
        raise RejectedRun(f"data.documents ({run.config.data.documents}): in {text}. {MORE_TO_PREDICT}.", 0)
    if damaged:
        text += ". The weights were damaged before this step, so the batch is not the cause"
    lost_rank = None if finding is None else finding.rank
    run.log_event(rejected.kind, text, step=step, loss=repr(result.loss), lost_rank=lost_rank)
    policy = health.policy(rejected, damaged)
    if policy == "stop":
        _stop(run, health, text, rejected.kind, damaged, checkpoints)
    if policy == "rollback":
        _go_back(run, health, text, checkpoints, rejected.kind, damaged)
    if not damaged:
        skip = Skip(first, end, step, text)
        health.skip(skip)
        run.skipped.add(skip, write=run.is_main)
        text = f"samples {first} to {end - 1} are skipped from now on"
        run.log_event("batch_skipped", text, step=step, first=first, end=end)
    if policy == "rollback":
        restore_callbacks(run)
        for callback in run.callbacks:
            callback.on_rollback(run)


def _stop(run: Run, health: Health, text: str, kind: str, damaged: bool, checkpoints: Checkpoints) -> None:
    """Save the run if its weights are good, then raise UnhealthyRun with the cause `text` and with advice. `damaged`:
    whether the weights are not finite."""
    step = run.progress.step
    gave_up, skipped = health.gave_up, health.start_over()
    if gave_up and skipped:
        run.skipped.take_back(skipped, write=run.is_main)
        samples = ", ".join(f"{first} to {end - 1}" for first, end in sorted(set(skipped)))
        run.log_event("batches_taken_back", f"samples {samples} are no longer skipped", samples=skipped)
    key = _key(kind)
    saved = "the weights are those of the step before"
    if damaged:
        saved = "the weights are damaged, and were not saved"
        checkpoints.finish_pending(run)
    elif derived.may_save(run.config):
        checkpoints.finish_pending(run)
        saved = f"the checkpoint of step {step} is good" if step > 0 else "no step was taken"
        if step > 0 and manifest.problem_with(manifest.folder_of(run.run_dir, step)) is not None:
            try:
                checkpoints.save_now(run)
            except SaveError as error:
                saved = f"its weights are lost: {str(error).rstrip('.')}"
    many = advice = ""
    has_checkpoint = bool(manifest.list_checkpoints(run.run_dir))
    if gave_up and damaged:
        many = f"; the run went back to a checkpoint {MOST_DAMAGES} times, and the weights were damaged again each time"
    elif gave_up and kind == NOTHING_PREDICTED:
        many, advice = f"; {MOST_IN_A_ROW + 1} rejected batches in a row are too many", f". {MORE_TO_PREDICT}"
    elif gave_up:
        many = f"; {MOST_IN_A_ROW + 1} rejected batches in a row are not caused by the data"
    elif damaged and has_checkpoint:
        advice = f". To go back to the last good checkpoint: {key}=rollback"
    elif damaged:
        advice = f". There is no checkpoint to go back to. To have one next time: {_earlier_checkpoints(step)}"
    else:
        advice = f". To continue without this batch: {key}=skip"
        advice += f", or {key}=rollback to go back to a checkpoint first" if has_checkpoint else ""
    raise UnhealthyRun(f"{text}{many}. The optimizer made no update; {saved}{advice}.")


def _key(kind: str) -> str:
    return "training.nonfinite" if kind == "nonfinite" else "training.spike"


def _earlier_checkpoints(step: int) -> str:
    """Return a setting with which the run would have saved a checkpoint by step `step`."""
    return f"checkpoint.interval={max(1, step // 2)}"


def _go_back(run: Run, health: Health, text: str, checkpoints: Checkpoints, kind: str, damaged: bool) -> None:
    """Load the newest good checkpoint, so that the run continues from the checkpoint's step. Raises UnhealthyRun if
    there is no checkpoint, or if its weights are not finite."""
    checkpoints.finish_pending(run)
    folder = resume.newest(run.run_dir, start_log.log_skipped_checkpoint)
    if folder is None:
        step = run.progress.step
        advice = [f"{_key(kind)}=skip"] * (not damaged)
        advice += [f"{_earlier_checkpoints(step)} to have a checkpoint next time"] * (step > 0)
        tried = f" Try {', or '.join(advice)}." if advice else ""
        raise UnhealthyRun(f"{text}. There is no checkpoint to go back to.{tried}")
    before = run.progress.step
    run.progress = progress.load(run.engine, folder)
    run.saver.last_step = None  # a repeated step is saved again
    damage = diagnosis.damage(run.engine)
    if damage is not None:
        message = f"{text}. The checkpoint to go back to, {folder}, is damaged too: {damage}."
        older = [path for path in manifest.list_checkpoints(run.run_dir) if path.name < folder.name]
        if older:
            resumed = as_typed("checkpoint.resume", str(older[0]))
            message += f" Try {resumed} {start.in_new_folder(run.config)} to resume from an older one."
        raise UnhealthyRun(message)
    health.go_back(run.progress.health)
    run.log_event("rolled_back", f"went back from step {before} to {folder}", steps_lost=before - run.progress.step)
