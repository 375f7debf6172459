"""What ends a process before its first step, and what the attempts of one launch know of each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from base.errors import ConfigError
from base.exit_handler import STOPPED_EARLY
from configs.compose import compose
from tests.waits import LONG, until, until_gone
from training import status
from training.resilience import job, launcher

ROOT = Path(__file__).resolve().parents[2]


def answers(pid: int, signum: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signum - 1) & 1)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_at_the_first_line_of_train(tmp_path: Path, signum: signal.Signals) -> None:
    process = subprocess.Popen(
        ["env", "--default-signal", sys.executable, "train.py", "model=gpt_tiny", f"run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: process.poll() is not None or answers(process.pid, signum), "the first line", poll=0.001)
    process.send_signal(signum)
    out, err = process.communicate(timeout=LONG)
    line = f"stopped by {signum.name} before the first step, with nothing to save. Start it again to continue\n"
    assert (process.returncode, out, err) == (STOPPED_EARLY, "", line)
    assert not (tmp_path / "run").exists()


LATER = """
import hashlib, os, signal, time
from training.resilience import signals
here = signals.of_this_process
here.end_at_once()
here.install()
os.kill(os.getpid(), signal.SIGUSR1)
while not here.received:
    time.sleep(0.01)
here.restore(ignore=True)
here.end_at_once()  # the next run of -m
print("noted", here.received, flush=True)
os.kill(os.getpid(), signal.SIGINT)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, in which no handler of Python's runs
"""


def test_signals_end_at_once_again_in_the_next_run_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stdout) == (STOPPED_EARLY, "noted []\n")
    assert done.stderr.splitlines()[-1].startswith("stopped by SIGINT before the first step")


CALLER = """
import json, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-m", "data.worker"], stdin=subprocess.PIPE)
for message in ({"tokenizer": None}, {"job": 0, "unpack": sys.argv[1], "out": sys.argv[1] + ".out"}):
    worker.stdin.write(json.dumps(message).encode() + b"\\n")
worker.stdin.flush()
time.sleep(600)
"""


def test_worker_in_the_middle_of_its_work_ends_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "corpus.txt.gz"
    os.mkfifo(pipe)
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(pipe)], cwd=ROOT)
    writer = None
    while writer is None and caller.poll() is None:
        try:
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # once the worker reads, in vain
        except OSError:
            time.sleep(0.01)
    workers = psutil.Process(caller.pid).children()
    caller.kill()
    caller.wait(timeout=LONG)
    assert len(workers) == 1
    until_gone(workers)


def launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int, name: str = "none_x1") -> None:
    """The environment of a rank that torchrun starts, with an id that all launches share."""
    path = tmp_path / name / f"attempt_{attempt}" / "0" / "error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))


class WentOn(Exception):
    pass


def test_stop_of_an_earlier_launch_with_the_same_id_does_not_end_ranks_that_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def went_on(*_: Any) -> int:
        raise WentOn

    monkeypatch.setattr(job, "usable_world_size", went_on)
    monkeypatch.setattr(job.signals.of_this_process, "end_at_once", lambda: None)
    config = compose(["model=gpt_tiny", f"run_dir={tmp_path / 'run'}"])
    Path(config.run_dir).mkdir()
    launch_folder(tmp_path, monkeypatch, 0, "none_earlier")
    launcher.note_stop()
    status.write(Path(config.run_dir), "stopped_early", 3, "stopped", started=0.0)

    launch_folder(tmp_path, monkeypatch, 1)
    with pytest.raises(WentOn):
        job.run(config, config)
    launcher.note_stop()
    launch_folder(tmp_path, monkeypatch, 2)
    assert job.run(config, config) == STOPPED_EARLY


def test_time_limit_counts_from_the_first_attempt_of_this_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert [launcher.first_start(now) for now in (5.0, 6.0)] == [5.0, 6.0]  # without torchrun each start is a launch
    launch_folder(tmp_path, monkeypatch, 0)
    assert launcher.first_start(7.25) == 7.25
    launch_folder(tmp_path, monkeypatch, 1)
    assert launcher.first_start(9.0) == 7.25
    launch_folder(tmp_path, monkeypatch, 1, "none_next")
    assert launcher.first_start(9.0) == 9.0


def test_refused_job_leaves_the_status_of_the_one_that_holds_the_folder(tmp_path: Path) -> None:
    from training.callbacks.guard import Guard

    config = compose(["model=gpt_tiny", f"run_dir={tmp_path}"])
    status.write(tmp_path, "running", 3, "running")
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    guard = Guard(config)
    guard._end_hard = lambda: None  # type: ignore[method-assign]
    guard.on_error(ConfigError("run_dir is in use by another job"))
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before
