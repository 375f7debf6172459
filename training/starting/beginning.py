"""What a run says of its start: the checkpoints that it passed over, where it begins, and what is otherwise than
before."""

from __future__ import annotations

from pathlib import Path

from checkpoint import manifest, run_files, start
from checkpoint.record import last_step
from checkpoint.resume import Beginning
from checkpoint.start import Start
from checkpoint.state_file import read_state
from configs.schema import Config
from training.resilience import events, status


def passed_over(run_dir: Path, line: str) -> None:
    """Print and record why a checkpoint is not taken. Rank 0 calls it."""
    print(line, flush=True)
    events.record(run_dir, "checkpoint_passed_over", line)


def name_damage(run_dir: Path, begun: Start) -> None:
    """Print and record which files of the run are not what its checkpoint found them to be. Rank 0 calls it, before
    anybody goes on with them. Raises OSError."""
    folder = begun.checkpoint
    if folder is None or folder.parent.parent.resolve() != run_dir.resolve():
        return
    found = run_files.changed(run_dir, read_state(folder).get("files", {}))
    if found:
        text = (
            f"{run_dir}: not as {folder.name} found it: {'; '.join(found)}. The run goes on without what was lost there"
        )
        events.say(run_dir, events.INCOMPLETE, text)


def say(config: Config, beginning: Beginning, step: int) -> None:
    """Print and record how the run starts. Rank 0 calls it, once the checkpoint's state is taken. Raises OSError."""
    run_dir, found = Path(config.run_dir), beginning.start
    if status.read(run_dir).get("state") == "running" and not found.is_new:  # we hold the folder: that process is gone
        text = "the attempt before this one ended without a word"
        print(text, flush=True)
        events.record(run_dir, "ended_hard", text, step=last_step(run_dir))
    line = found.line(step)
    if found.record.adopted and found.checkpoint is not None and manifest.run_of(found.checkpoint) is None:
        line += (
            "; its checkpoint is of an earlier version, which names neither tokenizer nor data: they are taken "
            "from its folder"
        )
    print(line, flush=True)
    way = {
        "run": found.record.id,
        "resume": found.record.resume,
        "weights": found.record.weights,
        "checkpoint": found.record.checkpoint,
    }
    events.record(run_dir, "run_started" if found.is_new else "run_goes_on", line, step=step, **way)
    if found.checkpoint is not None:
        text = f"resumed from {found.checkpoint} at step {step}"
        print(text, flush=True)
        events.record(run_dir, "resumed", text, step=step)
    changed = start.in_words(beginning.settings, beginning.data)
    if changed:
        before = "checkpoint" if found.checkpoint is not None else "first attempt"
        text = f"it goes on with other settings than its {before}: {changed}"
        print(text, flush=True)
        values = {change.key: [change.before, change.after] for change in beginning.settings}
        events.record(
            run_dir,
            "settings_changed",
            text,
            step=step,
            settings=values,
            data=[change.text for change in beginning.data],
        )
