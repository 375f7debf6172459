"""launch/slurm.sbatch and launch/submit.py under a real Slurm of two nodes on this machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.cluster import NODES, Cluster, cluster, lacking
from tests.waits import until

ROOT = Path(__file__).resolve().parents[2]
CPU = ["--nodes", "2", "--gpus-per-node", "0"]  # one rank a node
STEPS = 24

LACKING = lacking()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(LACKING), reason=f"a Slurm of our own needs {', '.join(LACKING)}"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as it:
        yield it
    until(lambda: not it.processes(), f"the end of {it.processes()}")


def submit(slurm: Cluster, repo: Path, log: Path, *arguments: str) -> str:
    """The number of the job that launch.submit made."""
    separator = arguments.index("--")
    options = [*CPU, "--output", str(log), *arguments[:separator]]
    printed = slurm.output(sys.executable, "-m", "launch.submit", *options, *arguments[separator:], cwd=repo)
    assert printed.splitlines()[-1].startswith("Submitted batch job "), printed
    return printed.split()[-1]


def wait_until(condition: Callable[[], bool], what: str, log: Path) -> None:
    try:
        until(condition, what, poll=0.1)
    except AssertionError as error:
        pytest.fail(f"{error}; {log}:\n{log.read_text() if log.exists() else 'not there'}")


def steps_on_record(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]


def said(run_dir: Path) -> tuple[str, int]:
    """The run's state and step as it tells launchers."""
    content = json.loads((run_dir / "status.json").read_text())
    return content["state"], content["step"]


def ranks_of(slurm: Cluster) -> dict[int, psutil.Process]:
    """The ranks that run now, by number."""
    return {
        int(process.environ()["RANK"]): process for process in slurm.processes() if "launch.rank" in process.cmdline()
    }


def test_training_on_two_nodes_is_preempted_resumes_loses_a_rank_and_finishes(
    slurm: Cluster, data: list[str], tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "job.out"
    overrides = [
        "experiment=gpt_moe_tiny",
        "logging=quiet",
        "parallel.expert=2",
        f"training.steps={STEPS}",
        "sample.prompts=[]",
    ]
    overrides += [
        "training.global_batch_size=32",
        "checkpoint.interval=5",
        "training.eval_interval=0",
        f"run_dir={run_dir}",
        *data,
    ]
    number = submit(slurm, ROOT, log, "--time", "10", "--max-restarts", "1", "--", *overrides)

    wait_until(lambda: len(steps_on_record(run_dir)) >= 3, "3 steps", log)
    assert slurm.job(number)["NodeList"] == "n[1-2]"
    slurm.output("scancel", "--batch", "--signal=USR1", number)
    slurm.wait_for(number, ["PENDING", "COMPLETING"])
    stopped_at = steps_on_record(run_dir)[-1]
    assert 3 <= stopped_at < STEPS - 5
    assert said(run_dir) == ("stopped_early", stopped_at)
    assert (run_dir / "checkpoints" / f"step_{stopped_at:07}").is_dir()

    wait_until(lambda: steps_on_record(run_dir)[-1] > stopped_at, "the next step", log)
    ranks_of(slurm)[1].kill()
    try:
        job = slurm.wait_for(number, ["COMPLETED"])
    except RuntimeError as error:
        pytest.fail(f"{error}\n{log.read_text()}")
    assert (job["Restarts"], job["ExitCode"]) == ("1", "0:0")
    assert steps_on_record(run_dir) == list(range(1, STEPS + 1))
    assert said(run_dir) == ("finished", STEPS)
    text = log.read_text()
    assert f"stopped early (status 75) with step {stopped_at} saved; queueing the job again" in text
    assert f"attempt 1, {len(NODES)} node(s) of 1 rank(s), rendezvous at 127.0.0.1:" in text
    assert text.count("resumed from ") == 2 and f"step_{stopped_at:07} at step {stopped_at}\n" in text
    for attempt in (0, 1):
        folder = run_dir / "logs" / number / f"attempt_{attempt}"
        assert sorted(path.name for path in folder.glob("rank_*")) == [
            f"rank_0000{rank}.{end}" for rank in (0, 1) for end in ("err", "out")
        ]
    assert "resumed from " in (folder / "rank_00000.out").read_text()


# What becomes of jobs, with a stand-in for launch/torchrun.sh: it says where it runs, and saves and stops when it is
# warned.
TORCHRUN = 'exec .venv/bin/python stand_in.py "$@"\n'
STAND_IN = """
import os, signal, sys, time
from pathlib import Path

warned = []
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, lambda *_: warned.append(True))
run_dir = Path(sys.argv[sys.argv.index("--log-dir") + 1]).parents[2]
saved = run_dir / "checkpoints" / "step_0000005"
saved.parent.mkdir(parents=True, exist_ok=True)
(run_dir / f"node_{os.environ['SLURM_NODEID']}").touch()
end = time.monotonic() + 600
while time.monotonic() < end and not saved.exists():
    if warned:
        if "saves_nothing" not in str(run_dir):
            saved.mkdir(exist_ok=True)
        sys.exit(75)
    time.sleep(0.05)
time.sleep(0.5)  # both see it
sys.exit(75 if warned else 0)
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with the stand-in in place of the real script."""
    folder = tmp_path / "repo"
    (folder / "launch").mkdir(parents=True)
    for path in (ROOT / "launch").glob("*.py"):
        shutil.copy(path, folder / "launch")
    shutil.copy(ROOT / "launch" / "slurm.sbatch", folder / "launch")
    for package in ("base", "configs"):
        (folder / package).symlink_to(ROOT / package)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "launch" / "torchrun.sh").write_text(TORCHRUN)
    (folder / "stand_in.py").write_text(STAND_IN)
    return folder


def test_cancelled_job_stays_cancelled(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "job.out"
    number = submit(slurm, repo, log, "--", "experiment=gpt_tiny", f"run_dir={run_dir}")
    wait_until(lambda: len(list(run_dir.glob("node_*"))) == 2, "both nodes", log)
    slurm.output("scancel", number)
    job = slurm.wait_for(number, ["CANCELLED"])
    assert job["Restarts"] == "0"


def test_run_that_gets_nowhere_is_not_queued_for_ever(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "saves_nothing", tmp_path / "job.out"
    number = submit(slurm, repo, log, "--", "experiment=gpt_tiny", f"run_dir={run_dir}")
    wait_until(lambda: len(list(run_dir.glob("node_*"))) == 2, "both nodes", log)
    slurm.output("scancel", "--batch", "--signal=USR1", number)
    job = slurm.wait_for(number, ["FAILED"])
    assert (job["Restarts"], job["ExitCode"]) == ("0", "75:0")
    assert "no checkpoint newer than step 0: the job is not queued again" in log.read_text()


def test_tasks_of_an_array_go_on_by_themselves_each_in_its_own_folder(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """One is warned and queues itself again; the other Slurm takes the nodes from, as for a job of higher priority."""
    run_dir = tmp_path / "run"
    folders = {task: Path(f"{run_dir}_{task}") for task in ("3", "7")}
    options = ["--nodes", "1", "--array", "3,7"]
    number = submit(slurm, repo, tmp_path / "job_%a.out", *options, "--", "experiment=gpt_tiny", f"run_dir={run_dir}")
    for task, folder in folders.items():
        wait_until((folder / "node_0").exists, f"task {task}", tmp_path / f"job_{task}.out")
    slurm.output("scontrol", "requeue", f"{number}_3")
    slurm.output("scancel", "--batch", "--signal=USR1", f"{number}_7")
    for task, folder in folders.items():
        assert slurm.wait_for(f"{number}_{task}", ["COMPLETED"])["Restarts"] == "1"
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_0000005"]
    assert not run_dir.exists()


def test_impossible_config_is_refused_before_it_queues(slurm: Cluster) -> None:
    before = slurm.output("squeue", "--noheader", "--states=all")
    with pytest.raises(RuntimeError, match=r"config error: world_size \(2\) must be divisible by .* Try "):
        slurm.output(
            sys.executable, "-m", "launch.submit", *CPU, "--", "experiment=gpt_tiny", "parallel.tensor=4", cwd=ROOT
        )
    assert slurm.output("squeue", "--noheader", "--states=all") == before
