"""Kill trainings again and again, and compare them with ones that were left alone.

`python -m benchmarks.kill_test [--kills 200] [--seed 0] [--layouts single,ep2,tp2,pp2_ep2] [--steps 40] [--json] [KEY=VALUE ...]`

GPT-MoE runs in several layouts are killed with SIGKILL and started again until each has had its share of the kills and ends by
itself. Each kill falls at a random moment of a random kind: any moment from the start on, while a checkpoint is saved (taken,
written, put in place or an old one deleted), while one is loaded, or during an evaluation; it takes all ranks at once, or one
rank, and the others some moments later. Every run must end with the loss, validation loss, gradient norm and learning rate of
every step bit for bit those of the undisturbed run, each step on record once. No checkpoint that was announced may be lost:
after each kill it must be there and good, or as many newer good ones as `checkpoint.keep` asks for.

The ranks are forked from this process, which has imported everything already and only plays torchrun: a start then takes
less than a second. tests/training/test_kill.py does the same to real command lines, torchrun included. Exit status 1 where
anything differed; further arguments are config overrides for all runs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from training import contents, manifest, resume, saver
from training.callbacks import evaluation
from training.trainer import Trainer

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "ep2": (2, ["parallel.expert=2", "training.precision=bf16"]),
    "tp2": (2, ["parallel.tensor=2", "parallel.sequence=true", "optimizer.distributed=false"]),
    "pp2_ep2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
}
KINDS = {"any": 0.25, "save": 0.35, "load": 0.2, "evaluate": 0.2}  # shares of the kills
PHASES = ("any", "save", "load", "evaluate")  # what a rank says that it does, by index
LONGEST_DELAY = {"any": 2.0, "save": 0.03, "load": 0.015, "evaluate": 0.015}  # seconds after the phase began
MAX_COUNT = 6  # times that a phase is let pass at most
SURVIVORS = 0.5  # seconds at most that the other ranks outlive one that was killed
POLL = 0.0005  # seconds
LIMIT = 120.0  # seconds that one start may take
COMPARED = ("step", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens")


@dataclass(frozen=True)
class Kill:
    """When, and whom: `delay` seconds after the start or after the `count`-th time that any rank begins `kind`; rank None is all ranks."""

    kind: str
    count: int
    delay: float
    rank: int | None
    gap: float  # seconds until the other ranks go


@dataclass
class Run:
    """A run folder over several starts, and what it promised."""

    run_dir: Path
    log: Path
    announced: set[int] = field(default_factory=set)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all layouts together")
    parser.add_argument("--seed", type=int, default=None, help="of the kills; default: a new one")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs")
    arguments = parser.parse_args()
    layouts = arguments.layouts.split(",")
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"no such layout: {min(unknown)}; there are {', '.join(LAYOUTS)}")
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}: {arguments.kills} kills over {', '.join(layouts)}", flush=True)
    rng, begin = random.Random(seed), time.monotonic()
    landed: Counter[str] = Counter()
    victims: Counter[str] = Counter()
    found: list[str] = []
    runs = unfinished = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(layouts):
            share = arguments.kills // len(layouts) + (i < arguments.kills % len(layouts))
            result = kill_runs(name, share, arguments.steps, rng, Path(folder) / name, arguments.overrides)
            landed += result.landed
            victims += result.victims
            found += result.found
            runs, unfinished = runs + result.runs, unfinished + result.unfinished
    for text in found:
        print(text)
    kills = sum(landed.values())
    where = ", ".join(f"{count} {'while in ' + kind if kind != 'any' else 'elsewhere'}" for kind, count in landed.most_common())
    print(
        f"seed {seed}: {kills} kills ({where}; {victims['all']} of all ranks, {victims['one']} of one) in {runs} runs, {unfinished} left a "
        f"checkpoint unfinished; {'NOT ' if found else ''}bit for bit the undisturbed runs, "
        f"{'see above' if found else 'no announced checkpoint lost'}; {time.monotonic() - begin:.0f} s"
    )
    if arguments.json:
        result_json = {"seed": seed, "kills": kills, "during": dict(landed), "victims": dict(victims), "runs": runs}
        print(json.dumps({**result_json, "unfinished": unfinished, "differences": found}))
    return 1 if found or kills < arguments.kills else 0


@dataclass
class Result:
    """What the kills of one layout came to."""

    landed: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    runs: int = 0
    unfinished: int = 0


def kill_runs(name: str, kills: int, steps: int, rng: random.Random, folder: Path, overrides: Sequence[str]) -> Result:
    """Kill runs of one layout that often. Raises RuntimeError where a start fails by itself."""
    ranks, layout = LAYOUTS[name]
    common = [
        *("experiment=gpt_moe_tiny", "model.hidden_dropout=0.1", "model.attention_dropout=0.1", f"training.steps={steps}"),
        *("training.eval_interval=3", "training.eval_batches=2", "checkpoint.interval=2", "checkpoint.keep=2", "checkpoint.keep_every=10"),
        *("logging=quiet", "sample.prompts=[]", *layout, *overrides),
    ]

    def new_run(label: str) -> tuple[Config, Run]:
        run = Run(folder / label, folder / f"{label}.log")
        run.run_dir.mkdir(parents=True)
        config = compose([*common, f"run_dir={run.run_dir}"])
        validate(config, ranks)
        return config, run

    result = Result()
    config, whole = new_run("whole")
    if start(config, ranks, whole) is not None:
        raise AssertionError("nobody asked for a kill")
    print(f"{name}: {'kill':>5} {'in':>9} {'after s':>8}  {'victims':<8} {'steps':>6}  good checkpoints", flush=True)
    config, run = new_run("run0")
    while sum(result.landed.values()) < kills:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
        count = rng.randint(1, ranks * (2 if kind == "load" else MAX_COUNT))  # a start looks for a checkpoint, then loads it
        kill = Kill(kind, count, rng.uniform(0, LONGEST_DELAY[kind]), rank, rng.uniform(0, SURVIVORS))
        during = start(config, ranks, run, kill)
        problems = lost(run, config.checkpoint.keep)
        if during is None:
            result.runs += 1
            result.found += [f"{name}, {run.run_dir.name}: {text}" for text in [*problems, *differences(run.run_dir, whole.run_dir)]]
            config, run = new_run(f"run{result.runs}")
            continue
        result.landed[during] += 1
        result.victims["all" if rank is None else "one"] += 1
        result.unfinished += any((run.run_dir / "checkpoints").glob("*.*"))
        result.found += [f"{name}, {run.run_dir.name}: {text}" for text in problems]
        good = [int(path.name[5:]) for path in manifest.list_checkpoints(run.run_dir) if manifest.verify(path) is None]
        print(
            f"{name}: {sum(result.landed.values()):>5} {during:>9} {kill.delay:>8.3f}  {'all' if rank is None else f'rank {rank}':<8} "
            f"{len(read_steps(run.run_dir)):>6}  {sorted(good)}",
            flush=True,
        )
    if start(config, ranks, run) is not None:
        raise AssertionError("nobody asked for a kill")
    result.runs += 1
    texts = [*lost(run, config.checkpoint.keep), *differences(run.run_dir, whole.run_dir)]
    result.found += [f"{name}, {run.run_dir.name}: {text}" for text in texts]
    return result


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, with what must not depend on kills."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [{key: line.get(key) for key in COMPARED} for line in lines]


def differences(ours: Path, theirs: Path) -> list[str]:
    """What differs between the records of two runs, a line for each step."""
    a, b = read_steps(ours), read_steps(theirs)
    found = [f"{x} differs from {y}" for x, y in zip(a, b) if x != y]
    if [x["step"] for x in a] != [y["step"] for y in b]:
        found.append(f"steps on record: {[x['step'] for x in a]}, expected {[y['step'] for y in b]}")
    return found


def lost(run: Run, keep: int) -> list[str]:
    """Announced checkpoints that are neither good nor made up for by `keep` newer good ones; and resumes from older ones."""
    found = []
    for line in run.log.read_text(errors="replace").splitlines():
        if match := re.fullmatch(r"checkpoint \S*/step_(\d+)", line):
            run.announced.add(int(match[1]))
    good = [int(path.name[5:]) for path in manifest.list_checkpoints(run.run_dir) if manifest.verify(path) is None]
    for step in sorted(run.announced):
        if step not in good and sum(other > step for other in good) < keep:
            found.append(f"checkpoint {step} was announced but is lost; good are {sorted(good)}")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Starting and killing
# ---------------------------------------------------------------------------------------------------------------------


def start(config: Config, ranks: int, run: Run, kill: Kill | None = None) -> str | None:
    """Start the run on forked ranks, and kill them as planned; what the first victim was doing, or None where the run ended.

    Raises RuntimeError if it fails by itself or outlives the limit.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A byte for what each rank does, and a byte that counts how often it began a phase of each kind.
    board = mmap.mmap(-1, ranks * (1 + len(PHASES)))
    living = {_fork(partial(_rank_main, config, rank, ranks, port, board), run.log): rank for rank in range(ranks)}
    begin, moment = time.monotonic(), None
    try:
        while living:
            _reap(living, run.log)
            now = time.monotonic()
            if now - begin > LIMIT:
                raise RuntimeError(f"not finished within {LIMIT:g} s:\n{_tail(run.log)}")
            if kill is None:
                time.sleep(POLL)
                continue
            begun = sum(board[ranks + rank * len(PHASES) + PHASES.index(kill.kind)] for rank in range(ranks))
            if moment is None and (kill.kind == "any" or begun >= kill.count):
                moment = now + kill.delay
            if moment is None or now < moment:
                time.sleep(POLL)
                continue
            victim = next((pid for pid, rank in living.items() if rank == kill.rank), None)
            if kill.rank is not None and victim is not None:
                during = PHASES[board[kill.rank]]
                os.kill(victim, signal.SIGKILL)
                time.sleep(kill.gap)
                return during
            if kill.rank is None:
                return PHASES[board[0]]
            kill = None  # that rank has already ended by itself: so will the others
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still theirs
        for pid in living:
            os.waitpid(pid, 0)
    return None


def _reap(living: dict[int, int], log: Path) -> None:
    """Take out the ranks that have ended. Raises RuntimeError where one failed."""
    for pid, rank in list(living.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del living[pid]
            if status != 0:
                raise RuntimeError(f"rank {rank} failed by itself:\n{_tail(log)}")


def _rank_main(config: Config, rank: int, ranks: int, port: int, board: mmap.mmap) -> None:
    """A rank, as torchrun would start it, which says on the board what it is doing."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)

    def told(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter = ranks + rank * len(PHASES) + PHASES.index(phase)
            board[counter] = (board[counter] + 1) % 256
            board[rank] = PHASES.index(phase)
            try:
                return function(*args, **kwargs)
            finally:
                board[rank] = 0

        return call

    vars(resume)["find"] = told("load", resume.find)
    vars(contents)["load"] = told("load", contents.load)
    vars(evaluation)["evaluate"] = told("evaluate", evaluation.evaluate)
    vars(saver)["Saver"].start = told("save", saver.Saver.start)
    vars(saver)["_Part"]._run = told("save", saver._Part._run)
    Trainer(config).fit()


def _fork(work: Callable[[], None], log: Path) -> int:
    """Run `work` in a child whose output goes to the end of `log`; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


if __name__ == "__main__":
    sys.exit(main())
