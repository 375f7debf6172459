"""Ranks that die, stop, raise or are told to end, under torchrun: the job ends soon, names the rank, and goes on when
it may.

benchmarks/checks/fault_drill.py does more: other layouts, and ranks that hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from base.exit_handler import STOPPED_EARLY
from checkpoint import manifest
from configs.compose import compose
from configs.validate import usable_world_size
from tests.tolerances import FP32_LOSS
from tests.training.helpers import Lines, largest_difference, read_metrics, train_on_ranks
from tests.waits import LONG, until
from training import status
from training.resilience import events

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120  # parallel.timeout_seconds: a lost rank is seen long before, on a busy machine too
SHORT_TIMEOUT = 24  # a rank is taken for stopped when it is silent for half of it
STEPS = 10
COMMON = [
    *(
        "logging=quiet",
        "sample.prompts=[]",
        "training.eval_interval=0",
        "experiment=gpt_tiny",
        f"training.steps={STEPS}",
    ),
    *(
        "training.global_batch_size=8",
        "training.micro_batch_size=1",
        "checkpoint.interval=4",
        f"parallel.timeout_seconds={TIMEOUT}",
    ),
]
NO_CHECKPOINT = ["checkpoint.interval=0", "checkpoint.at_end=false"]


@dataclass
class Ended:
    """A command that has ended: its status, output, and seconds."""

    code: int
    output: str
    seconds: float
    seconds_after_fault: float

    def last_lines(self) -> list[str]:
        """The closing line of each rank that could still speak."""
        return [line for line in self.output.splitlines() if line.startswith("[rank ") and "the job ends" in line]


def start(
    overrides: list[str], run_dir: Path, ranks: int, fault: str = "none:-1:0", restarts: int = 0
) -> subprocess.Popen[str]:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
    ]
    arguments = ["-m", "tests.training.faulty", fault, *COMMON, *overrides, f"run_dir={run_dir}"]
    return subprocess.Popen(
        [sys.executable, *torchrun, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_with_own_launcher(
    overrides: list[str], run_dir: Path, folder: Path, fault: str, restarts: int = 0
) -> subprocess.Popen[str]:
    """The same on two ranks of launch/torchrun.sh; `folder` becomes a repository whose train.py has the fault."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name != "train.py" and not path.name.startswith(".git"):
            (folder / path.name).symlink_to(path)
    (folder / "train.py").write_text(
        f"import sys\nfrom tests.training import faulty\nsys.argv.insert(1, {fault!r})\nfaulty.main()\n"
    )
    options = ["--ranks-per-node", "2", "--max-restarts", str(restarts)]
    return subprocess.Popen(
        ["bash", str(folder / "launch" / "torchrun.sh"), *options, "--", *COMMON, *overrides, f"run_dir={run_dir}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], run_dir: Path, begin: float, limit: float = LONG) -> Ended:
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        for member in [*_family(process.pid)]:
            member.kill()
    now = time.time()
    steps = run_dir / "metrics.jsonl"
    return Ended(process.returncode, output, now - begin, now - (steps.stat().st_mtime if steps.exists() else begin))


def _family(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def run(overrides: list[str], run_dir: Path, ranks: int, fault: str = "none:-1:0", restarts: int = 0) -> Ended:
    begin = time.time()
    return finish(start(overrides, run_dir, ranks, fault, restarts), run_dir, begin)


def event(run_dir: Path, kind: str) -> dict[str, Any]:
    (found,) = [event for event in events.read(run_dir) if event["kind"] == kind]
    return found


@pytest.fixture(scope="module")
def undisturbed(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """The run on two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    lines = train_on_ranks([*COMMON, *data, *NO_CHECKPOINT, f"run_dir={folder}"], 2)
    assert status.read(folder)["state"] == "finished"
    return lines


def test_killed_rank_then_fewer_ranks(data: list[str], tmp_path: Path, undisturbed: Lines) -> None:
    """One of four ranks is lost; with the three that are left, the two that the batch can be dealt out to go on."""
    first = run(data, tmp_path, 4, "kill:3:7")
    assert first.code == 1 and first.seconds_after_fault < TIMEOUT, first.output
    lost = event(tmp_path, "rank_lost")
    assert (
        (lost["lost_rank"], lost["step"]) == (3, 6) and "is dead" in lost["text"] and "of 4 ranks" in lost["collective"]
    )
    assert first.last_lines() and all(lost["text"] in line for line in first.last_lines()), first.output
    assert status.read(tmp_path)["state"] == "failed"

    rest = run([*data, "training.elastic=true"], tmp_path, 3)
    assert rest.code == 0 and event(tmp_path, "fewer_ranks")["used"] == 2, rest.output
    assert event(tmp_path, "resumed")["step"] == 4
    assert largest_difference(read_metrics(tmp_path), undisturbed, "loss") < FP32_LOSS


def test_a_rank_that_raises_is_named(data: list[str], tmp_path: Path) -> None:
    begin = time.time()
    process = start_with_own_launcher([*data, *NO_CHECKPOINT], tmp_path / "run", tmp_path / "repository", "raise:1:7")
    ended = finish(process, tmp_path / "run", begin)
    assert ended.code == 1 and ended.seconds_after_fault < TIMEOUT, ended.output
    lost = event(tmp_path / "run", "rank_lost")
    assert (lost["lost_rank"], lost["step"]) == (1, 6) and "raised ZeroDivisionError: planted here" in lost["text"], (
        lost
    )
    assert ended.last_lines() and all(lost["text"] in line for line in ended.last_lines()), ended.output
    last = ended.output.splitlines()[-1]
    assert last.startswith("[rank ") and lost["text"] in last, ended.output


def test_restarts_go_on_by_themselves(data: list[str], tmp_path: Path, undisturbed: Lines) -> None:
    ended = run([*data, f"parallel.timeout_seconds={SHORT_TIMEOUT}"], tmp_path, 2, "stop:1:7", restarts=1)
    assert ended.code == 0, ended.output
    lost = event(tmp_path, "rank_lost")
    assert (lost["lost_rank"], lost["step"]) == (1, 6) and "is stopped (SIGSTOP)" in lost["text"], lost
    assert event(tmp_path, "resumed")["step"] == 4 and status.read(tmp_path)["state"] == "finished"
    assert largest_difference(read_metrics(tmp_path), undisturbed, "loss") == 0.0


def test_signal_on_one_rank_stops_all(data: list[str], tmp_path: Path, undisturbed: Lines) -> None:
    """Also where torchrun would start the ranks again: it takes their status for a failure."""
    first = run(data, tmp_path, 2, "SIGUSR1:1:3", restarts=1)
    content = status.read(tmp_path)
    assert (content["state"], content["step"]) == ("stopped_early", 3) and "SIGUSR1" in content["text"], first.output
    assert "exitcode  : 75" in first.output and first.output.count("steps 0 to") == 1
    assert [folder.name for folder in manifest.list_checkpoints(tmp_path)] == ["step_0000003"]
    assert [line["loss"] for line in read_metrics(tmp_path)] == [line["loss"] for line in undisturbed[:3]]


def test_signal_on_one_rank_before_the_first_step(data: list[str], tmp_path: Path) -> None:
    """All ranks end, and torchrun's new ones end at once."""
    ended = run([*data, *NO_CHECKPOINT], tmp_path, 2, "SIGUSR1:1:0", restarts=1)
    content = status.read(tmp_path)
    assert (content["state"], content["step"]) == ("stopped_early", 0), ended.output
    assert "rank 1 on" in content["text"] and "was stopped by SIGUSR1, before the first step" in content["text"]
    assert "exitcode  : 75" in ended.output and f"[rank 1] {content['text']}" in ended.output, ended.output
    assert not (tmp_path / "metrics.jsonl").exists() and event(tmp_path, "stopped_early")


def start_alone(overrides: list[str], run_dir: Path) -> subprocess.Popen[str]:
    """One process without torchrun, once it has taken steps."""
    process = subprocess.Popen(
        [sys.executable, "train.py", *COMMON, *overrides, f"run_dir={run_dir}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = run_dir / "metrics.jsonl"
    until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size), "the first step")
    return process


def test_signal_and_time_limit_of_one_process(data: list[str], tmp_path: Path) -> None:
    many = ["training.steps=100000", "optimizer.decay_steps=10"]
    process = start_alone([*data, *many], tmp_path / "signal")
    process.send_signal(signal.SIGINT)
    ended = finish(process, tmp_path, time.time())
    assert ended.code == STOPPED_EARLY and "Start it again to continue" in ended.output.splitlines()[-1], ended.output
    step = status.read(tmp_path / "signal")["step"]
    newest = manifest.list_checkpoints(tmp_path / "signal")[0]
    assert newest == manifest.folder_of(tmp_path / "signal", step) and manifest.problem_with(newest) is None

    begin = time.time()
    limited = finish(
        start_alone([*data, *many, "training.time_limit_minutes=0.01", *NO_CHECKPOINT], tmp_path / "time"),
        tmp_path,
        begin,
    )
    assert limited.code == STOPPED_EARLY and "training.time_limit_minutes" in limited.output, limited.output
    assert "NOTHING WAS SAVED" in limited.output and not manifest.list_checkpoints(tmp_path / "time")


TWICE = """
import signal, threading, time
from training.resilience.signals import StopSignals
stop = StopSignals()
stop.install()
print("ready", flush=True)
while not stop.received:
    time.sleep(0.01)
print("once", flush=True)
threading.Event().wait(600)
"""


def test_second_sigint_ends_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TWICE], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for answer in ("ready\n", "once\n"):
        assert process.stdout.readline() == answer
        process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGINT and "finishing the step" in output and "ended at once" in output


@pytest.mark.parametrize(
    ("overrides", "started", "used"),
    [
        ([], 3, 2),
        ([], 4, 4),
        ([], 7, 4),
        (["training.global_batch_size=6"], 5, 3),
        (["training.global_batch_size=6"], 4, 3),
        (["parallel.tensor=2"], 7, 4),
        (["experiment=gpt_moe_tiny", "parallel.expert=2"], 7, 4),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], 6, 4),
        (["parallel.tensor=2"], 1, 1),  # nothing fits: the error names what would
    ],
)
def test_elastic_takes_the_most_that_fit(overrides: list[str], started: int, used: int) -> None:
    sizes = ["training.global_batch_size=8", "training.micro_batch_size=1"]
    config = compose(["experiment=gpt_tiny", *sizes, "training.elastic=true", *overrides])
    assert usable_world_size(config, started) == used
    config.training.elastic = False
    assert usable_world_size(config, started) == started


def test_status_is_whole_json(tmp_path: Path) -> None:
    assert status.read(tmp_path) == {}
    status.write(tmp_path, "running", 3, "a line", steps=9)
    assert json.loads((tmp_path / status.STATUS).read_text())["state"] == "running"
    assert [path.name for path in tmp_path.iterdir()] == [status.STATUS]
