"""A run that was stopped and resumed is the run that was not: bit for bit in its layout, within rounding in another
one."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from base.errors import ConfigError
from checkpoint import manifest
from tests.distributed import RankError
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, read_metrics, train_on_ranks

STEPS, STOP = 5, 3
# The schedule is that of the whole run, also in the part that stops early.
SCHEDULE = [f"optimizer.decay_steps={STEPS}", "optimizer.warmup_steps=1"]
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
BITWISE = ("loss", "grad_norm", "learning_rate")
PLAIN = "optimizer.distributed=false"
TP2 = ["parallel.tensor=2", "parallel.sequence=true"]
TP2_EP2 = [*TP2, "parallel.expert=2"]

SAME_LAYOUT = {
    "one process, fp32": (1, ["experiment=gpt_moe_tiny"]),
    "one process, bf16, plain optimizer": (1, ["experiment=bert_moe_tiny", "training.precision=bf16", PLAIN]),
    "EP2, bf16": (2, ["experiment=gpt_moe_tiny", "training.precision=bf16", "parallel.expert=2"]),
    "TP2+SP, fp32, plain optimizer": (2, ["experiment=gpt_moe_tiny", PLAIN, *TP2]),
    "PP2xVPP2, bf16": (
        2,
        ["experiment=bert_tiny", "training.precision=bf16", "parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    ),
    "DP2xTP2, fp32": (4, ["experiment=gpt_tiny", "parallel.tensor=2"]),
}
OTHER_LAYOUT = {
    "TP2 to PP2": ("gpt_tiny", 2, ["parallel.tensor=2"], 2, ["parallel.pipeline=2"]),
    "EP2 to 1": ("gpt_moe_tiny", 2, ["parallel.expert=2"], 1, []),
    "DP2 to 1": ("bert_tiny", 2, [], 1, []),
    "1 to EP2xTP2": ("gpt_moe_tiny", 1, [], 4, TP2_EP2),
    "plain to distributed": ("gpt_moe_tiny", 2, [PLAIN, "parallel.expert=2"], 2, []),
    "distributed to plain": ("bert_moe_tiny", 2, ["parallel.expert=2"], 2, [PLAIN]),
    "ETP1 to ETP2": (
        "gpt_moe_tiny",
        4,
        [*TP2_EP2, "parallel.expert_tensor=1"],
        4,
        [*TP2_EP2, "parallel.expert_tensor=2"],
    ),
    "PP2xVPP2 to PP2": (
        "gpt_moe_tiny",
        2,
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "training.recompute=full"],
        2,
        ["parallel.pipeline=2"],
    ),
}
# What drops as on one process: all, but for attention where tensor ranks share its heads, and for hidden states where
# they share the rows.
DROPPED = {"TP2 to PP2": DROPOUT[:1], "1 to EP2xTP2": [], "ETP1 to ETP2": []}


def run(overrides: list[str], ranks: int, run_dir: Path, steps: int = STEPS) -> Lines:
    return train_on_ranks([*overrides, *SCHEDULE, f"run_dir={run_dir}", f"training.steps={steps}"], ranks)


@pytest.mark.parametrize("case", SAME_LAYOUT)
def test_same_layout_bit_for_bit(data: list[str], tmp_path: Path, case: str) -> None:
    ranks, overrides = SAME_LAYOUT[case]
    overrides = [*overrides, *data, *DROPOUT]
    whole = run([*overrides, "checkpoint=off"], ranks, tmp_path / "whole")
    first = run(overrides, ranks, tmp_path / "stopped", STOP)
    rest = run(overrides, ranks, tmp_path / "stopped")
    assert [line["step"] for line in rest] == list(range(STOP + 1, STEPS + 1))
    for key in BITWISE:
        assert [line[key] for line in first + rest] == [line[key] for line in whole], key
    written = read_metrics(tmp_path / "stopped")
    assert written == first + rest  # each step once, and every float as it was


@pytest.fixture(scope="module")
def undisturbed(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lines]:
    """The one-process run of a model, by its experiment and dropout."""

    @functools.cache
    def of(*overrides: str) -> Lines:
        return run([*overrides, *data, "checkpoint=off"], 1, tmp_path_factory.mktemp("undisturbed"))

    return of


@pytest.mark.parametrize("case", OTHER_LAYOUT)
def test_another_layout(data: list[str], tmp_path: Path, undisturbed: Callable[..., Lines], case: str) -> None:
    model, ranks_before, before, ranks_after, after = OTHER_LAYOUT[case]
    named = [f"experiment={model}", *DROPPED.get(case, DROPOUT)]
    common, whole = [*named, *data], undisturbed(*named)
    first = run([*common, *before], ranks_before, tmp_path, STOP)
    rest = run([*common, *after, "checkpoint.at_end=false"], ranks_after, tmp_path)
    assert [line["step"] for line in first + rest] == list(range(1, STEPS + 1)) and len(rest) == STEPS - STOP
    assert largest_difference(first + rest, whole, "loss") < FP32_LOSS
    assert largest_difference(first + rest, whole, "grad_norm") < FP32_GRAD_NORM


def test_steps_after_the_checkpoint_are_taken_again(data: list[str], tmp_path: Path) -> None:
    overrides = ["experiment=gpt_tiny", *data, "checkpoint.interval=2", "checkpoint.at_end=false"]
    first = run(overrides, 1, tmp_path, 3)
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 4, "loss": 7.')  # what a kill cut off
    again = run(overrides, 1, tmp_path)
    assert [line["step"] for line in again] == [3, 4, 5]
    assert again[0]["loss"] == first[2]["loss"]
    assert read_metrics(tmp_path) == first[:2] + again


@pytest.fixture(scope="module")
def finished(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Overrides and run folder of a run of 4 steps with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    overrides = ["experiment=gpt_tiny", *data, "checkpoint.interval=2"]
    run(overrides, 1, folder, 4)
    assert [path.name for path in manifest.list_checkpoints(folder)] == ["step_0000004", "step_0000002"]
    return overrides, folder


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def truncate(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    with open(shard, "r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)


def drop_manifest(folder: Path) -> None:
    (folder / manifest.MANIFEST).unlink()


def break_manifest(folder: Path) -> None:
    (folder / manifest.MANIFEST).write_text('{"format": 2, "fil')


def drop_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


DAMAGES = {
    empty: f"it has no {manifest.MANIFEST}",
    truncate: ".safetensors has ",
    drop_manifest: f"it has no {manifest.MANIFEST}",
    break_manifest: f"its {manifest.MANIFEST} cannot be read",
    drop_shard: ".safetensors is missing",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_checkpoint(
    finished: tuple[list[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: object
) -> None:
    overrides, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_0000004"
    assert callable(damage)
    damage(newest)
    with pytest.raises(RankError) as caught:
        run([*overrides, f"checkpoint.resume={newest}"], 1, tmp_path / "other")
    assert isinstance(caught.value.__cause__, ConfigError)
    assert str(newest) in str(caught.value.__cause__) and DAMAGES[damage] in str(caught.value.__cause__)
    capfd.readouterr()
    lines = run(overrides, 1, tmp_path / "run")
    assert [line["step"] for line in lines] == [3, 4, 5]
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "skipped" in line]
    assert str(newest) in line and DAMAGES[damage] in line


def test_explicit_paths(finished: tuple[list[str], Path], tmp_path: Path) -> None:
    overrides, folder = finished
    for resume, steps in ((folder, [5]), (folder / "checkpoints" / "step_0000002", [3, 4, 5])):
        lines = run([*overrides, f"checkpoint.resume={resume}", "checkpoint.at_end=false"], 1, tmp_path / resume.name)
        assert [line["step"] for line in lines] == steps
    with pytest.raises(RankError, match="checkpoint.resume .* is not a good checkpoint: no such folder"):
        run([*overrides, f"checkpoint.resume={tmp_path / 'nowhere'}"], 1, tmp_path / "run")


def test_checkpoint_of_another_model(finished: tuple[list[str], Path], tmp_path: Path) -> None:
    """Also under auto: starting afresh in the folder of another run would delete it bit by bit."""
    overrides, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    for name, more in (("run", []), ("other", [f"checkpoint.resume={folder}"])):
        with pytest.raises(
            RankError, match=r"model.num_layers \(2\) differs from the value in checkpoint .* \(4\)"
        ) as caught:
            run([*overrides, *more, "model.num_layers=2"], 1, tmp_path / name)
        assert isinstance(caught.value.__cause__, ConfigError)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_finished_run_says_so(finished: tuple[list[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    overrides, folder = finished
    before = (folder / "metrics.jsonl").read_text()
    assert run(overrides, 1, folder, 4) == []
    assert "is finished: 4 steps are done" in capfd.readouterr().out
    assert (folder / "metrics.jsonl").read_text() == before


def test_old_checkpoints_go(data: list[str], tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / "step_0000009.tmp"
    leftover.mkdir(parents=True)
    run(["experiment=gpt_tiny", *data, "checkpoint.interval=1", "checkpoint.keep=2"], 1, tmp_path, 4)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_0000003", "step_0000004"]
    written = json.loads((tmp_path / "checkpoints" / "step_0000004" / manifest.MANIFEST).read_text())
    assert written["step"] == 4 and "state.json" in written["files"]
