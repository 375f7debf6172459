"""Two commits of a tiny repository, compared."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kit.against import Comparison, main
from tests.waits import LONG, until

REPOSITORY = Path(__file__).resolve().parents[2]
SHOW = "import sys, pathlib; print('speed', open('speed').read()); assert not list(pathlib.Path(sys.argv[1]).iterdir())"


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=LONG
    ).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Commit `first` has speed 2, HEAD 4, the working tree 8; and a temporary folder that must be left empty."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for speed in (2, 4):
        (folder / "speed").write_text(str(speed))
        (folder / "gone").write_text("")
        git(folder, "add", "-A")
        git(folder, "commit", "--quiet", "-m", f"speed {speed}")
    git(folder, "tag", "first", "HEAD~1")
    (folder / "speed").write_text("8")
    (folder / "new").write_text("1")
    (folder / "gone").unlink()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(folder)
    return folder


def is_clean(repository: Path) -> bool:
    left = list((repository.parent / "temporary").iterdir())
    return not left and len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_figure_of_both_trees_and_nothing_is_left(repository, capsys):
    status = git(repository, "status", "--short")
    arguments = ["first", "--rounds", "2", "--json", "--figure", r"speed (\d+)", "--"]
    assert main([*arguments, sys.executable, "-c", SHOW, "{folder}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert (
        result["old"] == [2, 2]
        and result["new"] == [8, 8]
        and result["ratio"] == pytest.approx(4)
        and result["standard_error"] == 0
    )
    assert (
        result["modified"] == ["gone", "speed", "new"]
        and result["commit"] == git(repository, "rev-parse", "first").strip()
    )
    assert is_clean(repository) and git(repository, "status", "--short") == status


def test_the_order_changes_and_the_working_tree_is_taken_whole(repository):
    log = repository.parent / "log"
    code = f"import os; open({str(log)!r}, 'a').write(open('speed').read() + str(sorted(os.listdir())) + chr(10))"
    assert main(["first", "--rounds", "3", "--warm-up", "0", "--", "python", "-c", code]) == 0
    lines = log.read_text().splitlines()
    assert [line[0] for line in lines] == list("822882")
    assert lines[0] == "8['.git', 'new', 'speed']" and lines[1] == "2['.git', 'gone', 'speed']"


def test_ratio_and_standard_error():
    made = Comparison([1.0, 2.0, 4.0], [2.0, 4.0, 4.0])
    assert made.ratio == pytest.approx(4 ** (1 / 3))
    assert made.standard_error == pytest.approx(made.ratio * math.log(2) / 3)  # logs: l, l, 0; deviation l / sqrt(3)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nothing", "--", "true"], 2, "has no commit nothing"),
        (["--", "true"], 2, "required: commit"),
        (["first"], 2, "no command"),
        (["first", "--rounds", "1", "--", "true"], 2, "--rounds 1"),
        (["first", "--figure", "(", "--", "true"], 2, "--figure ("),
        (["first", "--", "no-such-command"], 1, "no-such-command: No such file"),
        (["first", "--", "sh", "-c", "echo why; exit 3"], 1, "status 3 in the old tree; it said last: why"),
        (["first", "--timeout", "0.2", "--", "sleep", "60"], 1, "did not end within 0.2 s"),
        (["first", "--figure", "x", "--", "echo", "y"], 1, "--figure x: no such text"),
        (["first", "--figure", "y", "--", "echo", "y"], 1, "'y' in the output of the old tree is no number"),
    ],
)
def test_errors_are_one_line(repository, capsys, arguments, status, words):
    try:
        assert main(arguments) == status
    except SystemExit as ended:  # argparse
        assert ended.code == status
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert is_clean(repository)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(repository, number):
    pids = repository.parent / "pid"
    code = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-m", "benchmarks.kit.against", "first", "--", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command, cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: pids.exists() and pids.read_text(), "the command")
    process.send_signal(number)
    _, errors = process.communicate(timeout=LONG)
    assert process.returncode == 128 + number and "Traceback" not in errors
    assert is_clean(repository)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)
