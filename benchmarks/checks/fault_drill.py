"""Lose a rank again and again, in several layouts, and see how soon the job ends and whether it names the rank:

    python -m benchmarks.checks.fault_drill [--seed N] [--timeout SECONDS] [--json]

A rank of a training under torchrun is killed, stopped (SIGSTOP), made to hang or to raise, at a random step. The job
must end within parallel.timeout_seconds plus 15 s with that rank named in its events, and then, started again, finish
with the undisturbed run's losses, bit for bit. The exit status says whether all did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checks.kill_test import differences
from training.resilience import events

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("kill", "stop", "raise", "hang")
LAYOUTS = {
    "DP3": (3, ["experiment=gpt_tiny", "training.global_batch_size=6"]),
    "TP2": (2, ["experiment=gpt_tiny", "parallel.tensor=2"]),
    "PP2xVPP2": (2, ["experiment=gpt_tiny", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "EP2xDP2": (4, ["experiment=gpt_moe_tiny", "parallel.expert=2"]),
}
BEYOND = 15.0  # seconds beyond the timeout that the end of a job may take
LIMIT = 300.0
STEPS = 12


def train(ranks: int, fault: str, overrides: list[str], log: Path) -> tuple[int, float]:
    """Run a training to its end; exit status, and when it ended."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "tests.training.faulty",
        fault,
    ]
    common = [
        "logging=quiet",
        "sample.prompts=[]",
        "training.eval_interval=0",
        "training.micro_batch_size=1",
        "checkpoint.interval=3",
    ]
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *torchrun, *common, *overrides],
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            ended = time.time()
            if process.poll() is None:
                for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                    member.kill()
                process.wait(30)
    return process.returncode, ended


def drill(fault: str, layout: str, rng: random.Random, timeout: int, folder: Path) -> dict[str, Any]:
    """One fault in one layout: what happened."""
    ranks, overrides = LAYOUTS[layout]
    rank, step = rng.randrange(ranks), rng.randrange(3, STEPS)
    run_dir, whole = folder / f"{fault}-{layout}", folder / f"whole-{layout}"
    overrides = [*overrides, f"training.steps={STEPS}", f"parallel.timeout_seconds={timeout}"]
    if not whole.exists():
        train(ranks, "none:-1:0", [*overrides, f"run_dir={whole}"], folder / f"whole-{layout}.log")
    status, ended = train(
        ranks, f"{fault}:{rank}:{step}", [*overrides, f"run_dir={run_dir}"], folder / f"{fault}-{layout}.log"
    )
    begin = (run_dir / "metrics.jsonl").stat().st_mtime  # of the last step before the fault
    lost = [event for event in events.read(run_dir) if event["kind"] == "rank_lost"]
    named = len(lost) == 1 and lost[0]["lost_rank"] == rank and lost[0]["step"] == step - 1
    again, _ = train(ranks, "none:-1:0", [*overrides, f"run_dir={run_dir}"], folder / f"{fault}-{layout}-again.log")
    found = differences(run_dir, whole)
    if again != 0 or found:  # what a temporary folder would take along
        tail = (folder / f"{fault}-{layout}-again.log").read_text(errors="replace")[-2000:]
        print(f"the second start ended with {again}; {found[:2]}; its log ends:\n{tail}")
    return {
        "fault": fault,
        "layout": layout,
        "rank": rank,
        "step": step,
        "seconds": ended - begin,
        "named": named,
        "collective": lost[0]["collective"] if lost else "",
        "resumed": again == 0 and not found,
        "held": status == 1 and ended - begin < timeout + BEYOND,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of ranks and steps")
    parser.add_argument("--timeout", type=int, default=12, help="parallel.timeout_seconds")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    print(
        f"seed {arguments.seed}; parallel.timeout_seconds={arguments.timeout}; the job must end within "
        f"{arguments.timeout + BEYOND:g} s"
    )
    print(
        f"{'fault':<7}{'layout':<10}{'rank':>5}{'step':>5}{'seconds':>9}  {'named':<6}{'bit for bit':<12}last "
        "collective",
        flush=True,
    )
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in arguments.layouts:
            for fault in arguments.faults:
                result = drill(fault, layout, rng, arguments.timeout, Path(folder))
                results.append(result)
                print(
                    f"{fault:<7}{layout:<10}{result['rank']:>5}{result['step']:>5}{result['seconds']:>9.1f}  "
                    f"{'yes' if result['named'] else 'NO':<6}{'yes' if result['resumed'] else 'NO':<12}"
                    f"{result['collective']}",
                    flush=True,
                )
    good = sum(result["held"] and result["named"] and result["resumed"] for result in results)
    print(f"{good} of {len(results)} ended in time, named the rank and its step, and went on bit for bit")
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "timeout": arguments.timeout, "good": good, "results": results}))
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
