"""What follows a refused step: its batch is passed over, the run goes back to a checkpoint, or it ends, as the config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from training import checkpoint, diagnosis, events, manifest, resume
from training.callbacks.checkpoints import Checkpoints
from training.diagnosis import Finding
from training.health import MOST_IN_A_ROW, Health, Skip, UnhealthyRun
from training.run import Run
from training.step import Batch, StepResult


def handle(
    run: Run, health: Health, batches: Sequence[Batch], result: StepResult, checkpoints: Checkpoints, rolled_back: Callable[[Run], None]
) -> None:
    """Find out what was wrong and do what the policy says. A collective call. Raises UnhealthyRun when the run shall stop.

    rolled_back: called after the run has gone back to a checkpoint.
    """
    refusal = result.refusal
    assert refusal is not None
    first, step = run.progress.consumed_samples, run.progress.step + 1
    end = first + run.config.training.global_batch_size
    finding = diagnosis.find_first(run.model, batches) if refusal.kind == "nonfinite" else None
    text = f"step {step}, samples {first} to {end - 1}: {refusal.text}"
    if refusal.kind == "nonfinite":
        text += f"; first {finding}" if finding is not None else "; a second pass over them found nothing: a passing fault, of hardware?"
    _record(run, refusal.kind, text, step=step, loss=repr(result.loss), lost_rank=None if finding is None else finding.rank)
    policy = health.policy(refusal)
    if policy == "stop":
        _stop(run, health, text, refusal.kind, finding, checkpoints)
    skip = Skip(first, end, step, text)
    if policy == "rollback":
        _go_back(run, text, checkpoints)
    run.skipped.add(skip, write=run.is_main)
    _record(run, "batch_skipped", f"samples {first} to {end - 1} are passed over from now on", step=step, first=first, end=end)
    if policy == "rollback":
        rolled_back(run)


def _record(run: Run, kind: str, text: str, **fields: object) -> None:
    run.say(text)
    if run.is_main:
        events.record(run.run_dir, kind, text, **fields)


def _stop(run: Run, health: Health, text: str, kind: str, finding: Finding | None, checkpoints: Checkpoints) -> None:
    settings, step = run.config.checkpoint, run.progress.step
    key = "training.nonfinite" if kind == "nonfinite" else "training.spike"
    saved = "the weights are as the step before left them"
    if finding is not None and finding.phase == diagnosis.WEIGHTS:
        saved = "the weights are damaged, and were not saved"
        checkpoints.finish_pending(run)
    elif settings.interval > 0 or settings.at_end:
        checkpoints.finish_pending(run)
        if step > 0 and manifest.problem_with(manifest.folder_of(run.run_dir, step)) is not None:
            checkpoints.save_now(run)
        saved = f"the checkpoint of step {step} is good" if step > 0 else "no step was taken"
    many = f"; {MOST_IN_A_ROW + 1} refused batches in a row are not the data's fault" if health.gave_up else ""
    advice = "" if health.gave_up else f". To go on without this batch: {key}=skip, or =rollback to go back to a checkpoint first"
    raise UnhealthyRun(f"{text}{many}. The optimizer was not touched; {saved}{advice}.")


def _go_back(run: Run, text: str, checkpoints: Checkpoints) -> None:
    checkpoints.finish_pending(run)
    folder = resume.newest(run.run_dir)
    if folder is None:
        raise UnhealthyRun(f"{text}. There is no checkpoint to go back to. Try training.nonfinite=skip, or a smaller checkpoint.interval.")
    before = run.progress.step
    run.progress = checkpoint.load(run.model, folder)
    _record(run, "rolled_back", f"went back from step {before} to {folder}", step=run.progress.step, steps_lost=before - run.progress.step)
