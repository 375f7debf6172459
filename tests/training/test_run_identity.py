"""A run is bound to what it was trained with: real starts in one folder, with something changed in between."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from base.errors import ConfigError
from checkpoint import manifest, record
from checkpoint.state_file import read_state
from configs.schema import Config
from data.tokenizer import train_tokenizer
from tests.distributed import RankError
from tests.training.helpers import Lines, read_metrics, train_on_ranks
from training import status
from training.callbacks.guard import Guard

WORDS = "loss step token layer rank expert train batch river stone paper light north south".split()


def document(seed: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * (seed + 3)) % len(WORDS)] for i in range(400))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(document(i))
    return folder


def start(tmp_path: Path, corpus: Path, steps: int, *more: str, ranks: int = 1, folder: str = "run") -> Lines:
    sizes = [
        "experiment=gpt_tiny",
        "model.num_layers=2",
        "data.vocab_size=340",
        "training.global_batch_size=4",
        "optimizer.decay_steps=50",
    ]
    paths = [f"data.corpus={corpus}", f"data.cache_dir={tmp_path}/cache", f"run_dir={tmp_path / folder}"]
    return train_on_ranks([*sizes, *paths, f"training.steps={steps}", "checkpoint.interval=2", *more], ranks)


def error_of(tmp_path: Path, corpus: Path, *more: str, folder: str = "run") -> str:
    """What a start is refused with; nothing of what was there has changed."""
    before = {
        path: path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file() and path.name != "job.lock"
    }
    with pytest.raises(RankError) as caught:
        start(tmp_path, corpus, 6, *more, folder=folder)
    assert isinstance(caught.value.__cause__, ConfigError), caught.value
    after = {
        path: path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file() and path.name != "job.lock"
    }
    assert before == after
    return str(caught.value.__cause__)


def events(run_dir: Path, kind: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def test_the_tokenizer_stays_when_the_corpus_grows(tmp_path: Path, corpus: Path) -> None:
    run_dir = tmp_path / "run"
    start(tmp_path, corpus, 2)
    kept = (run_dir / "tokenizer" / "tokenizer.model").read_bytes()
    trained = read_state(manifest.folder_of(run_dir, 2))["data"]
    (corpus / "new.txt").write_text("completely different words entirely " * 300)
    message = error_of(tmp_path, corpus)
    assert (
        "data.corpus" in message
        and "has 13 documents, but the run was trained on 12" in message
        and "checkpoint.accept_changes=[data.corpus]" in message
    )
    start(tmp_path, corpus, 4, "checkpoint.accept_changes=[data.corpus]")
    assert (run_dir / "tokenizer" / "tokenizer.model").read_bytes() == kept
    now = read_state(manifest.folder_of(run_dir, 4))["data"]
    assert now["tokenizer"] == trained["tokenizer"] and now["sources"][0]["documents"] == 13
    (event,) = events(run_dir, "settings_changed")
    assert "13 documents" in str(event["text"])


def test_a_touched_corpus_is_the_same_and_another_tokenizer_is_not(tmp_path: Path, corpus: Path) -> None:
    whole = start(tmp_path, corpus, 4, folder="whole")
    start(tmp_path, corpus, 2)
    (corpus / "00.txt").touch()  # found by size and time, it would train a tokenizer anew
    assert start(tmp_path, corpus, 4)[0]["loss"] == whole[2]["loss"]
    moved = shutil.copytree(corpus, tmp_path / "moved")
    (tmp_path / "other").mkdir()
    train_tokenizer([document(i)[::-1] for i in range(12)], 340, tmp_path / "other" / "tokenizer.model")
    assert "data.tokenizer" in error_of(tmp_path, moved, f"data.tokenizer={tmp_path / 'other'}")
    assert "data.vocab_size" in error_of(tmp_path, corpus, "data.vocab_size=350")
    assert [line["step"] for line in start(tmp_path, moved, 6)] == [5, 6]


def test_the_same_command_goes_on_however_the_run_began(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = start(tmp_path, corpus, 2, "checkpoint.resume=never")
    own = record.read(tmp_path / "run")
    rest = start(tmp_path, corpus, 4, "checkpoint.resume=never")
    assert own is not None and f"run {own.id} continues at step 2 (started fresh)" in capfd.readouterr().out
    assert read_metrics(tmp_path / "run") == first + rest and [line["step"] for line in rest] == [3, 4]
    origin = manifest.folder_of(tmp_path / "run", 2)
    by_path = f"checkpoint.resume={origin}"
    third = start(tmp_path, corpus, 4, by_path, folder="branch")
    assert [line["loss"] for line in third] == [line["loss"] for line in rest]
    other = record.read(tmp_path / "branch")
    assert other is not None and other.id != own.id
    start(tmp_path, corpus, 6, by_path, folder="branch")
    assert f"run {other.id} continues at step 4 (started from {origin})" in capfd.readouterr().out
    assert [line["step"] for line in read_metrics(tmp_path / "branch")] == [3, 4, 5, 6]
    for folder, way in (("run", by_path), ("branch", "checkpoint.resume=never")):
        assert "hoose another run_dir, or checkpoint.resume=auto" in error_of(
            tmp_path, corpus, way, folder=folder
        ).replace("Choose", "choose")
    newest = manifest.list_checkpoints(tmp_path / "branch")
    assert {read_state(folder)["run"] for folder in newest} == {other.id}


def test_changed_settings_are_logged(tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (corpus / "table.csv").write_text("a,b\n")
    start(tmp_path, corpus, 2)
    start(tmp_path, corpus, 4, "optimizer.lr=0.0005", "training.micro_batch_size=1")
    assert "it continues with settings that differ from its checkpoint: " in (message := capfd.readouterr().out)
    assert "optimizer.lr 0.001 -> 0.0005" in message and "micro_batch_size" not in message
    assert message.count(f"data: data.corpus={corpus}: it reads 12 .txt; left out: 1 .csv (table.csv)\n") == 2
    (event,) = events(tmp_path / "run", "settings_changed")
    assert event["settings"] == {"optimizer.lr": [0.001, 0.0005], "optimizer.min_lr": [0.0001, 5e-05]}
    assert "learning rate rises" not in message
    start(tmp_path, corpus, 6, "optimizer.lr=0.002")
    (event,) = events(tmp_path / "run", "learning_rate_rises")
    assert "; optimizer.lr=0.0005 optimizer.min_lr=5e-05 keeps the old schedule" in str(event["text"])
    message = error_of(tmp_path, corpus, "optimizer.lr=0.0005", "training.seed=7")
    assert (
        message.startswith("training.seed (7) was 1234 when ")
        and "checkpoint.accept_changes=[training.seed]" in message
    )
    message = error_of(tmp_path, corpus, "optimizer.lr=0.0005", "data.documents_in_text=line")
    assert (
        message.startswith("data.documents_in_text (line) was file when ")
        and "Try data.documents_in_text=file" in message
    )


def test_damaged_checkpoints_are_no_fresh_start(tmp_path: Path, corpus: Path) -> None:
    start(tmp_path, corpus, 4)
    for folder in manifest.list_checkpoints(tmp_path / "run"):
        (folder / "rank_00000.safetensors").write_bytes(b"")
    message = error_of(tmp_path, corpus)
    assert "holds run" in message and "at step 4, and none of its checkpoints is good" in message
    for folder in manifest.list_checkpoints(tmp_path / "run"):
        shutil.rmtree(folder)
    assert "its checkpoint of step 4 is missing" in error_of(tmp_path, corpus)


def test_a_refused_start_leaves_the_status(tmp_path: Path, corpus: Path) -> None:
    start(tmp_path, corpus, 2)
    config = Config()
    config.run_dir = str(tmp_path / "run")
    guard, before = Guard(config), status.read(tmp_path / "run")
    guard.on_error(ConfigError("data.corpus: another one"))
    assert (
        before["state"] == "finished"
        and status.read(tmp_path / "run") == before
        and not events(tmp_path / "run", "rank_lost")
    )


def test_status_names_the_process(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, corpus, 2)
    content = status.read(tmp_path / "run")
    held = record.read(tmp_path / "run")
    assert content["state"] == "finished" and held is not None and held.saved == 2 and held.pid > 0
    capsys.readouterr()
    assert status.main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("finished after step 2: ")
