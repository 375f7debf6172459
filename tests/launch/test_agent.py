"""launch/agent.py and launch/rank.py with a stand-in for train.py: signals, statuses, restarts, logs and the last
line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import agent
from tests.launch.sockets import kill_family
from tests.waits import LONG, until, until_gone

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import os, signal, sys, time
from pathlib import Path

rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
behaviour = next(word for word in sys.argv if word.startswith("name=")).removeprefix("name=")
print(f"rank {rank} of {world}, attempt {attempt}", flush=True)
Path(f"started_{rank}").touch()
asked = []
end = time.monotonic() + 600  # far beyond what the tests wait for
if behaviour in ("early", "lone"):
    from training.resilience import launcher, signals
    signals.of_this_process.end_at_once()
    launcher.of_this_process.watch()
    Path(f"listens_{rank}").touch()
    time.sleep(600)
if behaviour == "slow_to_hear":
    while not Path("sent").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1.0)  # as long as imports take; a signal that came now would be the end
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda signum, _: asked.append(signum))
if behaviour == "killed_at_first" and attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "killed_then_wrong" and attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
if behaviour == "killed_then_wrong" and attempt == 1 and rank == 0:
    from base import exit_handler
    exit_handler.log("config error: some.key (3) must be 4.\\nTry some.key=4", 2)
    sys.exit(2)
if behaviour == "raises" and rank == 1:
    raise LookupError("no such thing\\nanywhere")
if behaviour in ("killed_then_wrong", "raises"):
    while time.monotonic() < end and not asked:
        time.sleep(0.05)
    sys.exit(1)
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
        self.processes: list[subprocess.Popen[str]] = []
        for name in ("launch", "base", "configs", "training"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "train.py").write_text(TRAIN)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        # Whatever started the tests may have had signals ignored, as a shell does for what it runs in the background.
        command = ["env", "--default-signal", "bash", str(self.folder / "launch" / "torchrun.sh"), *arguments]
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def wait_for_ranks(self, count: int, sign: str = "started") -> None:
        until(lambda: len(list(self.folder.glob(f"{sign}_*"))) == count, "the ranks to start")

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank:05}.out").read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    it = Launch(tmp_path)
    yield it
    for process in it.processes:
        kill_family(process)


def test_stop_on_purpose_is_no_failure_and_no_reason_to_start_again(launch: Launch) -> None:
    """Also where all processes get the signal, as under Slurm, before the ranks can answer it."""
    process = launch.start(
        "--ranks-per-node", "2", "--max-restarts", "3", "--log-dir", "logs", "--", "name=slow_to_hear"
    )
    launch.wait_for_ranks(2)
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        each.send_signal(signal.SIGUSR1)
    (launch.folder / "sent").touch()
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 75, out + err
    assert "SIGUSR1: the ranks finish their step, save and stop" in err
    assert err.startswith("launch: starting 2 ranks on this node\n")
    assert re.findall(r"^[WE]\d{4} .*", err, re.M) == []  # torch's own words
    for rank in (0, 1):
        assert launch.log(rank) == f"rank {rank} of 2, attempt 0\nasked by {int(signal.SIGUSR1)}\n"


def _rank(launch: Launch, sender: str) -> int:
    """The status of a rank that was sent a SIGTERM before it could answer, by its parent or by somebody else."""
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "rank = subprocess.Popen([sys.executable, '-m', 'launch.rank', 'mark', '', 'name=ends'])\n"
        f"{sender}\n"
        f"sys.exit(rank.wait(timeout={LONG}) % 256)"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=launch.folder, env=env, timeout=LONG, check=False, capture_output=True
    ).returncode


def test_a_rank_that_torch_asks_to_end_before_it_can_answer_ends(launch: Launch) -> None:
    """Else torch would wait half a minute for it. What Slurm sends to all processes passes by."""
    assert _rank(launch, "rank.send_signal(signal.SIGTERM)") == -signal.SIGTERM % 256
    assert _rank(launch, "subprocess.run(['bash', '-c', f'kill -TERM {rank.pid}'], check=True)") == 0


def test_rank_that_dies_is_started_again(launch: Launch) -> None:
    process = launch.start(
        "--ranks-per-node", "2", "--max-restarts", "1", "--log-dir", "logs", "--", "name=killed_at_first"
    )
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, out + err
    assert [launch.log(rank) for rank in (0, 1)] == [f"rank {rank} of 2, attempt 1\n" for rank in (0, 1)]


def test_without_restarts_left_it_names_the_rank_and_goes_on_with_fewer(launch: Launch) -> None:
    overrides = [
        "experiment=gpt_tiny",
        "name=fails_on_four",
        "training.global_batch_size=8",
        "training.micro_batch_size=4",
    ]
    process = launch.start("--ranks-per-node", "4", "--min-ranks", "1", "--log-dir", "logs", "--", *overrides)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, out + err
    _, named, went_on = [line for line in err.splitlines() if line.startswith("launch: ")]
    assert named.startswith("launch: rank 2 on ") and named.endswith(
        " failed first, with exit status 7: see its output"
    )
    assert went_on == "launch: continuing with 2 ranks instead of 4"  # 3 do not divide the batch
    assert [launch.log(rank) for rank in (0, 1)] == [f"rank {rank} of 2, attempt 0\n" for rank in (0, 1)]


def test_status_of_a_failure_is_the_first_failed_ranks(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "4", "--", "name=fails_on_four")
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 7 and "failed first, with exit status 7" in err.splitlines()[-1], out + err


def test_last_line_is_the_last_attempts_and_a_wrong_config_is_not_started_again(launch: Launch) -> None:
    process = launch.start(
        "--ranks-per-node", "2", "--max-restarts", "5", "--log-dir", "logs", "--", "name=killed_then_wrong"
    )
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 2, out + err
    lines = err.splitlines()
    assert lines[-1] == "[rank 0] config error: some.key (3) must be 4. Try some.key=4"
    assert any(line.startswith("launch: rank 1 on ") and " was killed by SIGSEGV" in line for line in lines)
    assert launch.log(0) == "rank 0 of 2, attempt 1\n"
    (left,) = (launch.folder / "logs").glob("end_*")
    assert left.read_text().split(" ", 1)[1] == lines[-1] + "\n"


def test_exception_that_nobody_takes_is_the_last_line(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "2", "--", "name=raises")
    out, err = process.communicate(timeout=LONG)
    assert (process.returncode, err.splitlines()[-1]) == (1, "[rank 1] LookupError: no such thing anywhere"), out + err


KILLED, SEGV, ASKED = -int(signal.SIGKILL), -int(signal.SIGSEGV), -int(signal.SIGTERM)


@pytest.mark.parametrize(
    ("ended", "ends", "line", "status"),
    # the ranks that had ended before torch ended the rest; each rank's exit code, and its words with their status and
    # time
    [
        ([1], {0: (2, ("a", 2, 10.2)), 1: (2, ("b", 2, 10.1))}, "b", 2),
        ([], {0: (ASKED, ("a", 2, 10.2)), 1: (ASKED, ("b", 2, 10.1))}, "b", 2),  # asked to end when they had spoken
        ([0], {0: (1, ("lost a rank", 1, 10.2)), 1: (2, ("wrong", 2, 12.1))}, "wrong", 2),
        (
            [1],
            {0: (1, ("rank 1 is dead", 1, 10.0)), 1: (KILLED, None)},
            "launch: rank 1 on HOST was killed by SIGKILL",
            137,
        ),
        (
            [1],
            {0: (1, ("the job ends: rank 1 on h is stopped", 1, 13.0)), 1: (KILLED, None)},
            "the job ends: rank 1 on h is stopped",
            1,
        ),
        (
            [0, 1],
            {0: (1, ("rank 1 on h is dead", 1, 10.0)), 1: (KILLED, None)},
            "launch: rank 1 on HOST was killed by SIGKILL",
            137,
        ),
        ([1], {0: (ASKED, None), 1: (SEGV, None)}, "launch: rank 1 on HOST was killed by SIGSEGV", 139),
        (
            [0, 3],
            {0: (75, ("stop", 75, 9.0)), 3: (7, None)},
            "launch: rank 3 on HOST failed first, with exit status 7: see its output",
            7,
        ),
        ([1], {0: (75, ("stopped 0", 75, 10.0)), 1: (75, ("stopped 1", 75, 10.1))}, "stopped 1", 75),
        ([0], {0: (1, ("hangs", 1, 10.2)), 1: (KILLED, None)}, "hangs", 1),  # it did not end when asked
        ([1], {0: (1, None), 1: (1, ("raised", 1, 10.2))}, "raised", 1),
        (
            [0],
            {0: (1, None), 1: (1, ("raised", 1, 10.2))},
            "launch: rank 0 on HOST failed first, with exit status 1: see its output",
            1,
        ),
        ([5], {5: (ASKED, None)}, "launch: rank 5 on HOST was killed by SIGTERM", 143),
        ([5], {5: (-63, None)}, "launch: rank 5 on HOST was killed by signal 63", 191),
    ],
)
def test_cause_among_failures(
    tmp_path: Path, ended: list[int], ends: dict[int, tuple[int, Any]], line: str, status: int
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = {}
    for rank, (code, said) in ends.items():
        path = tmp_path / f"{rank}.json"
        if said is not None:
            words, end, when = said
            extra = {"py_callstack": words, "timestamp": str(int(when)), "time": when, "status": end}
            path.write_text(json.dumps({"message": {"message": words, "extraInfo": extra}}))
        failures[rank] = ProcessFailure(0, 1, code, str(path))
    cause = agent._cause(failures, ended)
    assert cause.status == status
    assert cause.line.replace(" (by another process, or because memory ran out)", "") == line.replace(
        "HOST", socket.gethostname()
    )


def test_words_of_another_program_are_taken_too(tmp_path: Path) -> None:
    """What torch's own `record` leaves, in both of its forms."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    (tmp_path / "dict").write_text(
        json.dumps({"message": {"message": "E: x", "extraInfo": {"py_callstack": "a", "timestamp": "5"}}})
    )
    (tmp_path / "text").write_text(json.dumps({"message": "in C++", "timestamp": "5"}))
    for name, line in (("dict", "E: x"), ("text", "in C++")):
        assert agent._cause({0: ProcessFailure(0, 1, 3, str(tmp_path / name))}) == agent.Cause(line, 3)


def test_signal_before_the_first_step_ends_all_ranks_with_the_status_of_a_stop(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "2", "--max-restarts", "3", "--", "name=early")
    launch.wait_for_ranks(2, "listens")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 75, out + err
    assert err.splitlines()[-1].endswith(
        "] stopped by SIGTERM before the first step, with nothing to save. Start it again to continue"
    )
    assert "attempt 1" not in out


def test_rank_whose_launcher_was_killed_ends(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "1", "--", "name=lone")
    launch.wait_for_ranks(1, "listens")
    ranks = psutil.Process(process.pid).children()
    process.kill()
    assert len(ranks) == 1
    until_gone(ranks)
    _, err = process.communicate(timeout=LONG)
    assert err.splitlines()[-1].startswith(f"the launcher (process {process.pid}) is gone, so this rank ends too."), err


def test_second_interrupt_ends_ranks_that_do_not_stop(launch: Launch) -> None:
    process = launch.start("--ranks-per-node", "2", "--", "name=deaf")
    launch.wait_for_ranks(2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "again to end them at once" not in process.stderr.readline():  # two signals that are pending are one
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGINT, out + err
    until_gone(ranks)
