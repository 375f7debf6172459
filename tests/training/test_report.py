"""The report of a run: its numbers are the run's, missing parts are said, nothing is loaded, and a browser draws it
without complaint."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kit.browser import Browser, chromium
from benchmarks.speed.observability_cost import made_up_run
from simulator.clock.prediction import PlannedSpan, Prediction
from simulator.clock.trace import trace_path, write_traces
from tests.training.helpers import read_metrics
from tests.waits import LONG
from training.callbacks.logging import environment
from training.report import sources, timeline
from training.report.__main__ import main
from training.report.metrics import scalars
from training.report.page import markup, render
from training.report.page.charts import MAX_STEPS, thin
from training.report.page.facts import _duration
from training.report.page.layers import MAX_CELLS, primaries_of
from training.resilience import events

SECTIONS = {"loss", "speed", "experts", "placement", "plans", "timeline", "memory", "tiers", "events", "run"}


class Page(HTMLParser):
    """What a browser would find in the text: the embedded numbers, the sections' text, and whatever it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: dict[str, str] = {}
        self.charts: set[str] = set()
        self.scripts = 0
        self._section, self._in_data, self._data = "", False, ""
        self.feed(text)
        self.data: dict[str, Any] = json.loads(self._data)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.loads += [
            str(named[name])
            for name in ("src", "href", "srcset", "action", "data")
            if not str(named.get(name, "#")).startswith("#")
        ]
        if tag == "section":
            self._section = str(named["id"])
        if named.get("class") == "chart":
            self.charts.add(str(named["id"]))
        self.scripts += tag == "script"
        self._in_data = named.get("id") == "report-data"

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self._data += data
        elif self._section:
            self.text[self._section] = self.text.get(self._section, "") + data


def make(run_dir: Path) -> Page:
    return Page(render.write(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    made_up_run(folder, steps=60, layers=3, experts=8, ranks=4, spans=200)
    return folder


def test_every_section_has_its_numbers(run_dir: Path) -> None:
    found, lines = make(run_dir), read_metrics(run_dir)
    assert set(found.text) == SECTIONS and found.data["missing"] == {}
    assert found.data["steps"] == [line["step"] for line in lines]
    curves = found.data["curves"]
    keys = (
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "step_seconds",
        "data_wait_seconds",
        "mfu",
        "aux_loss",
        "z_loss",
    )
    assert set(keys) <= set(curves)
    for key, curve in curves.items():
        if not key.startswith("moe_"):
            assert curve == [scalars(line).get(key) for line in lines], key
    assert {f"grad_norm_by_part/{model_part}" for model_part in lines[0]["grad_norm_by_part"]} <= set(curves)
    assert ("validation: wiki.v2", "valid/wiki.v2/loss") in {
        (series["name"], series["key"]) for series in found.data["charts"]["loss"][0]["series"]
    }
    assert "Last validation loss of wiki.v2" in dict(found.data["facts"])
    assert {"validation_loss", "memory/host", "memory/disk", "step_seconds_percentiles/p99"} <= set(curves)
    drawn = {
        series["key"] for charts in found.data["charts"].values() for chart in charts for series in chart["series"]
    }
    assert set(keys) <= drawn
    moved, waited, kept = (chart["series"] for chart in found.data["charts"]["tiers"])
    assert [series["name"] for series in moved[:2]] == ["to the device", "from the device"] and len(moved) == 4
    assert [series["key"] for series in waited] == ["expert_tiers/wait_seconds"]
    assert [series["name"] for series in kept] == ["staging, host", "weights, disk", "gradients, disk"]
    by_position, by_length = found.data["buckets"]
    assert by_position["heads"] == ["Position", "validation, step 50", "wiki.v2, step 50"]
    last = lines[49]["validation_loss_by_position"]
    assert by_position["rows"] == [[name, last[name], last[name]] for name in ("0", "1", "2-3")]
    assert [row[0] for row in by_length["rows"]] == ["2-3", "16-31"] and len(by_length["heads"]) == 2
    assert "Validation loss by length of the document's piece" in found.text["loss"]


def test_expert_loads_are_the_runs(run_dir: Path) -> None:
    found, lines = make(run_dir).data, read_metrics(run_dir)
    layers = found["layers"]
    assert layers["layers"] == [0, 1, 2] and layers["windows"] == [[step, step] for step in range(1, 61)]
    busiest = next(picture for picture in layers["pictures"] if picture["key"] == "max_over_mean")
    for line, column in zip(lines, busiest["columns"], strict=True):
        assert column == pytest.approx(line["tokens_per_expert"]["max_over_mean"], rel=1e-4)
    for line, window in zip(lines, found["experts"]["percent"], strict=True):
        counts = line["tokens_per_expert"]["counts"]
        assert window == [[round(100 * tokens * 8 / sum(layer)) for tokens in layer] for layer in counts]


def test_placement_shows_loads_before_and_after_and_the_primaries(run_dir: Path) -> None:
    found, lines = make(run_dir).data, read_metrics(run_dir)
    busiest, gain, copies_chart = found["charts"]["placement"]
    assert [series["name"] for series in busiest["series"]] == ["without placement", "with placement"]  # on one scale
    for picture, key in zip(found["ranks"]["pictures"], ("ranks_at_home", "ranks_placed"), strict=True):
        assert picture["columns"][7] == pytest.approx(lines[7]["placement"][key], rel=1e-4)
    assert [series["name"] for series in gain["series"]] == ["predicted", "measured, in rows"]
    assert found["curves"]["placement/copies"] == [line["placement"]["copies"] for line in lines]
    assert [series["key"] for series in copies_chart["series"]] == ["placement/copies", "placement/moved"]
    pictures = {picture["key"]: picture for picture in found["layers"]["pictures"]}
    for key in ("at_home", "placed", "copies"):
        assert pictures[key]["columns"][7] == pytest.approx(lines[7]["moe_layers"][key], rel=1e-4)
    primaries = found["homes"]["ranks"]
    assert primaries[8] == [[0] * 8] * 3  # in order; expert parallelism over one rank in this made-up run
    assert primaries[9] == primaries[-1] == [[expert % 4 for expert in range(8)]] * 3


def test_primaries_open_on_the_layer_that_moved_first() -> None:
    in_order, swapped = [0, 0, 1, 1], [0, 1, 0, 1]
    moves = [{}, {"homes": [in_order, in_order, swapped]}, {"homes": [swapped, in_order, swapped]}]
    counts = {"counts": [[1, 1, 1, 1]] * 3}
    lines = [{"step": i, "tokens_per_expert": counts, "placement": move} for i, move in enumerate(moves)]
    source = sources.RunFiles(Path(), config={"parallel": {"expert": 2}}, metrics=lines)
    opened = [primaries_of(dataclasses.replace(source, metrics=lines[:count])) for count in (3, 1)]
    assert [primaries["first"] if primaries else None for primaries in opened] == [2, 0]


def test_the_page_opens_the_layer_that_moved(tmp_path: Path) -> None:
    made_up_run(tmp_path / "run", steps=12, layers=3, experts=8, ranks=4, spans=0)
    lines = read_metrics(tmp_path / "run")
    for line in lines:
        if "homes" in line["placement"]:
            line["placement"]["homes"][:2] = [[0] * 8] * 2
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = render.write(tmp_path / "run").read_text(encoding="utf-8")
    assert re.findall(r'<option value="(\d)" selected>', text) == ["2"]


def test_many_ranks_are_a_picture_and_not_as_many_lines(tmp_path: Path) -> None:
    made_up_run(tmp_path / "run", steps=4, layers=2, experts=64, ranks=64, spans=0)
    found = make(tmp_path / "run")
    assert all(len(chart["series"]) <= 10 for charts in found.data["charts"].values() for chart in charts)
    assert all(len(column) == 64 for picture in found.data["ranks"]["pictures"] for column in picture["columns"])
    assert {"ranks-0", "ranks-1", "homes-chart", "memory-1"} <= found.charts
    state = [series["name"] for series in found.data["memory"]["state"]["series"]]
    assert state == ["optimizer state, device", "optimizer state, host", "layer inputs, host"]  # none on the disk


def test_every_axis_says_what_it_shows(run_dir: Path) -> None:
    found = make(run_dir).data
    charts = [chart for charts in found["charts"].values() for chart in charts]
    assert all(len(chart["unit"]) > 2 for chart in [*charts, found["plans"]["chart"], found["memory"]["chart"]])
    assert all(picture["unit"] for picture in found["layers"]["pictures"])
    axes = [line for line in (render.ASSETS / "page.js").read_text().splitlines() if re.search(r"\b[xy]Axis: ", line)]
    assert len(axes) > 8
    assert [line for line in axes if not any(sign in line for sign in ("name:", "upright(", "stepAxis()"))] == []


def test_many_layers_and_experts_are_averaged_over_steps(tmp_path: Path) -> None:
    made_up_run(tmp_path / "run", steps=50, layers=40, experts=128, ranks=1, spans=0)
    found, lines = make(tmp_path / "run").data, read_metrics(tmp_path / "run")
    windows, percent = found["experts"]["windows"], found["experts"]["percent"]
    assert sum(len(layer) for window in percent for layer in window) <= MAX_CELLS and len(windows) < 50
    # Together they are all steps, each once.
    assert [step for first, last in windows for step in range(first, last + 1)] == list(range(1, 51))
    (first, last), layer, expert = windows[1], 7, 100
    counts = [line["tokens_per_expert"]["counts"][layer] for line in lines[first - 1 : last]]
    share = 100 * 128 * sum(row[expert] for row in counts) / sum(sum(row) for row in counts)
    assert percent[1][layer][expert] == round(share)


def test_long_runs_keep_their_spikes() -> None:
    lines = [
        {"step": step, "loss": 3.0 + (step == 4321) * 7, "step_seconds": 0.1 + (step == 777)}
        for step in range(1, 20_001)
    ]
    kept = thin(lines)
    assert len(kept) <= MAX_STEPS and {1, 777, 4321, 20_000} <= {line["step"] for line in kept}
    assert [line["step"] for line in kept] == sorted(line["step"] for line in kept)
    assert thin(lines[:2000]) == lines[:2000]


def predicted(run_dir: Path, stages: int, ranks: int) -> None:
    """The traces of a predicted step of 0.4 s a stage."""
    spans = [
        span
        for stage in range(stages)
        for span in (
            PlannedSpan(f"stage {stage}: compute", "forward 0 of chunk 1", 0.0, 0.1),
            PlannedSpan(f"stage {stage}: compute", "experts", 0.02, 0.05),
            PlannedSpan(f"stage {stage}: compute", "what no trace names", 0.1, 0.2),
            PlannedSpan(f"stage {stage}: compute", "update", 0.3, 0.1),
            PlannedSpan(f"stage {stage}: link between nodes", "gradient reduction", 0.2, 0.1),
        )
    ]
    prediction = Prediction(0.4, {"products": 0.4}, "h100_8x", tuple(spans))
    paths = write_traces(prediction, run_dir, range(0, ranks, ranks // stages))
    assert len(paths) == stages and all(path.is_file() for path in paths)


def test_a_predicted_step_stands_below_the_ranks_of_its_stage(run_dir: Path, tmp_path: Path) -> None:
    """A prediction opens as a traced step does, both over each other, from the same begin; alone too, and one that
    cannot be read is said."""
    run_copy = tmp_path / "run"
    shutil.copytree(run_dir, run_copy)
    predicted(run_copy, stages=2, ranks=4)
    (step,) = make(run_copy).data["timeline"]
    assert step["labels"] == ["rank 0", "rank 1", "stage 0, predicted", "rank 2", "rank 3", "stage 1, predicted"]
    found = {(lane, timeline.NAMES[name], start, length) for lane, name, start, length in step["spans"]}
    for row in (2, 5):
        assert {
            (3 * row, "forward", 0.0, 100_000.0),
            (3 * row + 1, "experts", 20_000.0, 50_000.0),
            (3 * row, "other", 100_000.0, 200_000.0),
            (3 * row, "optimizer", 300_000.0, 100_000.0),
            (3 * row + 2, "message", 200_000.0, 100_000.0),
        } <= found
    measured = {row["rank"]: row for row in step["summary"]}
    assert measured["0"]["working"] > 0 and measured["stage 0, predicted"]["working"] == 400_000.0
    assert (3 * 3, "forward") in {(lane, name) for lane, name, _, _ in found}  # rank 2, behind the first stage's row

    predicted(tmp_path / "planned", stages=1, ranks=1)
    (alone,) = make(tmp_path / "planned").data["timeline"]
    assert (alone["step"], alone["labels"], alone["ranks"]) == ("predicted", ["stage 0, predicted"], [])
    assert alone["microseconds"] == 400_000.0
    path = trace_path(tmp_path / "planned", 0, 0)
    path.write_bytes(path.read_bytes()[:50])
    noted: list[str] = []
    assert timeline.read_steps(tmp_path / "planned", noted) == [] and noted == [
        f"{path.name} cannot be read and is left out."
    ]


def test_timeline_shows_every_rank(run_dir: Path) -> None:
    (step,) = make(run_dir).data["timeline"]
    assert step["step"] == 30 and step["ranks"] == [0, 1, 2, 3] and step["left_out"] == 0
    lanes = {(span[0], timeline.NAMES[span[1]]) for span in step["spans"]}
    for rank in range(4):
        expected = [
            (0, "forward"),
            (0, "pipeline exchange"),
            (0, "optimizer"),
            (1, "experts"),
            (1, "dispatch"),
            (2, "message"),
        ]
        assert {(3 * rank + lane, name) for lane, name in expected} <= lanes
    for summary in step["summary"]:
        assert 0 < summary["waiting"] < summary["working"] < step["microseconds"]
        assert 0 < summary["hidden"] < summary["messages"]
    # Rank 1 began 100 us after rank 0: clocks are common, not each rank's own.
    assert min(span[2] for span in step["spans"] if span[0] // 3 == 1) == pytest.approx(100, abs=1)


def test_times_on_the_device_count_where_there_are_some(tmp_path: Path) -> None:
    import gzip

    def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}

    host, device = event("user_annotation", "experts", 10, 1), event("gpu_user_annotation", "experts", 50, 20)
    nccl = [event("kernel", "ncclDevKernel_SendRecv(x)", start, 10) for start in (60, 65)]
    path = tmp_path / "step_0000005_rank_00000.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [host, device, *nccl]}).encode()))
    experts, message = timeline.NAMES.index("experts"), timeline.NAMES.index("message")
    assert timeline.read_trace(path) == [(1, experts, 50, 70), (2, message, 60, 75)]


def test_memory_stands_beside_the_plan(run_dir: Path) -> None:
    found, lines = make(run_dir), read_metrics(run_dir)
    peaks = [line["memory"]["device_peak_by_rank"] for line in lines if "device_peak_by_rank" in line["memory"]][-1]
    plan = json.loads((run_dir / "plan.json").read_text())["memory_per_rank"]
    assert [row["peak"] for row in found.data["memory"]["ranks"]] == peaks
    assert [row["plan"]["total"] for row in found.data["memory"]["ranks"]] == [rank["total"] for rank in plan]
    assert f"{peaks[2] / 2**30:.3f}" in found.text["memory"]


def test_events_and_names_are_text_not_markup(run_dir: Path, tmp_path: Path) -> None:
    run_copy = tmp_path / "run"
    shutil.copytree(run_dir, run_copy)
    events.record(run_copy, "loss_spike", "<script>alert('x')</script> & </script>", step=7)
    (run_copy / "config.yaml").write_text("name: '<img src=https://example.com/x.png>'\n")
    found = make(run_copy)
    assert found.loads == ["data:,"] and found.scripts == 3
    assert "<script>alert('x')</script> & </script>" in found.text["events"]
    assert found.data["events"][-1] | {"time": ""} == {
        "time": "",
        "rank": 0,
        "kind": "loss_spike",
        "text": "<script>alert('x')</script> & </script>",
        "step": 7,
    }
    assert found.data["title"] == "<img src=https://example.com/x.png>"


def test_missing_numbers_are_noted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: nothing yet\nmoe: {num_experts: null}\n")
    empty = make(tmp_path)
    assert set(empty.data["missing"]) == SECTIONS - {"run"} and "No environment.json" in empty.text["run"]
    assert (
        "No steps yet" in empty.text["loss"]
        and "dense" in empty.text["experts"]
        and "No traces" in empty.text["timeline"]
    )
    made_up_run(tmp_path / "dense", steps=5, layers=0, experts=8, ranks=1, spans=0)
    for name in ("plan.json", "events.jsonl"):
        (tmp_path / "dense" / name).unlink()
    dense = make(tmp_path / "dense")
    assert set(dense.data["missing"]) == {"experts", "placement", "plans", "timeline", "tiers", "events"}
    assert "moe.weights_device is device" in dense.text["tiers"]
    assert "No plan.json" in dense.text["memory"] and "dense" in dense.text["plans"]


def test_panels_without_numbers_are_left_out(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made_up_run(folder, steps=3, layers=0, experts=8, ranks=1, spans=0)
    lines = [
        {k: v for k, v in line.items() if k not in ("mfu", "memory", "grad_norm")} for line in read_metrics(folder)
    ]
    lines = [
        line | {"grad_norm_by_part": {}, "memory": {"host": 5, "disk": 0, "device": 7, "device_peak": 9}}
        for line in lines
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "events.jsonl").write_text(json.dumps({"time": 1.7e9, "kind": "note", "text": "without a step"}))
    found = make(folder)
    assert found.charts == {"loss-0", "loss-2", "speed-0", "speed-1", "speed-2", "memory-0", "memory-ranks"}
    assert (
        "No gradient norm in metrics.jsonl. No auxiliary losses" in found.text["loss"]
        and "No MFU" in found.text["speed"]
    )
    assert [series["name"] for series in found.data["memory"]["chart"]["series"]] == [
        "device, peak",
        "device, in use",
        "host",
    ]
    assert "dropped_share" not in {picture["key"] for picture in make(run_dir).data["layers"]["pictures"]}
    assert "No tokens were dropped" in make(run_dir).text["experts"]


def test_numbers_of_a_table_are_aligned() -> None:
    text = markup._table(
        ["Step", "Kind", "Nothing", "Size"], [[1, "a<b", None, 2.0], [20_000, "c", None, None], [None, "d", None, 1234]]
    )
    assert re.findall(r"<th( class=.number.)?>(.*?)</th>", text) == [
        (' class="number"', "Step"),
        ("", "Kind"),
        (' class="number"', "Size"),
    ]
    cells = re.findall(r"<td( class=.number.)?>(.*?)</td>", text)
    assert [text for _, text in cells] == ["1", "a&lt;b", "2.000", "20,000", "c", "-", "-", "d", "1,234.000"]
    assert [bool(number) for number, _ in cells] == [True, False, True] * 3


def test_what_it_ran_on_is_there(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    host = {
        "host": "node-a",
        "processor": "Some CPU",
        "cores": 64,
        "memory_bytes": 2 * 2**40,
        "ranks": 2,
        "devices": {"NVIDIA H200": 2},
    }
    other = host | {"host": "node-b", "devices": {"NVIDIA H200": 1, "NVIDIA A100": 1}}
    about = {"versions": {"mixtrain": "9.8.7", "torch": "2.13.0"}, "ranks": 4, "hosts": [host, other]}
    (folder / "environment.json").write_text(json.dumps(about))
    (folder / "run.json").write_text(json.dumps({"id": "7f3a0011", "heartbeat": 1000.0}))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "time": 7900.0}))
    kinds = [(1000, "run_started"), (1100, "checkpoint_saved"), (4000, "run_goes_on"), (4200, "resumed")]
    (folder / "events.jsonl").write_text(
        "\n".join(json.dumps({"time": when, "kind": kind, "text": ""}) for when, kind in kinds)
    )
    found = make(folder)
    facts = dict(found.data["facts"])
    assert facts["Wall time"] == "1 h 06 min in 2 starts"  # 100 and 3,900 s: nobody worked in between
    assert facts["Time in steps"] == _duration(sum(line["step_seconds"] for line in read_metrics(folder)))
    assert facts["Hardware"] == "3 ranks on NVIDIA H200, 1 rank on NVIDIA A100, 2 hosts"
    for text in (
        "7f3a0011",
        "9.8.7",
        "2.13.0",
        "Host node-b",
        "1 rank on NVIDIA A100; 64 cores of Some CPU; 2048 GiB",
        '"num_layers": 3',
    ):
        assert text in found.text["run"], text
    for name in ("environment.json", "run.json", "status.json"):
        (folder / name).write_text("[1, 2")
    (folder / "events.jsonl").unlink()
    old = make(folder)
    assert "Wall time" not in dict(old.data["facts"]) and "environment.json cannot be read" in " ".join(
        old.data["notes"]
    )


def test_the_environment_is_written_down(tmp_path: Path) -> None:
    ranks = [environment.describe_rank(torch.device("cpu")) for _ in range(3)]
    environment.write(tmp_path, [*ranks, ranks[0] | {"host": "elsewhere", "device": "NVIDIA H200"}])
    content = json.loads((tmp_path / "environment.json").read_text())
    assert content["versions"].keys() >= {"mixtrain", "torch", "megatron-core", "python"} and content["ranks"] == 4
    assert [host["devices"] for host in content["hosts"]] == [{"cpu": 3}, {"NVIDIA H200": 1}]
    assert content["hosts"][0]["host"] == socket.gethostname() and content["hosts"][0]["cores"] >= 1


def test_durations() -> None:
    assert [_duration(s) for s in (0.04, 59.94, 60, 3599, 3600, 360_000)] == [
        *("0.0 s", "59.9 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "100 h 00 min")
    ]


def test_broken_files_are_noted_and_left_out(run_dir: Path, tmp_path: Path) -> None:
    run_copy = tmp_path / "run"
    shutil.copytree(run_dir, run_copy)
    with (run_copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "loss": float("nan"), "grad_norm": float("inf")}) + '\n{"step": 62, "lo')
    (run_copy / "plan.json").write_text("[]")
    trace = next((run_copy / "traces").iterdir())
    whole = trace.read_bytes()
    trace.write_bytes(whole[:400] + bytes(byte ^ 0xFF for byte in whole[400:440]) + whole[440:])
    noted: list[str] = []
    timeline.read_steps(run_copy, noted)
    assert f"{trace.name} cannot be read and is left out." in noted
    trace.write_bytes(whole[:200])
    found = make(run_copy)
    assert found.data["steps"][-1] == 61 and found.data["curves"]["loss"][-1] is None
    notes = " ".join(found.data["notes"])
    assert (
        "metrics.jsonl: 1 of 62 lines" in notes
        and "plan.json cannot be read" in notes
        and f"{trace.name} cannot be read" in notes
    )


def test_wrong_folders_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        assert main([str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(sources.NotARun, match=r"metrics\.jsonl"):
        render.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_command_line(run_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.report", str(run_dir), "--output", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout.startswith(str(tmp_path / "page.html")) and (tmp_path / "page.html").stat().st_size < 5_000_000


@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
def test_a_browser_draws_it(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("name: empty\n")
    path, empty = render.write(run_dir, tmp_path / "page.html"), render.write(tmp_path / "empty")
    charts = Page(path.read_text(encoding="utf-8")).charts
    background = "getComputedStyle(document.body).backgroundColor"
    with Browser() as browser:
        seen = set()
        for width in (1440, 390):
            for dark in (False, True):
                browser.look(width=width, dark=dark)
                opened = browser.open(path)
                assert opened.complaints == [] and opened.requests == [path.resolve().as_uri()]
                assert browser.run("document.documentElement.dataset.ready") == "true"
                assert browser.run("document.documentElement.scrollWidth") <= width
                seen.add(browser.run(background))
                # Every place for a chart has a canvas on which something was painted.
                painted = """[...document.querySelectorAll(".chart")].filter(place => {
                    const canvas = place.querySelector("canvas");
                    const image = canvas && canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                    return image && image.data.some(byte => byte > 0);
                }).map(place => place.id)"""
                assert set(browser.run(painted)) == charts
                # Axes have names, and steps, ranks, layers and experts are whole numbers.
                axes = """[...document.querySelectorAll(".chart")].flatMap(place => {
                    const option = echarts.getInstanceByDom(place).getOption();
                    return [option.xAxis[0].name, option.yAxis[0].name];
                })"""
                assert all(browser.run(axes))
                ticks = """[...document.querySelectorAll(".chart")].flatMap(place => {
                    const axis = echarts.getInstanceByDom(place).getModel().getComponent("xAxis").axis;
                    return place.id === "timeline-chart" ? [] : axis.getViewLabels().map(label => label.formattedLabel);
                }).filter(text => !/^[0-9,]*$/.test(text))"""
                assert browser.run(ticks) == []
        assert len(seen) == 2
        choose = (
            "const choice = document.getElementById('expert-layer'); choice.value = '2'; choice.dispatchEvent(new "
            "Event('change'));"
        )
        label = "echarts.getInstanceByDom(document.getElementById('experts-chart')).getOption().series[0].data[3][2]"
        percent = Page(path.read_text(encoding="utf-8")).data["experts"]["percent"]
        browser.open(path)
        assert browser.run(label) == percent[0][0][3]
        browser.run(choose)
        assert browser.run(label) == percent[0][2][3]
        assert browser.open(empty).complaints == []
