"""What plan=true, plan=json and plan=search print with a machine: prediction, reasons and back-test; search.json and
traces in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from base.errors import ConfigError
from configs.compose import compose, given_keys
from simulator.clock.prediction import describe_back_tests
from tests.training.test_layout_choice import TINY, searching
from training.report import timeline
from training.starting import choices, plans


def shown(folder: Path, *overrides: str) -> int:
    """Run a plan in this process, of a run in `folder`; the exit status."""
    line = [*TINY, f"run_dir={folder / 'run'}", *overrides]
    return plans.show(compose(line), given_keys(line))


def test_a_plan_for_a_machine_predicts_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(tmp_path, "plan=json", "plan_world_size=2", "parallel.pipeline=2", "hardware=a100_8x") == 0
    plan = json.loads(capsys.readouterr().out)
    step, tokens = plan["predicted_step"], 8 * 64
    assert plan["device"] == "cuda" and step["hardware"] == "a100_8x" and step["back_test"]
    assert step["tokens_per_second"] == pytest.approx(tokens / step["step_seconds"])
    assert sum(each["seconds"] for each in step["reasons"].values()) == pytest.approx(step["step_seconds"])
    (drawn,) = timeline.read_steps(tmp_path / "run", [])
    assert drawn["labels"] == ["stage 0, predicted", "stage 1, predicted"] and drawn["spans"]
    assert shown(tmp_path, "plan=true", "plan_world_size=2", "hardware=a100_8x") == 0
    out = capsys.readouterr().out
    assert "Step time on a100_8x: predicted " in out and "back-test: " in out
    assert str(tmp_path / "run" / "traces_predicted") in out


def test_a_plan_that_a_machine_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan=json", "plan_world_size=8", "hardware=h100_8x", f"run_dir={tmp_path}", "parallel=single"]
    line = ["experiment=llama3_8b", *asked, "optimizer.distributed=false", "parallel.overlap_param_gather=false"]
    with pytest.raises(ConfigError, match=r"needs .* GiB on rank 0 .* but the device's memory is 79\."):
        plans.show(compose(line), given_keys(line))
    assert max(rank["total"] for rank in json.loads(capsys.readouterr().out)["memory_per_rank"]) > 8.49e10


def test_a_plan_without_a_machine_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(tmp_path, "plan=json") == 0
    assert json.loads(capsys.readouterr().out)["predicted_step"] is None and not list(tmp_path.iterdir())


def test_a_search_prints_its_answer_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys that were typed are fixed, those of presets are not; parallel=auto plans what a run would choose."""
    seen: list[Any] = []
    layout = {"parallel.pipeline": 2, "training.micro_batch_size": 2}
    search = searching(layout, seen)
    monkeypatch.setattr(plans, "search_layout", search)
    monkeypatch.setattr(choices, "search_layout", search)
    monkeypatch.setattr(plans, "answer_text", lambda answer: f"the answer for {answer.world_size}")
    arguments = ["plan_world_size=4", "hardware=h100_8x", "training.recompute=full"]
    assert shown(tmp_path, "plan=search", *arguments, "parallel=tp2_sp") == 0
    out = capsys.readouterr().out
    assert "For 4 rank(s) of h100_8x (hardware=h100_8x)" in out and "the answer for 4" in out
    written = json.loads((tmp_path / "run" / "search.json").read_text())
    assert written["best"]["overrides"] == ["parallel.pipeline=2", "training.micro_batch_size=2"]
    assert str(tmp_path / "run" / "search.json") in out
    (world_size, fixed), keys = seen[0], {"run_dir", "plan", "plan_world_size", "hardware", "training.recompute"}
    assert world_size == 4 and keys <= fixed and not any(key.startswith("parallel.") for key in fixed)
    assert shown(tmp_path, "plan=true", *arguments, "parallel=auto") == 0
    out = capsys.readouterr().out
    assert out.startswith("layout: parallel.pipeline=2") and "Layout: pipeline 2" in out


def test_errors_of_back_tests_stand_beside_predictions() -> None:
    assert describe_back_tests(()) == "not held to measured steps"
    error = {"mean_absolute_error_percent": 5.31, "count": 720, "of": "single_node.csv"}
    assert (
        describe_back_tests((error, {"note": "by hand"}))
        == "mean error 5.31% in 720 measured steps (single_node.csv); note by hand"
    )
