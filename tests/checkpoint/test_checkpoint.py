"""Saving beside the training, keeping and deleting, what a full disk or a second job does, and the command line."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from base import checksums
from base.errors import ConfigError
from base.files import WriteError
from checkpoint import manifest
from tests import distributed
from tests.test_packages import ROOT
from tests.training.helpers import Lines, make_config, read_metrics, train, train_on_ranks
from tests.training.test_step import batches_of, build, small
from tests.waits import LONG
from training import status
from training.resilience import events

TINY = ["experiment=gpt_moe_tiny", "model.hidden_size=32", "model.num_layers=2"]

# ---------------------------------------------------------------------------------------------------------------------
# Saving beside the training
# ---------------------------------------------------------------------------------------------------------------------


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.bare_chunks[0].named_parameters()}


def save_while_training(config: Any, folder: Path) -> dict[str, Any]:
    """Begin to save after step 1 with a disk that hangs until step 3 is done, then save again. What the threads of
    further saves allocate is counted."""
    from checkpoint.saver import Saver
    from checkpoint.shards import ShardWriter
    from training.progress import Progress, load, state
    from training.step import train_step

    model = build(config)
    train_step(model, batches_of(config, 1), 1)
    at_snapshot = weights_of(model)
    saver, free, write = Saver(config, model.host_link), threading.Event(), ShardWriter.write
    seen: dict[str, Any] = {}

    def slow_write(*args: Any) -> Any:
        free.wait(timeout=LONG)
        return write(*args)

    ShardWriter.write = slow_write  # type: ignore[method-assign, assignment]
    try:
        saver.start(model.chunks, model.optimizer, state(model, Progress(1, 8), {}), folder / "step_0000001")
        steps = [train_step(model, batches_of(config, step), step).loss for step in (2, 3)]
        seen["polled"], seen["pending"] = saver.poll(), saver.pending
        seen["there"] = sorted(path.name for path in folder.glob("step_*"))
        threading.Timer(0.2, free.set).start()
        earlier = saver.start(model.chunks, model.optimizer, state(model, Progress(3, 24), {}), folder / "step_0000003")
        assert earlier is not None and earlier.step == 1 and free.is_set()
        last = saver.finish()
    finally:
        ShardWriter.write = write  # type: ignore[method-assign]
    assert last is not None and last.step == 3 and not saver.pending and saver.finish() is None
    at_end = weights_of(model)
    for name, expected in (("step_0000001", at_snapshot), ("step_0000003", at_end)):
        progress = load(model, folder / name)  # into the model that went on: what a roll back does
        assert all(torch.equal(value, expected[key]) for key, value in weights_of(model).items())
        seen[name] = progress.step
    load(model, folder / "step_0000001")
    assert [train_step(model, batches_of(config, step), step).loss for step in (2, 3)] == steps
    assert all(torch.equal(value, at_end[key]) for key, value in weights_of(model).items())
    with mock.patch.object(checksums, "new_buffer") as buffers:
        tracemalloc.start()
        for step in (4, 5, 6):
            saver.start(
                model.chunks, model.optimizer, state(model, Progress(step, 8), {}), folder / f"step_000000{step}"
            )
            saver.finish()
        seen["buffers"], seen["allocated"] = buffers.call_count, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, precision: str) -> None:
    """What is saved is the state at the snapshot, and a model that went on can be put back to it, bit for bit."""
    config = small(
        "gpt_moe_tiny", "moe.expert_bias=true", "moe.router_score=sigmoid", f"training.precision={precision}", micro=4
    )
    (seen,) = distributed.run(save_while_training, 1, config, tmp_path)
    assert seen["polled"] is None and seen["pending"] and "step_0000001" not in seen["there"]
    assert (seen["step_0000001"], seen["step_0000003"]) == (1, 3)
    # The saver's one buffer serves all: a buffer of each thread would stay with the process.
    assert seen["buffers"] == 0 and seen["allocated"] < checksums.CHUNK_BYTES / 4
    assert all(manifest.verify(tmp_path / name) is None for name in ("step_0000001", "step_0000003"))


def test_announced_only_when_it_is_there(data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for label, more in (("beside", []), ("between", ["checkpoint.async_save=false"])):
        run_dir = tmp_path / label
        train_on_ranks([*TINY, *data, f"run_dir={run_dir}", "checkpoint.interval=2", "training.steps=5", *more], 2)
        announced = [
            line.removeprefix("[rank 0] ") for line in capfd.readouterr().out.splitlines() if "] checkpoint " in line
        ]
        folders = [manifest.folder_of(run_dir, step) for step in (2, 4, 5)]
        assert announced == [f"checkpoint {folder}" for folder in folders]
        saved = [event for event in events.read(run_dir) if event["kind"] == "checkpoint_saved"]
        assert [(event["step"], event["folder"]) for event in saved] == [
            (step, str(manifest.folder_of(run_dir, step))) for step in (2, 4, 5)
        ]
        assert all(event["bytes"] == sum(file.stat().st_size for file in Path(event["folder"]).iterdir()) - (
            Path(event["folder"]) / manifest.MANIFEST).stat().st_size for event in saved)  # fmt: skip
    assert read_metrics(tmp_path / "beside")[-1]["loss"] == read_metrics(tmp_path / "between")[-1]["loss"]


# ---------------------------------------------------------------------------------------------------------------------
# Keeping and deleting
# ---------------------------------------------------------------------------------------------------------------------


def make_checkpoint(run_dir: Path, step: int, text: str = "") -> Path:
    """A good checkpoint folder without tensors."""
    folder = manifest.folder_of(run_dir, step)
    folder.mkdir(parents=True)
    files = {
        manifest.STATE: manifest.write_text(folder / manifest.STATE, json.dumps({"step": step, "text": text})),
        manifest.CONFIG: manifest.write_text(folder / manifest.CONFIG, "name: x\n"),
    }
    manifest.write(folder, step, files)
    assert manifest.verify(folder) is None
    return folder


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(0, 0, range(1, 11)), (2, 0, [9, 10]), (1, 4, [4, 8, 10]), (3, 5, [5, 8, 9, 10]), (20, 3, range(1, 11))],
)
def test_what_is_kept(tmp_path: Path, keep: int, keep_every: int, left: Any) -> None:
    for step in range(1, 11):
        make_checkpoint(tmp_path, step)
    manifest.prune(manifest.folder_of(tmp_path, 10), keep, keep_every)
    assert [int(path.name[5:]) for path in manifest.list_checkpoints(tmp_path)] == sorted(left, reverse=True)


def test_only_what_is_older_and_whole_is_deleted(tmp_path: Path) -> None:
    for step in range(1, 6):
        make_checkpoint(tmp_path, step)
    (manifest.folder_of(tmp_path, 2) / manifest.STATE).unlink()
    manifest.prune(manifest.folder_of(tmp_path, 4), 1, 0)
    assert [int(path.name[5:]) for path in manifest.list_checkpoints(tmp_path)] == [5, 4, 2]


def test_a_step_that_is_saved_again_is_never_gone(tmp_path: Path) -> None:
    """Whatever moment a kill picks: the old one has its name, or gets it back, or the new one has it."""
    folder = make_checkpoint(tmp_path, 3, "old")
    new = make_checkpoint(tmp_path / "elsewhere", 3, "new").rename(folder.with_name("step_0000003.tmp"))
    folder.rename(folder.with_name("step_0000003.replaced"))  # killed here
    manifest.tidy(tmp_path)
    assert json.loads((folder / manifest.STATE).read_text())["text"] == "old"
    assert not new.exists() and [path.name for path in folder.parent.iterdir()] == [folder.name]
    new = make_checkpoint(tmp_path / "again", 3, "new").rename(folder.with_name("step_0000003.tmp"))
    manifest.put_in_place(new, folder)
    assert json.loads((folder / manifest.STATE).read_text())["text"] == "new"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# ---------------------------------------------------------------------------------------------------------------------
# Disks and second jobs
# ---------------------------------------------------------------------------------------------------------------------


def train_on_a_full_disk(config: Any, full: list[int]) -> str:
    """Train with no room on rank 1 for the checkpoints of some steps (Python ignores SIGXFSZ); what this rank
    raised."""
    from checkpoint import shards
    from checkpoint.saver import SaveError

    limit, write = resource.getrlimit(resource.RLIMIT_FSIZE), shards.ShardWriter.write

    def write_until_full(self: Any, path: Path, cancelled: Any) -> Any:
        if os.environ["RANK"] == "1":
            is_full = any(path.parent.name == f"step_{step:07d}.tmp" for step in full)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if is_full else limit[0], limit[1]))
        return write(self, path, cancelled)

    shards.ShardWriter.write = write_until_full  # type: ignore[method-assign]
    try:
        train(config)
    except SaveError as error:
        return str(error)
    finally:
        shards.ShardWriter.write = write  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return "nothing"


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        [*TINY, *data, f"run_dir={tmp_path}", "checkpoint.interval=2", "training.steps=9", "checkpoint.keep=0"], 2
    )
    assert distributed.run(train_on_a_full_disk, 2, config, [4]) == ["nothing"] * 2
    (said,) = [line for line in capfd.readouterr().out.splitlines() if "cannot be written" in line]
    folder = manifest.folder_of(tmp_path, 4)
    assert (
        f"checkpoint {folder} cannot be written (rank 1: {os.strerror(errno.EFBIG)}" in said
        and "Training continues" in said
    )
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["2", "6", "8", "9"]
    assert [event["step"] for event in events.read(tmp_path) if event["kind"] == "checkpoint_saved"] == [2, 6, 8, 9]
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 10))


def test_a_full_disk_at_the_end_ends_every_rank_with_a_clear_line(data: list[str], tmp_path: Path) -> None:
    config = make_config([*TINY, *data, f"run_dir={tmp_path}", "checkpoint.interval=2", "training.steps=5"], 2)
    first, second = distributed.run(train_on_a_full_disk, 2, config, [4, 5])
    assert first == second
    assert first.startswith(
        f"checkpoint {manifest.folder_of(tmp_path, 5)} cannot be written (rank 1: {os.strerror(errno.EFBIG)}"
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_0000002"]
    assert manifest.verify(manifest.folder_of(tmp_path, 2)) is None


def train_while_metrics_cannot_be_written(config: Any) -> Lines:
    """Train on a disk that is full for metrics.jsonl while the checkpoint of step 2 is written, which takes until step
    4, and always full for what the run can do without."""
    from base import files
    from base.files import Log
    from checkpoint import shards
    from checkpoint.saver import Saver
    from simulator import run_plan

    write, line, init = shards.ShardWriter.write, Log.write, Saver.__init__
    text, append = files.write_text, Log.append
    savers: list[Saver] = []

    def slow(self: Any, path: Path, cancelled: Any) -> Any:
        if "step_0000002" in str(path):
            cancelled.wait(timeout=LONG)
        return write(self, path, cancelled)

    def disk_is_full(self: Any, text: str) -> None:
        if any(saver._save is not None and saver._save.step == 2 for saver in savers):
            raise WriteError(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        line(self, text)

    def remember(self: Saver, *arguments: Any) -> None:
        savers.append(self)
        init(self, *arguments)

    def refuse(path: Path, content: Any, function: Any) -> None:
        if path.suffix == ".trace" or path.name in ("environment.json", "plan.json"):
            raise WriteError(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        function(content)

    Log.append = lambda self, content: refuse(Path(self.path), content, lambda c: append(self, c))  # type: ignore
    files.write_text = lambda path, content, **more: refuse(path, content, lambda c: text(path, c, **more))  # type: ignore
    run_plan.write_text = files.write_text  # type: ignore[attr-defined]
    shards.ShardWriter.write, Log.write, Saver.__init__ = slow, disk_is_full, remember  # type: ignore[method-assign, assignment]
    try:
        return train(config)
    finally:
        shards.ShardWriter.write, Log.write, Saver.__init__ = write, line, init  # type: ignore[method-assign]
        files.write_text, run_plan.write_text, Log.append = text, text, append  # type: ignore


def test_an_unfinished_checkpoint_gives_way_to_the_record_of_steps(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [f"run_dir={tmp_path}", "checkpoint.interval=2", "training.steps=6", "moe.placement.record=true"]
    config = make_config([*TINY, *data, *words])
    (lines,) = distributed.run(train_while_metrics_cannot_be_written, 1, config)
    assert [line["step"] for line in read_metrics(tmp_path)] == [line["step"] for line in lines] == list(range(1, 7))
    assert [path.name for path in manifest.list_checkpoints(tmp_path)] == ["step_0000006", "step_0000004"]
    said = capfd.readouterr().out
    assert "metrics.jsonl cannot be written: No space left on device. Free some space" in said
    assert "step_0000002 cannot be written (rank 0: cancelled to free disk space for metrics.jsonl)" in said
    for name in ("routing.trace", "environment.json", "plan.json"):
        assert said.count(f"{tmp_path / name} cannot be written: No space left on device. Free some space") == 1, name


def train_until_the_folder_goes(config: Any) -> str:
    """Train in a run folder that somebody moves away after step 3; what was raised."""
    from base.files import WriteError
    from training.run import Callback, Metrics, Run
    from training.trainer import Trainer

    class Move(Callback):
        def after_step(self, run: Run, metrics: Metrics) -> None:
            if run.progress.step == 3:
                run.run_dir.rename(run.run_dir.with_name("moved"))

    trainer = Trainer(config)
    trainer.callbacks.append(Move())
    try:
        trainer.fit()
    except WriteError as error:
        return str(error)
    return "nothing"


def test_a_run_dir_that_is_moved_away(data: list[str], tmp_path: Path) -> None:
    config = make_config([*TINY, *data, f"run_dir={tmp_path / 'run'}", "checkpoint.interval=1", "training.steps=9"])
    (said,) = distributed.run(train_until_the_folder_goes, 1, config)
    assert said.startswith(f"{tmp_path / 'run'} was deleted, moved or replaced while the run wrote to it. Put it back")
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    assert [line["step"] for line in read_metrics(tmp_path / "moved")] == [1, 2, 3]


def save(model: Any, folder: Path) -> None:
    """Write a checkpoint of a model that has taken no step. Raises SaveError."""
    from checkpoint.saver import Saver
    from training.progress import Progress, state

    saver = Saver(model.config, model.host_link)
    saver.start(model.chunks, model.optimizer, state(model, Progress(), {}), folder)
    saver.finish()


def save_damaged(config: Any, folder: Path) -> str:
    from checkpoint.saver import SaveError

    model = build(config)
    next(iter(model.bare_chunks[0].parameters())).data.view(-1)[0] = float("nan")
    try:
        save(model, folder)
    except SaveError as error:
        return str(error)
    return "nothing"


def test_damaged_weights_are_no_checkpoint(tmp_path: Path) -> None:
    """It would displace good ones, and nothing could go on from it."""
    (said,) = distributed.run(
        save_damaged, 1, small("gpt_moe_tiny", micro=4), tmp_path / "checkpoints" / "step_0000000"
    )
    assert "embedding.word_embeddings.weight must be finite, but contains NaN or infinity" in said and not list(
        (tmp_path / "checkpoints").iterdir()
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, which has room for one checkpoint of gpt_tiny."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no right to mount a file system: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_really_full(data: list[str], small_disk: Path) -> None:
    quiet = [
        "logging=quiet",
        "sample.prompts=[]",
        "training.eval_interval=0",
        "checkpoint.interval=2",
        "checkpoint.keep=0",
    ]
    command = [
        sys.executable,
        "train.py",
        "experiment=gpt_tiny",
        *data,
        *quiet,
        "training.steps=5",
        f"run_dir={small_disk / 'run'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=False)
    newest = manifest.folder_of(small_disk / "run", 5)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"checkpoint {newest} cannot be written (rank 0: No space left on device: {newest}.tmp/"
    )
    assert (
        status.read(small_disk / "run")["state"] == "failed" and str(newest) in status.read(small_disk / "run")["text"]
    )
    assert [path.name for path in newest.parent.iterdir()] == ["step_0000002"] and not list(small_disk.rglob("*.tmp"))
    assert len(read_metrics(small_disk / "run")) == 5


def save_where_nobody_may(config: Any, folder: Path) -> str:
    from checkpoint.saver import SaveError

    model = build(config)
    folder.parent.write_text("a file where the folder should be")
    try:
        save(model, folder)
    except SaveError as error:
        folder.parent.unlink()
        save(model, folder)  # the next one can work again
        return str(error)
    return "nothing"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (said,) = distributed.run(
        save_where_nobody_may, 1, small("gpt_moe_tiny", micro=4), tmp_path / "checkpoints" / "step_0000000"
    )
    assert "cannot be written (rank 0: " in said and "Earlier checkpoints are untouched" in said
    assert manifest.verify(tmp_path / "checkpoints" / "step_0000000") is None


def claim_without_rights(run_dir: Path) -> str:
    from checkpoint.resume import Claim

    os.seteuid(65534)
    try:
        Claim(run_dir)
    except ConfigError as error:
        return str(error)
    finally:
        os.seteuid(0)
    return "nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes rights away from root")
def test_a_read_only_run_dir(tmp_path: Path) -> None:
    (said,) = distributed.run(claim_without_rights, 1, tmp_path)
    assert said.startswith(f"run_dir ({tmp_path}) cannot be written: Permission denied. ")


HOLD = """
import sys, time
from pathlib import Path
from checkpoint.resume import Claim
claim = Claim(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_two_jobs_on_one_run_dir(data: list[str], tmp_path: Path) -> None:
    run = [*TINY, *data, f"run_dir={tmp_path}", "training.steps=2"]
    train_on_ranks([*run, "checkpoint.interval=1"], 1)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(distributed.RankError) as caught:
            train_on_ranks([*run, "training.steps=3"], 2)
        assert isinstance(caught.value.__cause__, ConfigError)
        assert f"run_dir ({tmp_path}) is in use by another job: process {holder.pid} on " in str(caught.value.__cause__)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    finally:
        holder.kill()
        holder.wait(timeout=LONG)
    assert [line["step"] for line in train_on_ranks([*run, "training.steps=3"], 2)] == [3]  # who died holds nothing


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def command_line(*arguments: str) -> int:
    from checkpoint import __main__ as checkpoint

    return checkpoint.main(list(arguments))


def test_command_line(data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    train_on_ranks(
        [*TINY, *data, f"run_dir={run_dir}", "training.steps=4", "checkpoint.interval=2", "parallel.expert=2"], 2
    )

    def call(*arguments: object) -> tuple[int, str]:
        capfd.readouterr()
        (status,) = distributed.run(command_line, 1, *map(str, arguments))
        text = capfd.readouterr().out
        return status, "\n".join(line.removeprefix("[rank 0] ") for line in text.splitlines())

    status, text = call("ls", run_dir)
    assert status == 0 and [line.split()[0] for line in text.splitlines()] == ["step", "2", "4"]
    assert all(line.endswith(" good") for line in text.splitlines()[1:])
    status, text = call("show", run_dir)
    assert status == 0 and "step 4" in text and "num_experts" in text
    assert any(
        line.startswith("optimizer.exp_avg_sq.embedding.word_embeddings.weight") and line.endswith("x 32")
        for line in text.splitlines()
    )
    assert call("convert", run_dir, out)[0] == 0
    again = [*TINY, *data, f"run_dir={tmp_path / 'again'}", f"checkpoint.weights={out}", "training.steps=1"]
    assert train_on_ranks(again, 1)[0]["loss"] < read_metrics(run_dir)[0]["loss"]
    assert call("convert", run_dir, tmp_path / "half", "--dtype", "bfloat16")[0] == 0
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "half", out)]
    assert 1.8 < sizes[1] / sizes[0] < 2.1
    assert call("convert", run_dir, tmp_path / "hf", "--to", "huggingface")[0] == 0
    assert (tmp_path / "hf" / "config.json").exists() and (tmp_path / "hf" / "model.safetensors").exists()
    with open(manifest.folder_of(run_dir, 4) / "rank_00001.safetensors", "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\xff")
    os.truncate(manifest.folder_of(run_dir, 4) / "state.json", 10)
    status, text = call("ls", run_dir)
    assert (
        status == 1
        and text.splitlines()[1].endswith(" good")
        and "state.json has 10 bytes, not" in text.splitlines()[2]
    )
    status, text = call("verify", run_dir)
    assert status == 1 and text.splitlines()[-1] == f"{manifest.folder_of(run_dir, 2)}: good"
    assert "step 2" in call("show", run_dir)[1]  # the newest good one
    assert call("show", manifest.folder_of(run_dir, 4))[0] == call("ls", tmp_path / "nowhere")[0] == 2
