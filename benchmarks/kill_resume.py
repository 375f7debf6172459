"""Kill a training again and again, and compare it with one that was left alone: python -m benchmarks.kill_resume.

The same `train.py` command is started, ended with SIGKILL (all ranks at once, torchrun included) and started again, until it
has been killed as often as asked and then ends by itself. Kills fall at random moments of the run, some of them while a
checkpoint is being written or deleted. Loss, gradient norm and learning rate of every step must equal the undisturbed run's
bit for bit, and every step must be on record once; the exit status says whether that held.

Further arguments are config overrides for both runs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
POLL = 0.001  # seconds between looks for a temporary folder: a small checkpoint is written within some ten milliseconds
LIMIT = 300.0  # seconds that one start of the training may take
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "tokens")
MAX_COUNT = 8  # events that are let pass at most
KINDS = {"start": 0.2, "record": 0.4, "writing": 0.4}  # shares of the kills


@dataclass(frozen=True)
class Kill:
    """When to kill: `delay` seconds after the command's start, or after the `count`-th time that metrics.jsonl changes or that a
    checkpoint is seen being written or deleted."""

    after: str  # start | record | writing
    delay: float
    count: int = 1


@dataclass(frozen=True)
class Start:
    """One start of the command: what was planned, whether the kill came in time, and what it left behind."""

    kill: Kill | None
    killed: bool
    steps_on_record: int
    left_unfinished: bool  # a checkpoint was being written or deleted
    seconds: float


def command(ranks: int, overrides: Sequence[str]) -> list[str]:
    """The command line of a training, under torchrun where there is more than one rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    quiet = ["logging=quiet", "sample.prompts=[]", "training.eval_interval=0"]
    return [sys.executable, *torchrun, "train.py", *quiet, *overrides]


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, with what must not depend on kills."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [{key: line[key] for key in COMPARED} for line in lines]


def run_once(arguments: Sequence[str], run_dir: Path, log: Path, kill: Kill | None = None) -> Start:
    """Start the command and kill it as planned, or wait for its end. Raises RuntimeError if it fails or outlives the limit."""
    begin = time.monotonic()
    before, left_before = _marks(run_dir, kill), _unfinished(run_dir)
    seen: set[str] = set()
    moment: float | None = None  # when to kill, once that is known
    with open(log, "ab") as stream:
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now - begin > LIMIT:
                    raise RuntimeError(f"not finished within {LIMIT:g} s:\n{_tail(log)}")
                if kill is not None:
                    seen |= _new(_marks(run_dir, kill), before)
                    if moment is None and (kill.after == "start" or len(seen) >= kill.count):
                        moment = now + kill.delay
                    if moment is not None and now >= moment:
                        break
                time.sleep(POLL)
            killed = process.poll() is None
        finally:
            kill_all(process)
    if not killed and process.returncode != 0:
        raise RuntimeError(f"exit status {process.returncode}:\n{_tail(log)}")
    return Start(kill, killed, len(read_steps(run_dir)), bool(_new(_unfinished(run_dir), left_before)), time.monotonic() - begin)


def _marks(run_dir: Path, kill: Kill | None) -> dict[str, int]:
    """What is seen now of the event that a kill waits for: each time that it happens another key, or another value."""
    if kill is not None and kill.after == "writing":
        return _unfinished(run_dir)
    try:
        return {str((run_dir / "metrics.jsonl").stat().st_size): 0}
    except FileNotFoundError:
        return {}


def _unfinished(run_dir: Path) -> dict[str, int]:
    """Temporary checkpoint folders, and when they changed last: what an earlier kill left behind stays as it is."""
    found = {}
    for folder in (run_dir / "checkpoints").glob("*.tmp"):
        try:
            found[folder.name] = folder.stat().st_ctime_ns
        except FileNotFoundError:
            continue
    return found


def _new(now: dict[str, int], before: dict[str, int]) -> set[str]:
    return {name for name, mark in now.items() if before.get(name) != mark}


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a command and all its descendants (torchrun's ranks are sessions of their own), and wait until they are gone."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
    psutil.wait_procs(family, timeout=30)


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """What differs between two records, a line for each step."""
    found = []
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        found.append(f"steps on record: {[line['step'] for line in ours]}, expected {[line['step'] for line in theirs]}")
    found += [f"{a} differs from {b}" for a, b in zip(ours, theirs) if a != b]
    return found


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for both runs")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    expert = ["parallel.expert=2"] if arguments.ranks % 2 == 0 else []
    overrides = [
        *("experiment=gpt_moe_tiny", "model.hidden_dropout=0.1", "model.attention_dropout=0.1", "training.precision=bf16"),
        *("checkpoint.interval=2", "checkpoint.keep=2", f"training.steps={arguments.steps}", *expert, *arguments.overrides),
    ]
    starts: list[Start] = []
    with tempfile.TemporaryDirectory() as folder:
        whole, disturbed = Path(folder) / "whole", Path(folder) / "disturbed"
        print(f"undisturbed run of {arguments.steps} steps on {arguments.ranks} ranks ...", flush=True)
        seconds = run_once(command(arguments.ranks, [*overrides, f"run_dir={whole}"]), whole, Path(folder) / "whole.log").seconds
        longest_delay = {"start": seconds, "record": 0.2, "writing": 0.05}
        line = command(arguments.ranks, [*overrides, f"run_dir={disturbed}"])
        log = Path(folder) / "disturbed.log"
        print(f"{'start':>5}{'kill after':>12}{'delay s':>9}{'steps':>7}{'unfinished':>12}{'seconds':>9}", flush=True)
        while True:
            kill = None
            if sum(start.killed for start in starts) < arguments.kills and len(starts) < 2 * arguments.kills:
                (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
                kill = Kill(kind, rng.uniform(0, longest_delay[kind]), rng.randint(1, MAX_COUNT))
            start = run_once(line, disturbed, log, kill)
            starts.append(start)
            print(
                f"{len(starts):>5}{kill.after if kill else '':>12}{kill.delay if kill else 0:>9.3f}{start.steps_on_record:>7}"
                f"{'yes' if start.left_unfinished else '':>12}{start.seconds:>9.1f}",
                flush=True,
            )
            if kill is None:
                break
        found = differences(read_steps(disturbed), read_steps(whole))
    kills, unfinished = sum(start.killed for start in starts), sum(start.killed and start.left_unfinished for start in starts)
    for text in found:
        print(text)
    verdict = "different from" if found else "bit for bit equal to"
    print(f"{kills} kills, {unfinished} of them left a checkpoint half written or half deleted; {verdict} the undisturbed run")
    if arguments.json:
        print(json.dumps({"kills": kills, "unfinished": unfinished, "differences": found, "starts": len(starts)}))
    return 1 if found or kills < arguments.kills else 0


if __name__ == "__main__":
    sys.exit(main())
