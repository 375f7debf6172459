"""Rungs that run the tests marked `gpu`, in a process of pytest's own: a test that breaks CUDA breaks no other rung."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from base.exit_handler import end_with_caller
from benchmarks.card.ladder import ROOT, PartlyDone, Task

OF_TIME = 0.9  # of the seconds, after which no further test is begun
LAST = 1.0  # seconds before the end, in which pytest is killed
FILE, END, PASSED = "MIXTRAIN_CARD_FILE", "MIXTRAIN_CARD_END", "MIXTRAIN_CARD_PASSED"


def files() -> tuple[str, ...]:
    """Return the paths of test files marked `gpu`, relative to the repository's root."""
    return tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_gpu.py")))


def sample(task: Task) -> None:
    """Run as many tests as fit, spread over all; the last rung runs the others."""
    _run(task, passed=())


def rest(task: Task) -> None:
    """Run the tests that have not passed yet. Raises PartlyDone if the time ends before the last one."""
    at_this_code = [row for other in task.others if other.code == task.code for row in other.rows]
    passed = [row["test"] for row in (*task.earlier, *at_this_code) if row.get("outcome") == "passed"]
    for row in task.earlier:
        if row.get("outcome") == "passed":
            task.show(row)
    left = _run(task, passed)
    if left:
        raise PartlyDone("not all tests fitted into the time")


def _run(task: Task, passed: Sequence[str]) -> int:
    """Show a row for each test; return how many were not started, 1 if that is unknown."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes"
        path.touch()
        end = time.time() + OF_TIME * task.seconds
        env = {**os.environ, FILE: str(path), END: str(end), PASSED: json.dumps(passed)}
        plugin = ("-p", "benchmarks.card.gpu_tests")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plugin, *files()]
        printed = open(Path(folder) / "printed", "w+", errors="replace")
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            shown = 0
            while process.poll() is None and time.monotonic() < task.end - LAST:
                shown += _show(task, path, shown)
                time.sleep(0.2)
            _show(task, path, shown)
            is_cut = process.poll() is None  # inside a test, which the next call begins again
            printed.seek(0)
            output = printed.read()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            printed.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    failed = [line["test"] for line in lines if line.get("outcome") == "failed"]
    fine = (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if failed or not is_cut and process.returncode not in fine:
        print("\n".join(output.splitlines()[-40:]), file=sys.stderr, flush=True)
        what = f"{len(failed)} tests failed: {', '.join(failed)[:200]}" if failed else f"pytest: {output[-200:]}"
        raise RuntimeError(what)
    return 1 if is_cut else next((line["left"] for line in lines if "left" in line), 0)


def _show(task: Task, path: Path, shown: int) -> int:
    """Show a row for each test that has ended since; return how many did."""
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True)[shown:] if line.endswith("\n")]
    for line in lines:
        if "test" in line:
            task.show(line)
    return len(lines)


# --- In pytest's process ---------------------------------------------------------------------------------------------


class _Chosen:
    """A plugin that selects the tests that have not passed, spread over all files, until the time is over."""

    def __init__(self) -> None:
        self.path, self.end = Path(os.environ[FILE]), float(os.environ[END])
        self.passed = set(json.loads(os.environ[PASSED]))
        self.started = self.count = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        left = [item for item in items if item.nodeid not in self.passed]
        stride = max(1, round(len(left) ** 0.5))
        items[:] = [item for first in range(stride) for item in left[first::stride]]
        self.count = len(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.time() > self.end:
            item.session.shouldstop = "the time is over"
            return True
        self.started += 1
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write({"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)})

    def pytest_sessionfinish(self) -> None:
        self._write({"left": self.count - self.started})

    def _write(self, line: dict[str, Any]) -> None:
        with open(self.path, "a") as stream:
            stream.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in a process that a rung started."""
    if FILE in os.environ:
        end_with_caller()
        config.pluginmanager.register(_Chosen())
