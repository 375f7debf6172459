"""Figures from measured steps, and back-tests: as functions, and as commands."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest

from base.errors import ConfigError
from benchmarks.speed.clock_backtest import FOLDER
from simulator import backtest
from simulator import fit as command
from simulator.clock.hardware import Hardware, load_hardware
from simulator.fit import fit, kendall, mean_error, predicted
from simulator.measured_steps import COLUMNS, MeasuredStep, read_rows, read_run

SINGLE, MULTI = FOLDER / "single_node.csv", FOLDER / "multi_node.csv"


@pytest.fixture(scope="module")
def stated() -> Hardware:
    return load_hardware("a100_8x").as_stated()


def _few(number: int, seed: int) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    steps = read_rows(SINGLE)
    few = random.Random(seed).sample(steps, number)
    return few, [step for step in steps if step not in few]


def test_twenty_rows_say_much_of_all_others(stated: Hardware) -> None:
    few, others = _few(20, 0)
    found = fit(stated, few, "twenty rows")
    assert mean_error(others, found) < 9 < mean_error(others, stated)
    changed = {name for name, figure in found.figures.items() if figure.stated is not None}
    assert "products.half" in changed and "disk.read" not in changed | {"device.memory"}
    assert found.figures["products.half"].source.startswith("twenty rows; stated: A100 datasheet")


def test_a_fit_finds_the_machine_that_the_steps_are_of(stated: Hardware) -> None:
    true = stated.with_values({"products.half": 1.9e14, "inside.rate": 1.4e11, "launch.operation": 5e-5}, "the truth")
    few, others = _few(30, 1)
    steps = [_with_seconds(step, predicted(step, true)) for step in few]
    of_others = [_with_seconds(step, predicted(step, true)) for step in others]
    assert mean_error(of_others, fit(stated, steps, "made up")) < 1.5


def _with_seconds(step: MeasuredStep, seconds: float) -> MeasuredStep:
    return MeasuredStep(step.name, step.job, seconds, step.recipe)


def test_a_fit_begins_with_what_is_stated(stated: Hardware) -> None:
    few, _ = _few(8, 2)
    once = fit(stated, few, "once")
    again = fit(once, few, "again")
    assert {name: again[name] for name in again.figures} == {name: once[name] for name in once.figures}
    assert again.as_stated().figures == stated.figures


def test_kendall_s_tau() -> None:
    assert kendall([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == 1.0
    assert kendall([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1.0
    assert kendall([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]) == pytest.approx(4 / 6)


def _write_rows(path: Path, **changes: str) -> Path:
    with MULTI.open(newline="") as file:
        line = next(iter(csv.DictReader(file)))
    names = {short: column for column, short in COLUMNS.items()}
    line.update({names[short]: value for short, value in changes.items()})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(line))
        writer.writeheader()
        writer.writerow(line)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": "2"}, r"rows.csv, line 2: tensor x data x pipeline parallelism \(128\) must equal # GPUs \(64\)"),
        ({"micro_batch": "7"}, r"global batch \(512\) must be a multiple of micro batch x data parallelism \(448\)"),
        ({"milliseconds": "fast"}, r"iteration time \(ms\) \('fast'\) must be a number"),
        ({"milliseconds": "-1"}, r"must be a positive number"),
        ({"layers": "30.5"}, r"# layers \('30.5'\) must be a whole number above 0"),
        ({"heads": "33"}, r"attention heads \(33\) must divide the hidden size"),
    ],
)
def test_rows_that_cannot_be_are_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rows(_write_rows(tmp_path / "rows.csv", **changes))


def test_files_without_the_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="it lacks '# GPUs'"):
        read_rows(tmp_path / "other.csv")
    with pytest.raises(ConfigError, match="cannot read"):
        read_rows(tmp_path / "none.csv")


def _run(main: object, line: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["command", *line])
    return main()  # type: ignore[operator, no-any-return]


def test_commands_write_a_file_and_hold_it_to_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, row_file = tmp_path / "mine.yaml", tmp_path / "few.csv"
    row_file.write_text("".join(SINGLE.read_text().splitlines(keepends=True)[:13]))
    line = [str(row_file), "--hardware", str(made)]
    assert _run(command.main, line, monkeypatch) == 0
    first = made.read_text()
    assert _run(command.main, line, monkeypatch) == 0
    assert made.read_text() == first and (tmp_path / "mine.yaml.old").read_text() == first  # nothing is lost
    assert _run(command.main, line, monkeypatch) == 0
    assert (tmp_path / "mine.yaml.old2").exists()
    (error,) = load_hardware(str(made)).errors
    assert error["count"] == 12 and error["mean_absolute_error_percent"] < 8
    capsys.readouterr()
    assert _run(backtest.main, [str(row_file), "--hardware", str(made), "--json", "--rows"], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["mean_absolute_error_percent"] == pytest.approx(error["mean_absolute_error_percent"], abs=0.01)
    assert found["steps"] == 12 and lines[0].startswith("few.csv:2: measured 0.4105 s, predicted 0.")


@pytest.mark.parametrize("main", [command.main, backtest.main])
def test_commands_say_what_is_wrong(
    main: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(main, [str(tmp_path / "none.csv"), "--hardware", "a100_8x"], monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert _run(main, [str(tmp_path), "--hardware", "a100_8x"], monkeypatch) == 2
    assert "must be the folder of a run; it has no config.yaml" in capsys.readouterr().err


def test_a_run_s_folder_is_a_measured_step(tmp_path: Path) -> None:
    from configs.compose import compose, to_yaml

    config = compose(["model=gpt_tiny", "training.device=cpu"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "plan.json").write_text(json.dumps({"world_size": 2, "vocab_size": 500, "device": "cpu"}))
    lines = [{"step": step, "step_seconds": seconds} for step, seconds in enumerate([9.0, 5.0, 1.0, 3.0, 2.0], 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(tmp_path)
    assert (found.job.world_size, found.job.vocab_size, found.job.device) == (2, 500, "cpu")
    assert found.seconds == 2.0  # the first two set up
    assert found.job.config.model == config.model
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="must have measured steps from step 3 on"):
        read_run(tmp_path)
