"""SIGKILL at random moments, also while a checkpoint is written; then the same command gives the run that was never
killed.

A few kills here; benchmarks/checks/kill_test.py does more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.checks.kill_test import differences
from checkpoint import manifest
from tests.test_packages import ROOT
from tests.training.helpers import train_on_ranks
from tests.waits import LONG, until, until_gone


def test_forked_runs(data: list[str]) -> None:
    arguments = ["--kills=2", "--seed=3", "--steps=9", "--layouts=recorded_moves", "--damages=3", "--json", *data]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checks.kill_test", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("seed 3: 2 kills over recorded_moves, then 3 damaged files of each")
    result = json.loads(lines[-1])
    assert result["kills"] == sum(result["during"].values()) and result["differences"] == []
    assert result["kills"] == 2 and result["damaged"] == 3


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a command and all its descendants (torchrun's ranks are sessions of their own), and wait until they are
    gone."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    process.wait(timeout=LONG)
    until_gone(family)


def test_torchrun_killed_while_it_saves(data: list[str], tmp_path: Path) -> None:
    overrides = [
        "experiment=gpt_moe_tiny",
        "model.hidden_dropout=0.1",
        "checkpoint.interval=2",
        "training.steps=10",
        "parallel.expert=2",
        *data,
    ]
    train_on_ranks([*overrides, f"run_dir={tmp_path / 'whole'}"], 2)
    run_dir, log = tmp_path / "killed", tmp_path / "log"
    quiet = ["logging=quiet", "sample.prompts=[]", "training.eval_interval=0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "train.py", *quiet, *overrides, f"run_dir={run_dir}"]
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        # The second checkpoint begins: the first one is announced.
        second = manifest.folder_of(run_dir, 4).with_suffix(".tmp")
        until(lambda: process.poll() is not None or second.exists(), str(second), poll=0.001)
        assert process.poll() is None, log.read_text()
        kill_family(process)
        announced = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("checkpoint ")]
        assert announced and all(manifest.verify(Path(folder)) is None for folder in announced)
        subprocess.run(
            command,
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=LONG,
            check=True,
        )
    assert "resumed from" in log.read_text()
    assert differences(run_dir, tmp_path / "whole") == []
    assert [manifest.verify(folder) for folder in manifest.list_checkpoints(run_dir)] == [None] * 3
