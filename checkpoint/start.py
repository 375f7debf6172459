"""Decide what a command does in its run_dir: start a run, resume the run there, or refuse. Reads small files, without
torch. `checkpoint.resume` says where a run starts that has not taken a step yet. A run that has taken a step is
resumed, by the same command or by `auto`; any other start is refused. docs/guide/resume.md has the table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from base.errors import ConfigError
from base.files import read_json_lines, read_yaml
from base.ranks import world_size
from checkpoint import kept_tokenizer, manifest, record
from checkpoint.record import Record, last_step
from checkpoint.state_file import read_state
from configs.architecture import architecture, to_architecture
from configs.changes import Change, changes
from configs.compose import load
from configs.keys import get
from configs.rules import first_problem
from configs.schema import KEYS, Config, DataConfig
from configs.show import show_both
from configs.validate import usable_world_size
from configs.values import as_typed
from data.identity import Difference, Identity, differences
from data.tokenizer import tokenizer_digest

# the most keys that the advice names to get the checkpoint's model; beyond that it names only another folder
MAX_ADVISED = 6
# Compared by content if the checkpoint identifies its data: the same data under another name are the same.
BY_CONTENT = ("data.corpus", "data.validation_corpora", "data.text_key", "data.tokenizer")


@dataclass(frozen=True)
class Start:
    """The decision whether a command starts or continues a run, and from which checkpoint. `checkpoint`: the checkpoint
    to load; None for a fresh start."""

    record: Record
    checkpoint: Path | None
    is_new: bool  # no step of this run was taken
    passed_over: tuple[str, ...] = ()  # a line for each checkpoint that is not good

    @property
    def origin(self) -> Path | None:
        """The folder of the other run from whose checkpoint this run started, or None."""
        source = self.record.checkpoint
        return None if source is None else Path(source).parent.parent

    def line(self, step: int) -> str:
        """Return a line that says how the run started, and whether it starts or continues at `step`: the checkpoint's
        step, or 0 without a checkpoint."""
        run = f"run {self.record.id}"
        if not self.is_new:
            again = "was stopped before its first checkpoint, and starts again"
            again = "continues" if step or self.record.checkpoint else again
            return f"{run} {again} at step {step} ({self.record.origin_text})"
        at = f", at step {step}" if self.checkpoint else ""
        return f"{run} {self.record.origin_text.replace('started', 'starts')}{at}"


def find(config: Config, check: manifest.Check = manifest.verify) -> Start:
    """Decide whether a command starts a new run or continues the run in config.run_dir, and from which checkpoint.
    `check` returns a checkpoint's problem, or None; the default reads every byte. Raises ConfigError if the command
    must not start."""
    run_dir = Path(config.run_dir)
    held = record.read(run_dir) or _adopted(run_dir)
    if held is None:
        return _new_run(config, check)
    foreign = [f"{folder.name} ({why})" for folder, why in manifest.foreign_checkpoints(run_dir)]
    if foreign:
        raise ConfigError(
            f"run_dir ({run_dir}) holds run {held.id} and checkpoints of another: {', '.join(foreign)}. "
            f"Move them out of {run_dir / 'checkpoints'}, or choose another run_dir."
        )
    own = manifest.list_checkpoints(run_dir)
    step = max([last_step(run_dir), held.saved, *(int(folder.name[5:]) for folder in own)])
    if step == 0 and not own:
        return _new_run(config, check, held.id)
    holds = f"run_dir ({run_dir}) holds run {held.id} at step {step}"
    resume, weights = record.requested_start(config)
    if resume not in ("auto", held.resume):
        raise ConfigError(
            f"{holds}, which {held.origin_text}, but checkpoint.resume={resume} starts another run. {_ADVICE}."
        )
    if weights not in (None, held.weights):
        raise ConfigError(
            f"{holds}, which {held.origin_text}, but checkpoint.weights={weights} starts another run. {_ADVICE}, "
            "without checkpoint.weights."
        )
    good, passed_over = manifest.newest_good(own, check)
    if good is not None:
        taken, last = int(good.name[5:]), last_step(run_dir)
        if taken > max(last, held.saved) and last > 0:  # a step's metrics are written before its checkpoint
            raise ConfigError(
                f"run_dir ({run_dir}) holds run {held.id} at step {max(last, held.saved)}, but also {good.name}: the "
                f"run did not save this checkpoint, or {record.METRICS} was truncated. Move {good.name} out of "
                f"{run_dir / 'checkpoints'} to resume from the checkpoint before it, or choose another run_dir."
            )
        if taken < held.saved and not any(int(folder.name[5:]) >= held.saved for folder in own):
            passed_over = [*passed_over, f"skipped {manifest.folder_of(run_dir, held.saved)}: it is missing"]
        return Start(held, good, False, tuple(passed_over))
    if own:
        raise ConfigError(
            f"{holds}, and none of its checkpoints is good: {'; '.join(passed_over)}. Restore the files of one, or "
            "choose another run_dir."
        )
    if held.saved:
        raise ConfigError(
            f"{holds}, and its checkpoint of step {held.saved} is missing. Restore it, or choose another run_dir."
        )
    if held.checkpoint is not None:
        return Start(held, _named(held.checkpoint, check), False)
    if weights != held.weights:
        raise ConfigError(
            f"{holds}, which {held.origin_text}, but checkpoint.weights is not given. Give checkpoint.weights="
            f"{held.weights}, or choose another run_dir."
        )
    return Start(held, None, False)


_ADVICE = "Choose another run_dir, or checkpoint.resume=auto to continue this run"


def _new_run(config: Config, check: manifest.Check, run_id: str | None = None) -> Start:
    """Return the start of a run that has taken no step, from the checkpoint or weights in `config`, or fresh."""
    folder: Path | None = None
    passed_over: list[str] = []
    if config.checkpoint.resume not in ("auto", "never"):
        if config.checkpoint.weights is not None:
            raise ConfigError(
                f"checkpoint.weights ({config.checkpoint.weights}) and checkpoint.resume ({config.checkpoint.resume}) "
                "both say where the run starts. Leave one out."
            )
        path = Path(config.checkpoint.resume)
        # a run folder means its newest checkpoint
        if not (path / manifest.MANIFEST).exists() and (path / "checkpoints").is_dir():
            folder, passed_over = manifest.newest_good(manifest.list_checkpoints(path), check)
        if folder is None:
            folder, passed_over = _named(config.checkpoint.resume, check), []
    new_record = record.new(config, folder)
    if run_id is not None:
        new_record = dataclasses.replace(new_record, id=run_id)
    return Start(new_record, folder, True, tuple(passed_over))


def _named(path: str, check: manifest.Check) -> Path:
    folder = Path(path)
    problem = check(folder)
    if problem is not None:
        raise ConfigError(
            f"checkpoint.resume ({path}) is not a good checkpoint: {problem}. Give a folder "
            ".../checkpoints/step_XXXXXXX, a run folder that holds one, auto (the newest good one in run_dir, or a "
            "fresh start) or never."
        )
    return folder


def _adopted(run_dir: Path) -> Record | None:
    """Rebuild the record of a run whose run.json is missing from its checkpoints and events. Returns None for a folder
    without a run. Raises ConfigError."""
    folders, last = manifest.all_checkpoints(run_dir), last_step(run_dir)
    if not folders and last == 0:
        return None
    manifest.list_checkpoints(run_dir)  # of one run
    ids = sorted({run for folder in folders if (run := manifest.run_of(folder)) is not None})
    events = read_json_lines(run_dir / record.EVENTS)
    began: dict[str, Any] = {"resume": "auto", "weights": None, "checkpoint": None}
    try:
        began |= read_yaml(run_dir / manifest.CONFIG)["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        pass  # auto resumes any run
    starts = (event for event in reversed(events) if event.get("kind") == "run_started" and event.get("run") in ids)
    began |= next(starts, {})
    config = Config()
    config.checkpoint.resume, config.checkpoint.weights = str(began["resume"]), began["weights"]
    named = None if config.checkpoint.resume in ("auto", "never") else config.checkpoint.resume
    origin = began["checkpoint"] or named
    found = record.new(config, None if origin is None else Path(origin))
    steps = [event.get("step") for event in events if event.get("kind") == "checkpoint_saved"]
    saved = [step for step in steps if isinstance(step, int)]
    return dataclasses.replace(found, id=ids[0] if ids else found.id, saved=saved[-1] if saved else 0)


def in_new_folder(config: Config) -> str:
    """Return a setting `run_dir=FOLDER` with a free folder next to the config's run_dir, for advice in messages."""
    folders = (f"{config.run_dir}_{number}" for number in itertools.count(2))
    return as_typed("run_dir", next(folder for folder in folders if not Path(folder).exists()))


def data_config(config: Config, start: Start) -> DataConfig:
    """Return the config's data settings with the tokenizer that the checkpoint was trained with, unless the config
    accepts a different tokenizer."""
    accepted = config.checkpoint.accept_changes
    if start.checkpoint is None or "data.tokenizer" in accepted or "data.vocab_size" in accepted:
        return config.data
    kept, named = kept_tokenizer.of_checkpoint(start.checkpoint), config.data.tokenizer
    if kept is None:
        # a tokenizer trained now may be another
        if named == "sentencepiece" and kept_tokenizer.digest_of(start.checkpoint) is None:
            raise _missing_tokenizer(start.checkpoint)
        return config.data  # its content is compared
    if named != "sentencepiece" and (
        Path(named).exists() or named != load(start.checkpoint / manifest.CONFIG).data.tokenizer
    ):
        return config.data  # its content is compared
    return dataclasses.replace(config.data, tokenizer=str(kept))


def _missing_tokenizer(checkpoint: Path) -> ConfigError:
    folder = checkpoint.absolute().parent.parent / kept_tokenizer.FOLDER
    return ConfigError(
        f"{folder} is missing: it held the tokenizer that checkpoint {checkpoint} was trained with, and a newly "
        "trained tokenizer would differ. Restore the folder, or name a copy of it: data.tokenizer=PATH."
    )


def documents_in_text(config: Config, start: Start) -> str:
    """Return the data.documents_in_text of the checkpoint, or the config's value if a change is accepted."""
    if start.checkpoint is None or "data.documents_in_text" in config.checkpoint.accept_changes:
        return config.data.documents_in_text
    sources = read_state(start.checkpoint).get("data", {}).get("sources", [])
    rules = [source["documents_in_text"] for source in sources]
    return next((rule for rule in rules if rule is not None), config.data.documents_in_text)


def check_model(config: Config, vocab_size: int | None, folder: Path) -> None:
    """Raise ConfigError if the checkpoint's model or precision differs from the config's. `vocab_size`: of the config;
    None, if not known yet, is not compared."""
    saved = read_state(folder)
    theirs, size = saved["architecture"], vocab_size or saved["vocab_size"]
    fitting, keys = to_architecture(config, theirs, size)
    if saved["precision"] != config.training.precision:
        fitting.training.precision = keys["training.precision"] = saved["precision"]
    if not keys:
        return
    name, their_value = next(iter(keys.items()))
    section, _, last = name.partition(".")
    our_value = get(config, name)
    if section != "training":
        our_value = architecture(config, size)[section].get(last, our_value)
    works = len(keys) <= MAX_ADVISED and first_problem(fitting, usable_world_size(fitting, world_size())) is None
    typed = " ".join(as_typed(key, value) for key, value in keys.items())
    shown, other = show_both(our_value, their_value)
    raise ConfigError(
        f"{name} ({shown}) differs from the value in checkpoint {folder} ({other}): that is another model. "
        f"Try {f'{typed}, or ' if works else ''}another name or run_dir."
    )


def changed_settings(config: Config, start: Start) -> list[Change]:
    """Return the settings that differ from the checkpoint's. Raises ConfigError for a change that must be listed in
    checkpoint.accept_changes and is not."""
    if start.checkpoint is None:
        first_attempt = Path(config.run_dir) / manifest.CONFIG
        return [] if start.is_new or not first_attempt.is_file() else _changed_since(first_attempt, config)
    found = _changed_since(start.checkpoint / manifest.CONFIG, config)
    known = "data" in read_state(start.checkpoint)
    accepted = config.checkpoint.accept_changes
    refused = [
        change
        for change in found
        if change.on_resume == "refuse" and change.key not in accepted and not (known and change.key in BY_CONTENT)
    ]
    if refused:
        first, keys = refused[0], ",".join(change.key for change in refused)
        more = f" (and {', '.join(change.key for change in refused[1:])})" if len(refused) > 1 else ""
        after, before = show_both(first.after, first.before)
        raise ConfigError(
            f"{first.key} ({after}) was {before} when {start.checkpoint} was written{more}: "
            "training and validation documents, or the order or meaning of samples, would change during the run. Try "
            f"{as_typed(first.key, first.before)}, or checkpoint.accept_changes=[{keys}] to continue anyway."
        )
    return found


def _changed_since(path: Path, config: Config) -> list[Change]:
    """Return the settings that affect the run and differ from the config.yaml at `path`. The settings of the
    architecture are not compared."""
    return [
        change
        for change in changes(load(path), config)
        if change.on_resume != "free"
        and not KEYS[change.key].architecture
        and not (change.key in ("data.corpus", "data.validation_corpora") and _same_files(change.before, change.after))
    ]


def changed_data(config: Config, start: Start, identity: Identity) -> list[Difference]:
    """Return the differences between this job's data (`identity`) and the checkpoint's. Raises ConfigError for a
    difference that must be listed in checkpoint.accept_changes and is not."""
    if start.checkpoint is None:
        return []
    trained = read_state(start.checkpoint).get("data")
    found = [] if trained is None else differences(identity, trained)
    refused = [change for change in found if change.key not in config.checkpoint.accept_changes]
    keys = list(dict.fromkeys(change.key for change in refused))
    if "data.tokenizer" in keys and kept_tokenizer.of_checkpoint(start.checkpoint) is None:
        raise _missing_tokenizer(start.checkpoint)
    if refused:
        raise ConfigError(
            f"{'; '.join(change.text for change in refused)}: the run of {start.checkpoint} would continue with "
            f"other data. Restore the data, or give checkpoint.accept_changes=[{','.join(keys)}] to continue anyway."
        )
    return found


def check_tokenizer(config: Config, start: Start) -> None:
    """Raise ConfigError if data.tokenizer is not the checkpoint's tokenizer. Called before a corpus is read."""
    accepted = "data.tokenizer" in config.checkpoint.accept_changes
    if start.checkpoint is None or config.data.tokenizer == "sentencepiece" or accepted:
        return
    trained = kept_tokenizer.digest_of(start.checkpoint)
    path = Path(data_config(config, start).tokenizer).expanduser()
    if trained is not None and tokenizer_digest(path) != trained:
        raise ConfigError(
            f"data.tokenizer ({config.data.tokenizer}) differs from the tokenizer that {start.checkpoint} "
            "was trained with: token ids would have another meaning. Restore that tokenizer, or choose another run_dir."
        )


def describe_changes(settings: Iterable[Change], data: Iterable[Difference]) -> str:
    """Return a short paragraph that describes how settings and data differ from the checkpoint's, each key once; empty
    if nothing differs."""
    sentences = {change.key for change in data}
    others = (change for change in settings if change.key not in sentences)
    values = [f"{change.key} {' -> '.join(show_both(change.before, change.after))}" for change in others]
    return "; ".join([*values, *(change.text for change in data)])


def _same_files(one: Any, other: Any) -> bool:
    """Return whether two values of data.corpus, or of data.validation_corpora, name the same files."""

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(item) for item in value]
        if isinstance(value, dict):
            return {key: item if key == "weight" else resolved(item) for key, item in value.items()}
        return str(Path(value).expanduser().absolute()) if isinstance(value, str) and value != "stdlib" else value

    return bool(resolved(one) == resolved(other))
