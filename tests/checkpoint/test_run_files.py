"""Damage to the small and growing files of a run's folder is named, and no checkpoint is taken for another run's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from base import checksums, files
from base.errors import ConfigError
from checkpoint import manifest, record, start
from checkpoint.record import Record
from checkpoint.run_files import GrowingFiles, changed
from checkpoint.safetensors_header import Entry, incomplete
from configs.schema import Config
from tests.training.test_start import ID, save, take_steps
from training.resilience.health import SKIPPED, SkippedSamples
from training.starting.choices import read_choice
from training.starting.start_log import log_damaged_files

pytestmark = pytest.mark.fast


def flipped(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content and len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


def run_with(root: Path, steps: list[int]) -> Config:
    run_dir = root / "run"
    take_steps(run_dir, max(steps))
    record.write(run_dir, Record(ID, "auto", saved=max(steps)))
    for step in steps:
        save(run_dir, step)
    config = Config()
    config.run_dir = str(run_dir)
    return config


@pytest.mark.parametrize("damaged", [2, 4, 6])
@pytest.mark.parametrize(
    ("old", "new"), [(ID.encode(), b"0badcafe"), (b'"run"', b'"ran"'), (b'"step": ', b'"stop": '), (b"{", b"[")]
)
def test_a_damaged_state_of_any_checkpoint_blocks_no_resume(
    tmp_path: Path, damaged: int, old: bytes, new: bytes
) -> None:
    config = run_with(tmp_path, [2, 4, 6])
    folder = manifest.folder_of(tmp_path / "run", damaged)
    flipped(folder / manifest.STATE, old, new)
    found = start.find(config)
    assert found.checkpoint == manifest.folder_of(tmp_path / "run", 4 if damaged == 6 else 6)
    passed_over = f"skipped {folder}: its file state.json was changed: its checksum is not the recorded one"
    assert found.passed_over == ((passed_over,) if damaged == 6 else ())


def test_a_whole_checkpoint_of_another_run_is_still_refused(tmp_path: Path) -> None:
    config = run_with(tmp_path, [2, 4])
    shutil.rmtree(manifest.folder_of(tmp_path / "run", 2))
    save(tmp_path / "run", 2, "0badcafe")
    with pytest.raises(ConfigError, match=r"checkpoints of another: step_0000002 \(it is of run 0badcafe\)"):
        start.find(config)


def test_a_flipped_id_of_the_record_is_named_and_the_advice_works(tmp_path: Path) -> None:
    config = run_with(tmp_path, [2])
    path = tmp_path / "run" / record.RECORD
    flipped(path, ID.encode(), b"7f3a91c3")
    with pytest.raises(
        ConfigError,
        match=r"run.json, which says .* belongs to, cannot be read \(it was changed: its checksum.*or delete it \(",
    ):
        start.find(config)
    path.unlink()
    found = start.find(config)
    assert found.record.id == ID and found.checkpoint == manifest.folder_of(tmp_path / "run", 2)


def test_a_record_without_a_checksum_is_named(tmp_path: Path) -> None:
    config = run_with(tmp_path, [2])
    path = tmp_path / "run" / record.RECORD
    content = json.loads(path.read_text())
    del content["xxh3"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"run.json, which says which run .* belongs to, cannot be read \(it contains no checksum\)"
    ):
        start.find(config)


def test_a_record_without_an_id_is_named(tmp_path: Path) -> None:
    checksums.write_summed(tmp_path / record.RECORD, {"resume": "auto"})
    with pytest.raises(
        ConfigError, match=r"run.json, which says .* belongs to, cannot be read \(it lacks 'id'\)\. Restore it"
    ):
        record.read(tmp_path)


def test_growing_files_are_hashed_once_and_compared_by_what_was_there(tmp_path: Path) -> None:
    metrics, plans = tmp_path / "metrics.jsonl", tmp_path / "placement_0_1.plans"
    running = GrowingFiles(tmp_path)
    assert running.sums() == {}
    for end in (b'{"step": 1}\n', b'{"step": 2}\n', b""):
        with open(metrics, "ab") as stream:
            stream.write(end)
        plans.write_bytes(metrics.read_bytes())
        (tmp_path / "layout_chosen.json").touch()
        sums = running.sums()
        whole = {"size": metrics.stat().st_size, "xxh3": xxhash.xxh3_128_hexdigest(metrics.read_bytes())}
        assert sums == {metrics.name: whole, plans.name: whole, "layout_chosen.json": {"size": 0}}
    with open(metrics, "ab") as stream:
        stream.write(b'{"step": 3}\n')
    assert changed(tmp_path, sums) == []
    metrics.write_bytes(b'{"step": 1}\n{"step": 7}\n')
    running.forget()
    assert running.sums()[metrics.name]["xxh3"] == xxhash.xxh3_128_hexdigest(metrics.read_bytes())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]) + b"x" * 40)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "placement_0_0.plans", "routing_stage1.trace"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flipped(path, b"1", b"7"), "differs within its first"),
        (truncate, "has 23 of its 24 bytes"),
        (lose_a_line, "differs within its first 24 bytes"),
        (Path.unlink, "is missing"),
    ],
)
def test_damage_is_named_in_one_line_and_one_event(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_with(tmp_path, [2])
    run_dir = Path(config.run_dir)
    (run_dir / name).write_bytes(b'{"step": 1}\n{"step": 2}\n')
    folder = save(run_dir, 4, facts={"files": GrowingFiles(run_dir).sums()})
    found = start.Start(Record(ID, "auto"), folder, False)
    log_damaged_files(run_dir, found)
    assert capsys.readouterr().out == ""
    damage(run_dir / name)
    log_damaged_files(run_dir, found)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"has lost content that step_0000004 recorded: {name} {words}" in line
    (event,) = [event for event in files.read_json_lines(run_dir / "events.jsonl") if event.get("text") == line]
    assert event["kind"] == "record_incomplete"


def box(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Entry:
    return Entry(key, "F32", shape, (4, 4), offset, 0, 0)


def test_boxes_that_overlap_are_refused_where_their_number_of_elements_is_right() -> None:
    boxes = [box("a", (0, 0), (2, 4)), box("a", (2, 0), (2, 2)), box("a", (2, 2), (2, 2))]
    assert incomplete(boxes) is None
    assert (
        incomplete([*boxes[:2], box("a", (2, 1), (2, 2))]) == "its files hold some elements of a twice, and lack others"
    )
    assert incomplete([box("a", (0, 0), (2, 4)), box("a", (1, 0), (2, 4))]) is not None
    row_boxes = [box("a", (row, 0), (4,)) for row in (3, 0, 2, 1)]  # the first dimension is one wide
    assert incomplete(row_boxes) is None and incomplete([*row_boxes[:3], row_boxes[0]]) is not None


def test_a_choice_that_was_changed_is_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "experts_chosen.json"
    assert read_choice(path, ("a", "b")) is None
    checksums.write_summed(path, {"values": {"a": 1}, "world_size": 2})
    assert read_choice(path, ("a", "b")) == {"values": {"a": 1}, "world_size": 2}
    path.write_text(path.read_text().replace('"a": 1', '"a": 2'))
    with pytest.raises(
        ConfigError,
        match=r"experts_chosen.json, which records .* chose, cannot be read \(it was changed.*or delete it",
    ):
        read_choice(path, ("a", "b"))
    other_keys = {"values": {"a": 1, "optimizer.lr": 1.0}}
    for content in (other_keys, {"world_size": 2}, {"values": [1]}):
        checksums.write_summed(path, content)
        unknown = "its values have the keys optimizer.lr, but may have only a, b"
        reason = unknown if content is other_keys else "it has no object `values` with the chosen keys"
        with pytest.raises(ConfigError, match=reason):
            read_choice(path, ("a", "b"))
    for text in ("", "[1]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_choice(path, ("a", "b"))


def test_a_file_with_its_checksum_next_to_it(tmp_path: Path) -> None:
    path = tmp_path / SKIPPED
    SkippedSamples(tmp_path)._write(True)
    assert checksums.read_with_sum(path) == "[]"
    checksums.write_with_sum(path, "[1]")
    assert checksums.read_with_sum(path) == "[1]"
    path.write_text("[]")  # a kill after the checksum was written, before the file was
    assert checksums.read_with_sum(path) == "[]"
    path.write_text("[2]")
    with pytest.raises(ValueError, match="it was changed"):
        checksums.read_with_sum(path)
    (tmp_path / f"{SKIPPED}.xxh3").unlink()
    assert checksums.read_with_sum(path) == "[2]"
