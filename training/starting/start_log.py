"""Log the start of a run: the checkpoints that it skipped, the step at which it starts or resumes, and changed
settings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint import run_files, start
from checkpoint.record import last_step
from checkpoint.resume import Resumption
from checkpoint.start import Start
from checkpoint.state_file import read_state
from configs import derived
from configs.changes import Change
from configs.keys import put
from configs.schema import Config
from configs.values import as_typed
from optim.optimizer import learning_rate
from training import status
from training.resilience import events


def log_skipped_checkpoint(run_dir: Path, line: str) -> None:
    """Print and record as an event why a checkpoint was skipped. Only rank 0 calls this."""
    events.log(run_dir, "checkpoint_passed_over", line)


def log_damaged_files(run_dir: Path, begin_from: Start) -> None:
    """Print and record which of the run's files no longer match the sizes and checksums in the checkpoint that
    `begin_from` names. Rank 0 calls this before it writes to these files again. Raises OSError."""
    folder = begin_from.checkpoint
    if folder is None or folder.parent.parent.resolve() != run_dir.resolve():
        return
    if found := run_files.changed(run_dir, read_state(folder).get("files", {})):
        lost = f"{run_dir} has lost content that {folder.name} recorded: {'; '.join(found)}"
        events.log(run_dir, events.INCOMPLETE, f"{lost}. The run continues without it")


def log_start(config: Config, resumption: Resumption, step: int) -> None:
    """Print and record how the run starts. Rank 0 calls this after the checkpoint is loaded. Raises OSError."""
    run_dir, found, held = Path(config.run_dir), resumption.start, resumption.start.record
    # This job has locked the folder, so a process that is still recorded as running has ended.
    if status.read(run_dir).get("state") == "running" and not found.is_new:
        events.log(run_dir, "ended_hard", "the previous attempt ended without a message", step=last_step(run_dir))
    source = {"run": held.id, "resume": held.resume, "weights": held.weights, "checkpoint": held.checkpoint}
    events.log(run_dir, "run_started" if found.is_new else "run_goes_on", found.line(step), step=step, **source)
    if found.checkpoint is not None:
        events.log(run_dir, "resumed", f"resumed from {found.checkpoint} at step {step}", step=step)
    changed = start.describe_changes(resumption.settings, resumption.data)
    if changed:
        before = "checkpoint" if found.checkpoint is not None else "first attempt"
        text = f"it continues with settings that differ from its {before}: {changed}"
        values = {change.key: [change.before, change.after] for change in resumption.settings}
        data = [change.text for change in resumption.data]
        events.log(run_dir, "settings_changed", text, step=step, settings=values, data=data)
    rise = rising_rate(config, resumption.settings, step)
    if rise is not None:
        events.log(run_dir, "learning_rate_rises", rise, step=step)


def rising_rate(config: Config, settings: Sequence[Change], step: int) -> str | None:
    """Return a line that says how changed settings raise the learning rate after `step`, and which keys keep the old
    schedule. Returns None if the settings do not raise the learning rate.

    A cosine schedule ends at the run's last step. If it has reached `min_lr` and `training.steps` is then raised, the
    rate jumps up and decays again. A rise that the old schedule also has, such as in its warm-up, is not reported.
    """
    before = _with(config, {change.key: change.before for change in settings})

    def rate(of: Config, at: int) -> float:
        return learning_rate(of.optimizer, of.training.steps, at)

    last, now, scheduled = rate(before, step), rate(config, step + 1), rate(before, step + 1)
    if step == 0 or now <= max(last, scheduled):
        return None
    old = {change.key: change.before for change in settings if change.key.startswith("optimizer.")}
    old["optimizer.decay_steps"] = derived.decay_steps(before)
    lifting = [as_typed(key, value) for key, value in old.items() if rate(_with(config, {key: value}), step + 1) != now]
    return (
        f"the learning rate rises from {last:.4g} in step {step} to {now:.4g} in step {step + 1}, where the old "
        f"schedule had {scheduled:.4g}; {' '.join(lifting)} keeps the old schedule"
    )


def _with(config: Config, values: dict[str, Any]) -> Config:
    changed = copy.deepcopy(config)
    for key, value in values.items():
        put(changed, key, value)
    return changed
