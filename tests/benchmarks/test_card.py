"""benchmarks/card: the order of rungs, results that survive, and a call that ends in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from base.errors import ConfigError
from benchmarks.card import gpu_tests, ladder, records
from benchmarks.card.ladder import PartlyDone, Rung, Task, Walk, in_order, listing, state
from benchmarks.card.records import Record, Records
from benchmarks.card.rungs import by_name, rungs
from benchmarks.card.tables import page
from tests.waits import LONG, until

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"torch": "2.13.0", "device": "a card"}
GOOD = {"rung": "a", "card": "b", "status": "well", "code": "c", "commit": "d", "date": "e"}
Measure = Callable[[Task], None]


def shows(*values: float) -> Measure:
    def measure(task: Task) -> None:
        for value in values:
            task.show({"value": value})

    return measure


def fails(task: Task) -> None:
    task.show({"value": 1})
    raise ValueError("no such kernel\nand more")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two files."""
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "kernel.py").write_text("a kernel\n")
    (tmp_path / "dense.py").write_text("a product\n")
    return tmp_path


def rung(
    name: str, *paths: str, measure: Measure | None = None, seconds: float = 5.0, made_from: tuple[str, ...] = ()
) -> Rung:
    return Rung(name, seconds, paths, measure or shows(1.0), made_from=made_from)


def walk(
    folder: Path, rungs: list[Rung], seconds: float = 100.0, commit: str = "abc", torch: str = "2.13.0"
) -> dict[str, str]:
    """A call: what became of the rungs that it began."""
    called = Walk(
        Records(folder / "card.jsonl"), "a card", {**MACHINE, "torch": torch}, commit, time.monotonic() + seconds, False
    )
    called.run(rungs)
    return called.ended


# --- What is measured, and in which order ----------------------------------------------------------------------------


def test_a_changed_file_renews_the_rungs_that_depend_on_it_alone(tree: Path) -> None:
    every = [rung("dense", "dense.py"), rung("experts", "dense.py", "moe"), rung("made", made_from=("experts",))]
    assert walk(tree, every) == {"dense": "well", "experts": "well", "made": "well"}
    assert walk(tree, every) == {}
    (tree / "moe" / "kernel.py").write_text("another kernel\n")
    assert walk(tree, every, commit="def") == {"experts": "well", "made": "well"}
    found = Records(tree / "card.jsonl").result("experts", "a card")
    assert found is not None and (found.commit, found.renews) == ("def", "abc")
    assert len(list(Records(tree / "card.jsonl"))) == 3  # the old figure is replaced
    (tree / "dense.py").unlink()
    assert list(walk(tree, every)) == ["dense", "experts", "made"]
    assert list(walk(tree, every, torch="2.14.0")) == ["dense", "experts", "made"]


def test_a_changed_kernel_of_experts_leaves_dense_figures() -> None:
    with_experts = [each.name for each in rungs(False) if "moe" in each.paths]
    assert all(
        "tests" in name or "layer" in name or "experts" in name or "moe" in name or "x7b" in name or "a3b" in name
        for name in with_experts
    )
    assert {f"one layer of {name}" for name in ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_like")} <= set(
        with_experts
    )
    dense = [each.name for each in rungs(False) if "models" in each.paths and "moe" not in each.paths]
    assert {"training of gpt2_124m", "training of llama_1b", "llama_1b next to transformers"} <= set(dense)
    for each in rungs(False):
        assert each.seconds <= each.most and (each.most == ladder.MOST_SECONDS or each.name == "the longest context")
        assert all((ROOT / path).exists() for path in each.paths), each.name


def test_new_rungs_come_before_old_figures_and_those_before_failures(tree: Path) -> None:
    failing, old, new = rung("fails", measure=fails), rung("old", "dense.py"), rung("new")
    assert walk(tree, [failing, old]) == {"fails": "failed", "old": "well"}
    (tree / "dense.py").write_text("another product\n")
    kept = Records(tree / "card.jsonl")
    states = [state(each, kept, "a card", "2.13.0") for each in (failing, old, new)]
    assert [each.rung.name for each in in_order(states)] == ["new", "old", "fails"]
    assert [row[:2] for row in listing(states)] == [["3", "fails"], ["2", "old"], ["1", "new"]]
    assert [each.why for each in states] == [
        "failed: ValueError: no such kernel",
        "to be renewed: measured at abc",
        "never measured",
    ]
    assert list(walk(tree, [failing, old, new])) == ["new", "old", "fails"]


def test_another_card_has_results_of_its_own(tree: Path) -> None:
    walk(tree, [rung("one")])
    kept = Records(tree / "card.jsonl")
    assert state(rung("one"), kept, "a card", "2.13.0").turn is None
    assert state(rung("one"), kept, "another card", "2.13.0").turn == ladder.NEW


def test_a_rung_that_fails_stops_no_other_and_loses_no_earlier_result(tree: Path) -> None:
    assert walk(tree, [rung("one", "dense.py", measure=shows(1.0, 2.0))]) == {"one": "well"}
    (tree / "dense.py").write_text("broken\n")
    every = [rung("one", "dense.py", measure=fails), rung("two")]
    assert walk(tree, every) == {"two": "well", "one": "failed"}
    kept = Records(tree / "card.jsonl")
    good, bad = kept.result("one", "a card"), kept.attempt("one", "a card")
    assert good is not None and good.rows == [{"value": 1.0}, {"value": 2.0}]
    assert bad is not None and (bad.status, bad.note, bad.rows) == (
        "failed",
        "ValueError: no such kernel",
        [{"value": 1}],
    )
    assert walk(tree, [rung("one", "dense.py"), rung("two")]) == {"one": "well"}
    assert [each.status for each in Records(tree / "card.jsonl")] == ["well", "well"]


def test_a_rung_goes_on_where_its_time_ended(tree: Path) -> None:
    def one_at_a_time(task: Task) -> None:
        number = len(task.earlier)
        for row in task.earlier:
            task.show(row)
        task.show({"value": number})
        if number < 2:
            raise PartlyDone("more to do")

    every = [rung("parts", measure=one_at_a_time)]
    assert [walk(tree, every) for _ in range(4)] == [{"parts": "partly"}, {"parts": "partly"}, {"parts": "well"}, {}]
    found = Records(tree / "card.jsonl").result("parts", "a card")
    assert found is not None and [row["value"] for row in found.rows] == [0, 1, 2]


def test_rows_of_an_attempt_stand_until_the_next_one_has_one(tree: Path) -> None:
    def dies(task: Task) -> None:
        raise ValueError("before its first row")

    assert walk(tree, [rung("one", measure=fails)]) == {"one": "failed"}
    assert walk(tree, [rung("one", measure=dies)]) == {"one": "failed"}
    (found,) = Records(tree / "card.jsonl")
    assert (found.rows, found.note) == ([{"value": 1}], "ValueError: before its first row")
    assert walk(tree, [rung("one", measure=shows(3.0))]) == {"one": "well"}
    assert [each.rows for each in Records(tree / "card.jsonl")] == [[{"value": 3.0}]]


def test_the_tests_that_are_left_end_after_any_number_of_calls(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [f"t{i}" for i in range(5)]

    def two(task: Task, passed: Sequence[str]) -> int:
        left = [name for name in tests if name not in passed]
        for name in left[:2]:
            task.show({"test": name, "outcome": "passed"})
        return len(left[2:])

    monkeypatch.setattr(gpu_tests, "_run", two)
    every = [rung("the rest", measure=gpu_tests.rest)]
    assert [walk(tree, every) for _ in range(3)] == [
        {"the rest": "partly"},
        {"the rest": "partly"},
        {"the rest": "well"},
    ]
    (found,) = Records(tree / "card.jsonl")
    assert [row["test"] for row in found.rows] == tests


def test_a_word_of_no_rung_is_refused() -> None:
    every = [rung("Training of a"), rung("one layer")]
    assert [each.name for each in by_name(["training", "LAYER"], every)] == ["Training of a", "one layer"]
    with pytest.raises(ConfigError, match="--only zzz: no rung's name has that word"):
        by_name(["layer", "zzz"], every)


# --- In time ---------------------------------------------------------------------------------------------------------


def test_nothing_is_started_that_would_not_end_in_time(tree: Path) -> None:
    every = [rung("long", seconds=50.0), rung("short", seconds=5.0)]
    assert walk(tree, every, seconds=20.0) == {"short": "well"}
    assert walk(tree, every, seconds=60.0) == {"long": "well"}


def test_a_call_says_what_is_left(tree: Path) -> None:
    def cut(task: Task) -> None:
        raise PartlyDone("more to do")

    def left(rungs: list[Rung], seconds: float) -> str:
        kept, end = Records(tree / "card.jsonl"), time.monotonic() + seconds
        return Walk(kept, "a card", MACHINE, "abc", end, False).run(rungs)

    assert left([rung("long", seconds=50.0)], 20.0).startswith("1 rungs are left, and the shortest needs 50 of ")
    assert left([rung("parts", measure=cut)], 100.0) == "1 to be gone on with"
    assert left([rung("one")], 100.0) == left([rung("one")], 100.0) == "nothing is left to measure"


def test_a_cost_is_what_it_took(tree: Path) -> None:
    walk(tree, [rung("one", seconds=50.0)])
    found = state(rung("one", seconds=50.0), Records(tree / "card.jsonl"), "a card", "2.13.0")
    assert found.cost == ladder.LEAST


def test_a_rung_that_takes_too_long_is_stopped_with_its_rows(tree: Path) -> None:
    def hangs(task: Task) -> None:
        task.show({"value": 1.0})
        try:
            time.sleep(LONG)
        except Exception:  # as rungs have it that try several lengths
            time.sleep(LONG)

    called = time.monotonic()
    assert walk(tree, [rung("hangs", measure=hangs, seconds=0.1), rung("next", seconds=0.1)], seconds=1.0) == {
        "hangs": "late"
    }
    assert time.monotonic() - called < LONG / 2
    found = Records(tree / "card.jsonl").attempt("hangs", "a card")
    assert found is not None and found.rows == [{"value": 1.0}] and found.note == "its time was up after 1 s"
    # It does not keep the next call from others.
    assert list(walk(tree, [rung("hangs"), rung("next")])) == ["next", "hangs"]


def test_a_rung_that_hangs_in_a_library_costs_its_process(tree: Path) -> None:
    """A signal is not seen there; blocked, it is not seen either."""
    code = """
import signal, time
from benchmarks.card import ladder
ladder.OVERDUE = 0.1
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
with ladder.limited(0.1):
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=LONG, check=False)
    assert done.returncode == ladder.BROKEN


def test_a_killed_process_leaves_all_results_and_the_rows_so_far(tree: Path) -> None:
    """The rung at which it died comes last the next time."""
    code = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks.card import ladder
from benchmarks.card.records import Records
ladder.ROOT = Path({str(tree)!r})
def dies(task):
    task.show({{"value": 2.0}})
    os.kill(os.getpid(), signal.SIGKILL)
walk = ladder.Walk(Records(Path("card.jsonl")), "a card", {MACHINE!r}, "abc", time.monotonic() + 100, False)
walk.run([ladder.Rung("one", 5, (), lambda task: task.show({{"value": 1.0}})), ladder.Rung("dies", 5, (), dies)])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, timeout=LONG, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    kept = Records(tree / "card.jsonl")
    assert [(each.rung, each.status, each.rows) for each in kept] == [
        ("one", "well", [{"value": 1.0}]),
        ("dies", "begun", [{"value": 2.0}]),
    ]
    assert state(rung("dies"), kept, "a card", "2.13.0").why == "its process ended in it"
    assert list(walk(tree, [rung("dies"), rung("new")])) == ["new", "dies"]


# --- The file, and the page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is no result of a rung"),
        ('{"rung": "a"}', "line 2 of .*card.jsonl is no result of a rung"),
        ("[1]", "it is no JSON object"),
        (f"{json.dumps({**GOOD, 'seconds': '3'})}", r"seconds \('3'\) is of another kind"),
        (f"{json.dumps({**GOOD, 'status': 'fine'})}", r"status \('fine'\) must be one of begun, well"),
        (f"{json.dumps({**GOOD, 'rows': [1]})}", "rows must be JSON objects"),
        (f"{json.dumps({**GOOD, 'format': 2})}", "as this version writes it .*format.* Move the file away"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, line: str, message: str) -> None:
    whole = Record("one", "a card", records.WELL, "code", "abc", "2026-11-27")
    Records(tmp_path / "card.jsonl").put(whole)
    with open(tmp_path / "card.jsonl", "a") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(ConfigError, match=message):
        Records(tmp_path / "card.jsonl")


def test_a_path_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "card.jsonl")
    for path, message in (
        (tmp_path / "file" / "more" / "card.jsonl", "must be a folder, and .*file is a file"),
        (tmp_path / "card.jsonl", "is no regular file"),
    ):
        with pytest.raises(ConfigError, match=message):
            Records(path)


def test_the_page_has_a_table_for_each_kind_of_row(tmp_path: Path) -> None:
    kept = Records(tmp_path / "card.jsonl")
    assert page(kept) == "No card has climbed the ladder yet.\n"
    trained = {"system": "mixtrain", "model": "llama_1b", "tokens": 8192, "step_s": 0.5, "tokens_s": 16384.0}
    trained |= {
        "tflops": 400.0,
        "mfu": 0.404,
        "peak_gib": 41.0,
        "busy": 0.987,
        "launches_a_layer": 31.4,
        "note": "a note",
    }
    tests = [{"test": f"t{i}", "outcome": "passed" if i else "skipped", "seconds": 1.0} for i in range(3)]
    for name, values in (
        ("tests", tests),
        ("training", [trained, {"ratio_of": "rival", "their_time_by_ours": 1.25, "two_errors": 0.01}]),
    ):
        kept.put(Record(name, "a card", records.WELL, "code", "abc", "2026-11-27", 12.0, MACHINE, values))
    kept.put(Record("worse", "a card", records.FAILED, "code", "abc", "2026-11-27", 1.0, MACHINE, [trained], "a | b"))
    text = page(kept)
    assert "Tests marked gpu: 2 passed, 1 skipped." in text
    assert (
        text.count("| llama_1b | mixtrain | 8,192 | 0.5000 | 16,384 | 400.0 | 40.4% | 41.00 | 98.7% | 31 | a note |")
        == 1
    )
    assert "|  | rival | 1.250 | 0.010 |" in text
    assert "| worse | failed | abc |  | 1 | a \\| b |" in text
    assert "meaningless" not in text
    kept.put(Record("training", "CPU, tiny sizes", records.WELL, "code", "abc", "2026-11-27", 12.0, MACHINE, [trained]))
    assert "**Every time here is meaningless.**" in page(kept)


def test_the_committed_page_has_what_is_on_record() -> None:
    results = ROOT / "benchmarks" / "results"
    text = (results / "card.md").read_text(encoding="utf-8")
    assert text.partition("# Results of the ladder\n\n")[2] == page(Records(results / "card.jsonl"))


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_list_names_every_rung_with_cost_and_state(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.card", "--list", "--small", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=True)
    head, names, *printed = done.stdout.splitlines()
    assert (
        head.startswith("card: ")
        and head.endswith("tiny sizes")
        and names.split() == ["turn", "rung", "seconds", "state"]
    )
    assert len(printed) > 20 and all(row.endswith("never measured") for row in printed)
    assert not list(tmp_path.iterdir())


def test_it_ends_with_the_process_that_was_told_to(tmp_path: Path) -> None:
    """A lease that ends kills the command's first process; no other goes on with the card."""
    command = [sys.executable, "-m", "benchmarks.card", "--small", "--results", str(tmp_path), "--seconds", "120"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = tmp_path / "card.jsonl"
    until(path.exists, "the first result")
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) > 1, "the process of the tests")
    started = psutil.Process(process.pid).children(recursive=True)
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=False)
    assert other.returncode == 2 and other.stderr.startswith(f"card: another call writes its results to {tmp_path}")
    process.kill()
    process.wait(timeout=LONG)
    until(lambda: not any(each.is_running() for each in started), "the end of all that it has started")
    assert [json.loads(line)["status"] for line in path.read_text().splitlines()][-1] == "begun"
    assert os.path.getsize(path) > 0
