"""launch/agent.py and launch/rank.py with a stand-in for train.py: signals, statuses, restarts and logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import os, signal, sys, time
from pathlib import Path

rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
behaviour = next(word for word in sys.argv if word.startswith("name=")).removeprefix("name=")
print(f"rank {rank} of {world}, attempt {attempt}", flush=True)
Path(f"started_{rank}").touch()
asked = []
end = time.monotonic() + 30
if behaviour == "slow_to_hear":
    while not Path("sent").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1.0)  # as long as imports take; a signal that came now would be the end
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda signum, _: asked.append(signum))
if behaviour == "killed_at_first" and attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "fails_on_four" and world == 4 and rank == 2:
    sys.exit(7)
if behaviour in ("slow_to_hear", "deaf") or world == 4:
    while time.monotonic() < end and (not asked or behaviour == "deaf"):
        time.sleep(0.05)
    time.sleep(0.5 * rank)  # they save for different times
    print("asked by", *asked, flush=True)
    sys.exit(75)
"""


class Launch:
    """A folder that is a repository for launch/torchrun.sh, and one run of that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("launch", "configs"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "train.py").write_text(TRAIN)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        # Whatever started the tests may have had signals ignored, as a shell does for what it runs in the background.
        command = ["env", "--default-signal", "bash", str(self.folder / "launch" / "torchrun.sh"), *arguments]
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_for_ranks(self, count: int) -> None:
        end = time.monotonic() + 60
        while len(list(self.folder.glob("started_*"))) < count:
            assert time.monotonic() < end, "the ranks did not start"
            time.sleep(0.05)

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank:05}.out").read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_stop_on_purpose_is_no_failure_and_no_reason_to_start_again(launch: Launch) -> None:
    """Also where all processes get the signal, as under Slurm, before the ranks can answer it."""
    process = launch.start("--ranks-per-node", "2", "--max-restarts", "3", "--log-dir", "logs", "--", "name=slow_to_hear")
    launch.wait_for_ranks(2)
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        each.send_signal(signal.SIGUSR1)
    (launch.folder / "sent").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    assert "SIGUSR1: the ranks finish their step, save and stop" in err
    for rank in (0, 1):
        assert launch.log(rank) == f"rank {rank} of 2, attempt 0\nasked by {int(signal.SIGUSR1)}\n"


def test_rank_that_dies_is_started_again(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "2", "--max-restarts", "1", "--log-dir", "logs", "--", "name=killed_at_first")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert [launch.log(rank) for rank in (0, 1)] == [f"rank {rank} of 2, attempt 1\n" for rank in (0, 1)]


def test_without_restarts_left_it_names_the_rank_and_goes_on_with_fewer(launch: Launch) -> None:
    overrides = ["experiment=gpt_tiny", "name=fails_on_four", "training.global_batch_size=8", "training.micro_batch_size=4"]
    process = launch.start("--ranks-per-node", "4", "--min-ranks", "1", "--log-dir", "logs", "--", *overrides)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    named, went_on = [line for line in err.splitlines() if line.startswith("launch: ")]
    assert named.startswith("launch: rank 2 on ") and named.endswith(" failed first, with exit status 7: see its output")
    assert went_on == "launch: going on with 2 ranks in place of 4"  # 3 do not divide the batch
    assert [launch.log(rank) for rank in (0, 1)] == [f"rank {rank} of 2, attempt 0\n" for rank in (0, 1)]


def test_status_of_a_failure_is_the_first_failed_ranks(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "4", "--", "name=fails_on_four")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7 and "failed first, with exit status 7" in err.splitlines()[-1], out + err


def test_second_interrupt_ends_ranks_that_do_not_stop(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "2", "--", "name=deaf")
    launch.wait_for_ranks(2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT, out + err
    assert psutil.wait_procs(ranks, timeout=5)[1] == []
