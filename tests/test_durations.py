"""Durations and started processes of tests are recorded, and the longest are shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.waits import LONG

pytestmark = pytest.mark.fast


def test_a_test_is_charged_with_the_programs_that_it_starts(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "some.tsv"
    recorder = durations.Recorder(path)
    test = recorder.pytest_runtest_protocol(request.node)
    next(test)
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", busy], check=True, timeout=LONG)
    next(test, None)
    ((name, used),) = durations.read(path).items()
    assert name == request.node.nodeid
    assert used.cpu >= 0.5 and (used.calls, used.programs) == (0, 1)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for half, lines in {
        "beside": ["1.00\t0.50\t0\t0\ttests/test_a.py::test_short", "9.00\t8.00\t0\t2\ttests/test_b.py::test_long[a]"],
        "others": ["3.00\t4.00\t1\t3\ttests/test_a.py::test_ranks"],
    }.items():
        (tmp_path / f"{half}.tsv").write_text("\n".join([durations.COLUMNS, *lines]) + "\n")
    monkeypatch.setattr(sys, "argv", ["durations", *map(str, sorted(tmp_path.glob("*.tsv")))])
    durations.main()
    table_rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "CPU" not in line]
    assert table_rows == [
        "| 8.5 | 10.0 | 0 | 2 | all 2 tests of beside, 0 on ranks |",
        "| 4.0 | 3.0 | 1 | 3 | all 1 tests of others, 1 on ranks |",
        "| 8.0 | 9.0 | 0 | 2 | test_b.py::test_long[a] |",
        "| 4.0 | 3.0 | 1 | 3 | test_a.py::test_ranks |",
        "| 0.5 | 1.0 | 0 | 0 | test_a.py::test_short |",
        "| 8.0 | 9.0 | 0 | 2 | test_b.py |",
        "| 4.5 | 4.0 | 1 | 3 | test_a.py |",
    ]
