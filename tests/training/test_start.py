"""What a command does in a run_dir: the table of docs/guide/resume.md is the oracle."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from base.errors import ConfigError
from checkpoint import kept_tokenizer, manifest, record, start
from checkpoint.record import Record
from checkpoint.state_file import read_state
from configs.changes import Change, on_resume
from configs.compose import to_yaml
from configs.keys import get
from configs.rules import idle
from configs.schema import KEYS, Config
from data.tokenizer import load_tokenizer, tokenizer_digest, train_tokenizer
from tests.waits import until
from training import status
from training.resilience import events

pytestmark = pytest.mark.fast

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "resume.md"
ID, OTHER_ID = "7f3a91c2", "0badcafe"
# folders beside run_dir that a command may name
PATHS = {"the path it started from": "source", "another path": "elsewhere"}


def save(run_dir: Path, step: int, run: str | None = ID, facts: dict[str, Any] | None = None) -> Path:
    """A checkpoint without tensors, good by names and sizes."""
    folder = manifest.folder_of(run_dir, step)
    folder.mkdir(parents=True)
    state = {
        "step": step,
        "consumed_samples": 8 * step,
        "health": {},
        "vocab_size": 384,
        "precision": "fp32",
        "layout": {},
        "optimizer_steps": step,
    }
    content = {
        **state,
        "architecture": {},
        "loss_scaler": None,
        **(facts or {}),
        **({} if run is None else {"run": run}),
    }
    texts = {manifest.STATE: json.dumps(content), manifest.CONFIG: to_yaml(Config())}
    manifest.write(folder, step, {name: manifest.write_text(folder / name, text) for name, text in texts.items()})
    return folder


def take_steps(run_dir: Path, steps: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i + 1, "loss": 1.0}) + "\n" for i in range(steps))
    )


def started_run(root: Path, resume: str, steps: int = 3) -> Path:
    """A run by auto, never or a path that has taken steps and saved nothing."""
    run_dir = root / "run"
    take_steps(run_dir, steps)
    origin = str(manifest.folder_of(root / "source", 5)) if resume == "path" else None
    named = str(root / "source") if resume == "path" else resume
    record.write(run_dir, Record(ID, named, checkpoint=origin))
    return run_dir


def damage(folder: Path) -> None:
    (folder / manifest.CONFIG).write_text("short")


def of_another_format(folder: Path) -> None:
    content = json.loads((folder / manifest.MANIFEST).read_text())
    content["format"], content["xxh3"] = 3, None
    del content["xxh3"]
    content["xxh3"] = manifest.own_sum(content)
    (folder / manifest.MANIFEST).write_text(json.dumps(content))


def nothing(root: Path) -> None:
    (root / "run").mkdir()


def without_a_step(root: Path) -> None:
    started_run(root, "never", steps=0)


def by(resume: str, good: bool) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        run_dir = started_run(root, resume)
        if good:
            save(run_dir, 3)

    return make


def without_its_record(root: Path) -> None:
    take_steps(root / "run", 3)
    save(root / "run", 3)
    (root / "run" / "config.yaml").write_text(to_yaml(Config()))


def newest_damaged(root: Path) -> None:
    save(started_run(root, "auto"), 2)
    damage(save(root / "run", 3))


def all_damaged(root: Path) -> None:
    for step in (2, 3):
        damage(save(root / "run", step))
    started_run(root, "auto")


def gone(root: Path) -> None:
    run_dir = started_run(root, "auto")
    record.write(run_dir, Record(ID, "auto", saved=2))


def newest_of_another_format(root: Path) -> None:
    save(started_run(root, "auto"), 2)
    of_another_format(save(root / "run", 3))


def with_another_runs(root: Path) -> None:
    save(started_run(root, "auto"), 3)
    save(root / "run", 2, run=OTHER_ID)


def of_two_runs(root: Path) -> None:
    save(root / "run", 3)
    save(root / "run", 2, run=OTHER_ID)


FOLDERS: dict[str, Callable[[Path], None]] = {
    "nothing": nothing,
    "a run without a step": without_a_step,
    **{
        f"a run started {'from a path' if resume == 'path' else f'with {resume}'}, "
        f"{'a good checkpoint' if good else 'no checkpoint yet'}": by(resume, good)
        for resume in ("auto", "never", "path")
        for good in (False, True)
    },
    "a run without its run.json, a good checkpoint": without_its_record,
    "a run whose newest checkpoint is damaged": newest_damaged,
    "a run whose checkpoints are all damaged": all_damaged,
    "a run whose checkpoints are gone": gone,
    "a run whose newest checkpoint is of another format": newest_of_another_format,
    "a run, and a checkpoint of another run": with_another_runs,
    "checkpoints of two runs, and no run.json": of_two_runs,
}


def table() -> list[tuple[str, str, str]]:
    """(what run_dir holds, the command, the outcome) of each cell of the guide's table."""
    guide_rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in GUIDE.read_text().splitlines()
        if line.startswith("|")
    ]
    commands = [cell.strip("`") for cell in guide_rows[0][1:]]
    return [
        (row[0], command, outcome) for row in guide_rows[2:] for command, outcome in zip(commands, row[1:], strict=True)
    ]


def test_the_guide_has_every_folder() -> None:
    assert {holds for holds, _, _ in table()} == set(FOLDERS)


@pytest.mark.parametrize(("holds", "command", "outcome"), table())
def test_the_table(tmp_path: Path, holds: str, command: str, outcome: str) -> None:
    for name in PATHS.values():
        save(tmp_path / name, 5, run="feedbeef")
    FOLDERS[holds](tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    config = Config()
    config.run_dir = str(tmp_path / "run")
    config.checkpoint.resume = str(tmp_path / PATHS[command]) if command in PATHS else command
    origin = manifest.folder_of(tmp_path / PATHS.get(command, "source"), 5)
    if outcome == "error":
        with pytest.raises(ConfigError) as caught:
            start.find(config)
        assert "\n" not in str(caught.value) and str(tmp_path / "run") in str(caught.value)
    else:
        found = start.find(config, manifest.problem_with)
        line, newest = (
            found.line(5 if found.checkpoint == origin else 3),
            manifest.folder_of(tmp_path / "run", 2 if "damaged" in holds else 3),
        )
        expected: dict[str, tuple[Path | None, bool, str]] = {
            "starts fresh": (None, True, "starts fresh"),
            "starts from it": (origin, True, f"starts from {origin}, at step 5"),
            "starts again": (origin if "a path" in holds else None, False, ""),
            "resumes": (newest, False, "continues at step 3 (started "),
        }
        assert (found.checkpoint, found.is_new) == expected[outcome][:2] and expected[outcome][2] in line
        assert holds == "nothing" or found.record.id == ID
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_readers_take_their_own_runs_checkpoints(tmp_path: Path) -> None:
    save(started_run(tmp_path, "auto"), 3)
    save(tmp_path / "run", 40, run=OTHER_ID)
    assert manifest.checkpoints_at(tmp_path / "run") == [manifest.folder_of(tmp_path / "run", 3)]
    manifest.prune(manifest.folder_of(tmp_path / "run", 3), 1, 0)
    assert manifest.folder_of(tmp_path / "run", 40).is_dir()


def test_a_broken_record_is_no_new_run(tmp_path: Path) -> None:
    save(started_run(tmp_path, "auto"), 3)
    (tmp_path / "run" / record.RECORD).write_text("{")
    config = Config()
    config.run_dir = str(tmp_path / "run")
    with pytest.raises(ConfigError, match="which says which run the folder belongs to"):
        start.find(config)


# ---------------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------------

IDENTITY: dict[str, Any] = {"tokenizer": "t", "split": {"rule": "hash", "fraction": 0.02}, "sources": []}


def other_value(config: Config, name: str) -> object:
    """A legal value of a key that is not the config's."""
    key, value = KEYS[name], get(config, name)
    if key.choices:
        return next(choice for choice in key.choices if choice != value)
    if bool in key.kinds:
        return not value
    if int in key.kinds:
        return (value or 2) + 1
    if float in key.kinds:
        return (value or 0.5) / 2
    others: dict[str, object] = {"data.corpus": "other.txt", "data.tokenizer": "other.model"}
    return {**others, "data.validation_corpora": {"other": "other.txt"}}.get(name, "other")


SHARED = [name for name, key in KEYS.items() if not key.architecture and len(key.choices) != 1]


def changed_to(name: str, value: object) -> Config:
    config = Config()
    section, _, last = name.rpartition(".")
    setattr(get(config, section) if section else config, last, value)
    return config


@pytest.mark.parametrize("known", [True, False], ids=["known by content", "names no data"])
def test_another_value_of_each_key(tmp_path: Path, known: bool) -> None:
    folder = save(tmp_path / "run", 3, facts={"data": IDENTITY} if known else {})
    found = start.Start(Record(ID, "auto"), folder, False)
    outcomes = set()
    for name in SHARED if known else start.BY_CONTENT:
        after, meaning = changed_to(name, other_value(Config(), name)), KEYS[name].on_resume
        if idle.has_no_effect(name, Config()) and idle.has_no_effect(name, after):
            meaning = "free"
        refused = meaning == "refuse" and not (known and name in start.BY_CONTENT)
        if refused:
            with pytest.raises(ConfigError) as caught:
                start.changed_settings(after, found)
            assert str(caught.value).startswith(f"{name} (") and f"checkpoint.accept_changes=[{name}]" in str(
                caught.value
            )
            after.checkpoint.accept_changes = [name]
        changed = next((change for change in start.changed_settings(after, found) if change.key == name), None)
        # A change may mean less than the key can: the steps of a run whose schedule does not look at its end.
        assert changed is None or (
            changed.on_resume == meaning and start.describe_changes([changed], []).startswith(f"{name} ")
        )
        assert changed is not None or meaning == "free" or on_resume(name, Config(), after) == "free"
        outcomes.add((meaning, changed is None))
    assert (
        {("free", True), ("say", False), ("refuse", False)} <= outcomes
        if known
        else outcomes == {("refuse", False), ("free", True)}
    )


def test_a_validation_corpus_more_or_less_is_logged(tmp_path: Path) -> None:
    def with_corpora(corpora: dict[str, str]) -> Config:
        config = changed_to("data.validation_corpora", corpora)
        config.training.eval_interval = 1
        return config

    before = with_corpora({"a": "a.txt", "b": "b.txt"})
    for corpora, meaning in (
        ({"a": "a.txt"}, "say"),
        ({"b": "b.txt", "a": "a.txt", "c": "c.txt"}, "say"),
        ({"a": "other.txt", "b": "b.txt"}, "refuse"),
    ):
        assert on_resume("data.validation_corpora", before, with_corpora(corpora)) == meaning


def test_data_are_known_by_content(tmp_path: Path) -> None:
    config = Config()
    source = {
        "name": "a",
        "weight": None,
        "documents": 3,
        "documents_in_text": None,
        "train": {"tokens": 9, "digest": "x"},
        "valid": {"tokens": 1, "digest": "y"},
        "files": None,
        "python": None,
        "text": None,
    }
    trained = {**IDENTITY, "sources": [source]}
    folder = save(tmp_path / "run", 3, facts={"data": trained})
    found = start.Start(Record(ID, "auto"), folder, False)
    moved = {**IDENTITY, "sources": [{**source, "name": "b"}]}
    assert start.changed_data(config, found, trained) == start.changed_data(config, found, moved) == []
    grown = {**IDENTITY, "sources": [{**source, "documents": 4, "train": {"tokens": 12, "digest": "z"}}]}
    (tmp_path / "run" / "tokenizer").mkdir()
    train_tokenizer([f"words {i}" for i in range(50)], 330, tmp_path / "run" / "tokenizer" / "tokenizer.model")
    trained["tokenizer"] = tokenizer_digest(tmp_path / "run" / "tokenizer")
    (folder / manifest.STATE).write_text(json.dumps({**read_state(folder), "data": trained}))
    for identity, key in (
        ({**grown, "tokenizer": trained["tokenizer"]}, "data.corpus"),
        ({**trained, "tokenizer": "u"}, "data.tokenizer"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}.*checkpoint.accept_changes=\[{key}\]"):
            start.changed_data(config, found, identity)
        config.checkpoint.accept_changes = [key]
        (difference,) = start.changed_data(config, found, identity)
        assert (
            difference.key == key
            and start.describe_changes([Change(key, 1, 2, "refuse")], [difference]) == difference.text
        )


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def trained_tokenizer(folder: Path, words: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer([f"{words} {words[::-1]} {i}" for i in range(50)], 330, folder / "tokenizer.model")
    return folder


def test_a_run_goes_on_with_its_own_tokenizer(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", trained_tokenizer(tmp_path / "other", "qwerty")
    kept = trained_tokenizer(run_dir / "tokenizer", "abcdef")
    digest = tokenizer_digest(kept)
    folder = save(tmp_path / "run", 3, facts={"data": {**IDENTITY, "tokenizer": digest}})
    found, config = start.Start(Record(ID, "auto"), folder, False), Config()
    assert start.data_config(config, found).tokenizer == str(kept)
    config.data.tokenizer = str(other)
    with pytest.raises(ConfigError, match="differs from the tokenizer that"):
        start.check_tokenizer(config, found)
    config.checkpoint.accept_changes = ["data.tokenizer"]
    start.check_tokenizer(config, found)
    assert start.data_config(config, found).tokenizer == str(other)


def test_an_exchanged_tokenizer_stays_for_older_checkpoints(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    old, new = (
        load_tokenizer(trained_tokenizer(tmp_path / name, words))
        for name, words in (("old", "abcdef"), ("new", "qwerty"))
    )
    folders = []
    for step, tokenizer in ((3, old), (4, new)):
        kept_tokenizer.keep(run_dir, tokenizer)
        folders.append(save(run_dir, step, facts={"data": {**IDENTITY, "tokenizer": tokenizer.digest}}))
    found = [kept_tokenizer.of_checkpoint(folder) for folder in folders]
    assert [tokenizer_digest(folder) for folder in found if folder] == [old.digest, new.digest]
    trained_tokenizer(run_dir / "tokenizer", "poiuyt")
    with pytest.raises(ConfigError, match="tokenizer.model differs from the tokenizer that checkpoint"):
        kept_tokenizer.of_checkpoint(folders[1])


# ---------------------------------------------------------------------------------------------------------------------
# Is it at work?
# ---------------------------------------------------------------------------------------------------------------------


def test_a_dead_run_does_not_say_running_for_ever(tmp_path: Path) -> None:
    status.write(tmp_path, "running", 7, "running")
    held = Record(ID, "auto", **record.this_process(), heartbeat=time.time())
    cases = {
        "running": held,
        "died": dataclasses.replace(held, process_started=held.process_started - 60),  # another process has its pid
    }
    for state, found in cases.items():
        record.write(tmp_path, found)
        assert status.now(tmp_path)["state"] == state
    for age, state in ((1.0, "running"), (2 * record.SILENCE, "died")):
        record.write(tmp_path, dataclasses.replace(held, host="elsewhere", heartbeat=time.time() - age))
        assert status.now(tmp_path)["state"] == state
    assert "elsewhere" in status.now(tmp_path)["text"]


def test_a_keeper_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "HEARTBEAT", 0.01)
    keeper = record.Keeper(tmp_path, Record(ID, "auto", heartbeat=0.0))
    keeper.note(saved=5)
    first = record.read(tmp_path)
    until(lambda: record.read(tmp_path) != first, "a sign of life")
    later = record.read(tmp_path)
    keeper.close()
    assert (
        first is not None
        and later is not None
        and first.saved == later.saved == 5
        and later.heartbeat > first.heartbeat
    )
    assert record.is_alive(later) and not list(tmp_path.glob("*.tmp"))


# ---------------------------------------------------------------------------------------------------------------------
# What a new user found
# ---------------------------------------------------------------------------------------------------------------------


def asking(root: Path, **checkpoint: object) -> Config:
    config = Config()
    config.run_dir = str(root / "run")
    for key, value in checkpoint.items():
        setattr(config.checkpoint, key, value)
    return config


def test_a_checkpoint_whose_tokenizer_is_gone_is_not_given_another(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 3, None), save(tmp_path / "new", 3, facts={"data": IDENTITY})
    with pytest.raises(ConfigError, match="tokenizer is missing.*data.tokenizer=PATH"):  # nothing says which one it was
        start.data_config(Config(), start.Start(Record(ID, "auto"), old, False))
    named = changed_to("data.tokenizer", "mine.model")
    assert start.data_config(named, start.Start(Record(ID, "auto"), old, False)) is named.data
    found = start.Start(Record(ID, "auto"), new, False)  # this one names it: what is trained today is compared with it
    assert start.data_config(Config(), found) == Config().data and start.changed_data(Config(), found, IDENTITY) == []
    with pytest.raises(ConfigError, match="tokenizer is missing.*data.tokenizer=PATH"):
        start.changed_data(Config(), found, {**IDENTITY, "tokenizer": "u"})


def test_accepting_one_key_of_the_data_hides_no_other(tmp_path: Path) -> None:
    source = {
        "name": "a",
        "weight": None,
        "documents": 3,
        "documents_in_text": None,
        "train": {"tokens": 9, "digest": "x"},
        "valid": {"tokens": 1, "digest": "y"},
        "files": None,
        "python": None,
        "text": None,
    }
    trained = {**IDENTITY, "sources": [{**source, "text": "t1"}]}
    split = {**source, "train": {"tokens": 8, "digest": "z"}, "valid": {"tokens": 2, "digest": "w"}}
    now = {**IDENTITY, "split": {"rule": "hash", "fraction": 0.1}, "sources": [{**split, "text": "t1"}]}
    found = start.Start(Record(ID, "auto"), save(tmp_path / "run", 3, facts={"data": trained}), False)
    config = asking(tmp_path, accept_changes=["data.validation_fraction"])
    assert [change.key for change in start.changed_data(config, found, now)] == ["data.validation_fraction"]
    now["sources"] = [{**split, "text": "t2"}]
    with pytest.raises(ConfigError, match="the text of a is not what the run was trained on"):
        start.changed_data(config, found, now)


def test_weights_with_another_start_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "source", 5, run="feedbeef")
    with pytest.raises(ConfigError, match="both say where the run starts"):
        start.find(asking(tmp_path, weights="w", resume=str(tmp_path / "source")), manifest.problem_with)
    save(started_run(tmp_path, "auto"), 3)
    with pytest.raises(ConfigError, match="checkpoint.weights=.*other starts another run"):
        start.find(asking(tmp_path, weights="other"), manifest.problem_with)


def test_a_run_that_begins_again_says_what_is_otherwise(tmp_path: Path) -> None:
    run_dir = started_run(tmp_path, "auto")
    (run_dir / manifest.CONFIG).write_text(to_yaml(Config()))
    config = asking(tmp_path)
    config.training.seed, config.optimizer.lr = 7, 0.5
    found = start.find(config)
    description = start.describe_changes(start.changed_settings(config, found), [])
    assert (
        found.checkpoint is None
        and not found.is_new
        and description == "training.seed 1234 -> 7; optimizer.lr 0.001 -> 0.5"
    )


def test_what_events_and_metrics_tell_of_a_folder(tmp_path: Path) -> None:
    take_steps(tmp_path / "run", 8)
    events.record(tmp_path / "run", "checkpoint_saved", "step 8 is saved", step=8)
    with pytest.raises(ConfigError, match="its checkpoint of step 8 is missing"):  # no run.json, no checkpoint
        start.find(asking(tmp_path))
    save(tmp_path / "run", 4)
    found = start.find(asking(tmp_path), manifest.problem_with)
    assert found.passed_over == (f"skipped {manifest.folder_of(tmp_path / 'run', 8)}: it is missing",)
    save(tmp_path / "run", 12)  # of a copy of the run that went on elsewhere: it has the same id
    with pytest.raises(
        ConfigError,
        match="at step 8, but also step_0000012: the run did not save this checkpoint, or metrics.jsonl was truncated",
    ):
        start.find(asking(tmp_path), manifest.problem_with)


def test_a_lost_record_comes_back_from_the_events(tmp_path: Path) -> None:
    origin = save(tmp_path / "source", 5, run="feedbeef")
    take_steps(tmp_path / "run", 3)
    save(tmp_path / "run", 3)
    way = {"run": ID, "resume": str(tmp_path / "source"), "weights": None, "checkpoint": str(origin)}
    events.record(tmp_path / "run", "run_started", "", step=5, **way)
    found = start.find(asking(tmp_path, resume=str(tmp_path / "elsewhere" / ".." / "source")), manifest.problem_with)
    assert (found.record.id, found.record.resume, found.record.checkpoint) == (
        ID,
        str(tmp_path / "source"),
        str(origin),
    )


def test_the_same_architecture_may_be_spelled_out(tmp_path: Path) -> None:
    found = start.Start(Record(ID, "auto"), save(tmp_path / "run", 3), False)
    config = asking(tmp_path)
    config.model.num_query_groups, config.model.vocab_size = config.model.num_attention_heads, 384
    assert start.changed_settings(config, found) == []


def test_tokenizers_are_exchanged_there_and_back(tmp_path: Path) -> None:
    both = [
        load_tokenizer(trained_tokenizer(tmp_path / name, words)) for name, words in (("a", "abcdef"), ("b", "qwerty"))
    ]
    for tokenizer in (*both, *both):
        kept_tokenizer.keep(tmp_path / "run", tokenizer)
        assert tokenizer_digest(tmp_path / "run" / "tokenizer") == tokenizer.digest
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert kept == sorted(["tokenizer", *(f"tokenizer-{tokenizer.digest[:8]}" for tokenizer in both)])


@pytest.mark.parametrize(
    "content", ["[]", '{"id": 3, "resume": "auto"}', '{"id": "a", "resume": "auto", "heartbeat": null}', '{"id": "a"']
)
def test_a_record_of_another_shape_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / record.RECORD).write_text(content)
    with pytest.raises(ConfigError, match="run.json, which says which run .* belongs to, cannot be read"):
        record.read(tmp_path)


def test_values_are_shown_as_they_are_typed(tmp_path: Path) -> None:
    found = start.Start(Record(ID, "auto"), save(tmp_path / "run", 3), False)
    with pytest.raises(
        ConfigError, match=r"data.corpus \(my books/a b.txt\) was stdlib when .* Try data.corpus=stdlib, or "
    ):
        start.changed_settings(changed_to("data.corpus", "my books/a b.txt"), found)
