"""What a command does in its run_dir: begin a run, go on with the one that is there, or refuse. Reads small files,
without torch.

`checkpoint.resume` says where a run that has not started begins. A run that has taken a step goes on, by the same
command or by `auto`; any other way to start is refused. docs/guide/resume.md has the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checkpoint import kept_tokenizer, manifest, record
from checkpoint.record import Record, last_step
from checkpoint.state_file import read_state
from configs.architecture import architecture, to_architecture
from configs.changes import Change, changes
from configs.compose import load
from configs.files import read_json_lines, read_yaml
from configs.keys import get
from configs.ranks import world_size
from configs.rules import first_problem
from configs.schema import KEYS, Config, ConfigError, DataConfig
from configs.show import show_both
from configs.validate import usable_world_size
from configs.values import as_typed
from data.identity import Difference, Identity, differences
from data.tokenizer import tokenizer_digest

# keys that another model is turned into the checkpoint's with; with more another folder is the better advice
MAX_ADVISED = 6
# Compared by content where the checkpoint names its data: the same data under another name are the same.
BY_CONTENT = ("data.corpus", "data.validation_corpora", "data.text_key", "data.tokenizer")


@dataclass(frozen=True)
class Start:
    """How a command starts. `checkpoint`: whose state it takes; None: from the beginning."""

    record: Record
    checkpoint: Path | None
    is_new: bool  # nobody has taken a step of this run
    passed_over: tuple[str, ...] = ()  # a line for each checkpoint that is not good

    @property
    def origin(self) -> Path | None:
        """The folder of the run that this one began from."""
        began = self.record.checkpoint
        return None if began is None else Path(began).parent.parent

    def line(self, step: int) -> str:
        """What is said of it, once the step is known that the checkpoint is of."""
        run = f"run {self.record.id}"
        if not self.is_new:
            again = (
                "goes on at"
                if step or self.record.checkpoint
                else "was stopped before its first checkpoint, and begins again at"
            )
            return f"{run} {again} step {step} ({self.record.began})"
        return f"{run} {self.record.began.replace('started', 'starts')}" + (
            f", at step {step}" if self.checkpoint else ""
        )


def find(config: Config, check: manifest.Check = manifest.verify) -> Start:
    """What the command of `config` does in its run_dir. `check` says what is wrong with a checkpoint; the default reads
    every byte.

    Raises ConfigError where it must not start so.
    """
    run_dir = Path(config.run_dir)
    held = record.read(run_dir) or _adopted(run_dir)
    if held is None:
        return _begin(config, check)
    foreign = [f"{folder.name} ({why})" for folder, why in manifest.foreign_checkpoints(run_dir)]
    if foreign:
        raise ConfigError(
            f"run_dir ({run_dir}) holds run {held.id} and checkpoints of another: {', '.join(foreign)}. "
            f"Move them out of {run_dir / 'checkpoints'}, or choose another run_dir."
        )
    own = manifest.list_checkpoints(run_dir)
    step = max([last_step(run_dir), held.saved, *(int(folder.name[5:]) for folder in own)])
    if step == 0 and not own:
        return _begin(config, check, held.id)
    holds = f"run_dir ({run_dir}) holds run {held.id} at step {step}"
    resume, weights = record.way(config)
    if resume not in ("auto", held.resume):
        raise ConfigError(f"{holds}, which {held.began}, and checkpoint.resume={resume} begins another. {_ADVICE}.")
    if weights not in (None, held.weights):
        raise ConfigError(
            f"{holds}, which {held.began}, and checkpoint.weights={weights} begins another. {_ADVICE}, without that "
            "key."
        )
    good, passed_over = manifest.newest_good(own, check)
    if good is not None:
        taken, last = int(good.name[5:]), last_step(run_dir)
        if taken > max(last, held.saved) and last > 0:  # a step's metrics are written before its checkpoint
            raise ConfigError(
                f"run_dir ({run_dir}) holds run {held.id} at step {max(last, held.saved)}, and {good.name}, which it "
                f"has not saved, or {record.METRICS} was cut off. Move {good.name} out of {run_dir / 'checkpoints'} to "
                "go on from the one before, or choose another run_dir."
            )
        if taken < held.saved and not any(int(folder.name[5:]) >= held.saved for folder in own):
            passed_over = [*passed_over, f"passed over {manifest.folder_of(run_dir, held.saved)}: it is gone"]
        return Start(held, good, False, tuple(passed_over))
    if own:
        raise ConfigError(
            f"{holds}, and none of its checkpoints is good: {'; '.join(passed_over)}. Mend one, or choose another "
            "run_dir."
        )
    if held.saved:
        raise ConfigError(
            f"{holds}, and its checkpoint of step {held.saved} is gone. Put it back, or choose another run_dir."
        )
    if held.checkpoint is not None:
        folder = _named(held.checkpoint, check)
        return Start(held, folder, False)
    if weights != held.weights:
        raise ConfigError(
            f"{holds}, which {held.began}, and checkpoint.weights is not given. Give it again, or choose another "
            "run_dir."
        )
    return Start(held, None, False)


_ADVICE = "Choose another run_dir, or checkpoint.resume=auto to go on with this one"


def _begin(config: Config, check: manifest.Check, run_id: str | None = None) -> Start:
    """A run that nobody has taken a step of: the command says where it begins."""
    folder: Path | None = None
    passed_over: list[str] = []
    if config.checkpoint.resume not in ("auto", "never"):
        if config.checkpoint.weights is not None:
            raise ConfigError(
                f"checkpoint.weights ({config.checkpoint.weights}) and checkpoint.resume ({config.checkpoint.resume}) "
                "both say where the run begins. Leave one out."
            )
        folder, passed_over = _from_path(config.checkpoint.resume, check)
    begun = record.new(config, folder)
    if run_id is not None:
        begun = dataclasses.replace(begun, id=run_id)
    return Start(begun, folder, True, tuple(passed_over))


def _from_path(path: str, check: manifest.Check) -> tuple[Path, list[str]]:
    """The checkpoint that checkpoint.resume=PATH stands for. Raises ConfigError for a path that is none."""
    folder = Path(path)
    # a run folder stands for its newest
    if not (folder / manifest.MANIFEST).exists() and (folder / "checkpoints").is_dir():
        good, passed_over = manifest.newest_good(manifest.list_checkpoints(folder), check)
        if good is not None:
            return good, passed_over
    return _named(path, check), []


def _named(path: str, check: manifest.Check) -> Path:
    folder = Path(path)
    problem = check(folder)
    if problem is not None:
        raise ConfigError(
            f"checkpoint.resume ({path}) is no checkpoint: {problem}. Give a folder .../checkpoints/step_XXXXXXX, a "
            "run folder that holds one, auto (the newest good one in run_dir, or a fresh start) or never."
        )
    return folder


def _adopted(run_dir: Path) -> Record | None:
    """Return the record of a run whose run.json is gone, from its checkpoints and events; None for a folder without a
    run. Raises ConfigError."""
    folders, last = manifest.all_checkpoints(run_dir), last_step(run_dir)
    if not folders and last == 0:
        return None
    manifest.list_checkpoints(run_dir)  # of one run
    ids = sorted({run for folder in folders if (run := manifest.run_of(folder)) is not None})
    told = read_json_lines(run_dir / record.EVENTS)
    began: dict[str, Any] = {"resume": "auto", "weights": None, "checkpoint": None}
    try:
        began |= read_yaml(run_dir / manifest.CONFIG)["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        pass  # auto goes on with any run
    began |= next(
        (event for event in reversed(told) if event.get("kind") == "run_started" and event.get("run") in ids), {}
    )
    config = Config()
    config.checkpoint.resume, config.checkpoint.weights = str(began["resume"]), began["weights"]
    origin = began["checkpoint"] or (
        None if config.checkpoint.resume in ("auto", "never") else config.checkpoint.resume
    )
    found = record.new(config, None if origin is None else Path(origin))
    saved = [
        event["step"]
        for event in told
        if event.get("kind") == "checkpoint_saved" and isinstance(event.get("step"), int)
    ]
    return dataclasses.replace(found, id=ids[0] if ids else found.id, saved=saved[-1] if saved else 0)


def in_new_folder(config: Config) -> str:
    """A run_dir beside that of `config` that no run has, as it is typed: for what a run that has started refuses."""
    number = 2
    while Path(f"{config.run_dir}_{number}").exists():
        number += 1
    return as_typed("run_dir", f"{config.run_dir}_{number}")


# ---------------------------------------------------------------------------------------------------------------------
# What differs from the checkpoint
# ---------------------------------------------------------------------------------------------------------------------


def data_config(config: Config, start: Start) -> DataConfig:
    """The data settings to prepare with: those of the config, and the tokenizer that the checkpoint was trained
    with."""
    accepted = config.checkpoint.accept_changes
    if start.checkpoint is None or "data.tokenizer" in accepted or "data.vocab_size" in accepted:
        return config.data
    kept, named = kept_tokenizer.of_checkpoint(start.checkpoint), config.data.tokenizer
    if kept is None:
        # one trained today may be another
        if named == "sentencepiece" and kept_tokenizer.digest_of(start.checkpoint) is None:
            raise _missing_tokenizer(start.checkpoint)
        return config.data  # its content is compared
    if named != "sentencepiece" and (
        Path(named).exists() or named != load(start.checkpoint / manifest.CONFIG).data.tokenizer
    ):
        return config.data  # its content is compared
    return dataclasses.replace(config.data, tokenizer=str(kept))


def _missing_tokenizer(checkpoint: Path) -> ConfigError:
    place = checkpoint.absolute().parent.parent / kept_tokenizer.FOLDER
    return ConfigError(
        f"{place} is missing: the tokenizer that the checkpoint {checkpoint} was trained with, and one trained today "
        "is another. Put it back, or name it: data.tokenizer=PATH."
    )


def documents_in_text(config: Config, start: Start) -> str:
    """Return data.documents_in_text as the checkpoint has it, unless another value is accepted."""
    if start.checkpoint is None or "data.documents_in_text" in config.checkpoint.accept_changes:
        return config.data.documents_in_text
    sources = read_state(start.checkpoint).get("data", {}).get("sources", [])
    rules = [source["documents_in_text"] for source in sources]
    return next((rule for rule in rules if rule is not None), config.data.documents_in_text)


def check_model(config: Config, vocab_size: int | None, folder: Path) -> None:
    """Raise ConfigError when the checkpoint is of another model than the config's, or in another precision.

    vocab_size: None where it is not known yet, and taken for the checkpoint's.
    """
    saved = read_state(folder)
    theirs, size = saved["architecture"], vocab_size or saved["vocab_size"]
    fitting, keys = to_architecture(config, theirs, size)
    if saved["precision"] != config.training.precision:
        fitting.training.precision = keys["training.precision"] = saved["precision"]
    if not keys:
        return
    name, their_value = next(iter(keys.items()))
    section, _, last = name.partition(".")
    our_value = (
        architecture(config, size)[section].get(last, get(config, name)) if section != "training" else get(config, name)
    )
    works = len(keys) <= MAX_ADVISED and first_problem(fitting, usable_world_size(fitting, world_size())) is None
    typed = " ".join(as_typed(key, value) for key, value in keys.items())
    shown, other = show_both(our_value, their_value)
    raise ConfigError(
        f"{name} ({shown}) differs from the checkpoint {folder} ({other}), which is of another model. "
        f"Try {f'{typed}, or ' if works else ''}another name or run_dir."
    )


def changed_settings(config: Config, start: Start) -> list[Change]:
    """What the config says otherwise than the checkpoint's. Raises ConfigError for what must be accepted by name and is
    not."""
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
            "training and validation documents, or the order or meaning of samples, would change under the run. Try "
            f"{as_typed(first.key, first.before)}, or checkpoint.accept_changes=[{keys}] to go on all the same."
        )
    return found


def _changed_since(path: Path, config: Config) -> list[Change]:
    """What means something to the run and is otherwise than in a config.yaml. The architecture is compared by itself,
    spelled out."""
    return [
        change
        for change in changes(load(path), config)
        if change.on_resume != "free"
        and not KEYS[change.key].architecture
        and not (change.key in ("data.corpus", "data.validation_corpora") and _same_place(change.before, change.after))
    ]


def changed_data(config: Config, start: Start, identity: Identity) -> list[Difference]:
    """What the data are otherwise than what the checkpoint was trained on. Raises ConfigError for what must be
    accepted by name and is not."""
    if start.checkpoint is None:
        return []
    trained = read_state(start.checkpoint).get("data")
    found = [] if trained is None else differences(identity, trained)
    refused = [change for change in found if change.key not in config.checkpoint.accept_changes]
    if (
        any(change.key == "data.tokenizer" for change in refused)
        and kept_tokenizer.of_checkpoint(start.checkpoint) is None
    ):
        raise _missing_tokenizer(start.checkpoint)
    if refused:
        keys = ",".join(dict.fromkeys(change.key for change in refused))
        raise ConfigError(
            f"{'; '.join(change.text for change in refused)}: the run of {start.checkpoint} would go on with other "
            f"data. Put them back, or checkpoint.accept_changes=[{keys}] to go on all the same."
        )
    return found


def check_tokenizer(config: Config, start: Start) -> None:
    """Raise ConfigError, before a corpus is touched, for a named tokenizer that is not the checkpoint's."""
    if (
        start.checkpoint is None
        or config.data.tokenizer == "sentencepiece"
        or "data.tokenizer" in config.checkpoint.accept_changes
    ):
        return
    trained = kept_tokenizer.digest_of(start.checkpoint)
    place = Path(data_config(config, start).tokenizer).expanduser()
    if trained is not None and tokenizer_digest(place) != trained:
        raise ConfigError(
            f"data.tokenizer ({config.data.tokenizer}) has other content than the tokenizer that {start.checkpoint} "
            "was trained with: its weights would read other tokens. Put that one back, or begin another run."
        )


def in_words(settings: Iterable[Change], data: Iterable[Difference]) -> str:
    """One short paragraph of what differs, each key once; empty where nothing does."""
    sentences = {change.key: change.text for change in data}
    values = [
        f"{change.key} {' -> '.join(show_both(change.before, change.after))}"
        for change in settings
        if change.key not in sentences
    ]
    return "; ".join([*values, *(change.text for change in data)])


def _same_place(one: Any, other: Any) -> bool:
    """Whether two values of data.corpus, or of data.validation_corpora, name the same files."""

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(item) for item in value]
        if isinstance(value, dict):
            return {key: item if key == "weight" else resolved(item) for key, item in value.items()}
        return str(Path(value).expanduser().absolute()) if isinstance(value, str) and value != "stdlib" else value

    return bool(resolved(one) == resolved(other))
