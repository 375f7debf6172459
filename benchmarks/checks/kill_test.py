"""Kill trainings again and again, and compare them with ones that were left alone.

`python -m benchmarks.checks.kill_test [--kills 200] [--disk 0.3] [--seed 0] [--layouts ep2,moves] [--steps 40]
[--tiers device,host] [--damages 10] [--json] [KEY=VALUE]`

GPT-MoE runs in several layouts are killed with SIGKILL and started again until each has had its share of the kills and
ends by itself. Each kill falls at a random moment of a random kind: any moment from the start on, while a checkpoint is
saved (taken, written, put in place or an old one deleted), while one is loaded, during an evaluation, or, where homes
of experts move, while they do, or, where calls are recorded, while a file grows; it takes all ranks at once, or one
rank, and the others some moments later. Every run must end with the loss, validation loss, gradient norm and learning
rate of every step bit for bit those of the undisturbed run, each step on record once, and so the plans and routing
counts. No checkpoint that was announced may be lost: after each kill it must be there and good, or as many newer good
ones as `checkpoint.keep` asks for.

`--disk SHARE` makes that share of the kills faults of the disk, at the same moments: it is full, for a while or for
good; it becomes read-only, as after an error; the run's folder is moved away. The run must go on, or end by itself with
a line that names the file; nothing may be made in the place of a folder that is gone, and half a checkpoint must give
its room back. Then the disk is mended and the same command goes on. The runs then lie in a file system of their own, an
image that is mounted: this takes root.

`--tiers` names where the optimizer's state lies, and with `experts_` also the experts' weights: each start of a run
takes another of them than the one before, and the undisturbed run keeps all on the device. An equal share of the kills
then falls while what is off the device is changed, while it is saved, inside a resume, and, with such weights, while
these are fetched and while their gradients leave, and, where homes of experts move, while they do; there are more until
each share is complete.

`--damages NUMBER` then kills one more run of each layout half-way, and damages this number of files of its folder and
of the token cache (`all`: each in each way), one at a time: a bit is flipped, the file is cut at a random byte,
deleted, or swapped with another file. The same command must go on bit for bit, or end with one line that names the
file. Where a record lacks steps it must say so. The report must be made of it, or refuse with one line.

After every start no process may be left, and after every run no temporary file and no lock.

The ranks are forked from this process, which has imported everything already and only plays torchrun: a start then
takes less than a second. tests/checkpoint/test_kill.py does the same to real command lines, torchrun included. Exit
status 1 where anything differed; further arguments are config overrides for all runs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import gc
import json
import math
import mmap
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo  # else each rank would import it with its first optimizer

from base import files
from base.errors import ConfigError
from base.files import WriteError
from checkpoint import manifest, resume, saver
from checkpoint import state as checkpoint_state
from checkpoint.saver import SaveError
from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from memory import copy_stream
from memory.copy_stream import CopyStream
from moe.placement import trace
from moe.placement.plans import Plans, read_plans
from optim.offload.experts import OffloadedExperts
from training.callbacks import evaluation
from training.callbacks.moe import expert_migration
from training.report import sources
from training.report.page.render import render
from training.trainer import Trainer

MOVING = (
    *("moe.num_experts=8", "moe.aux_loss_coeff=0", "optimizer.lr=0.01", "optimizer.schedule=constant"),
    *("moe.placement.policy=least_loaded", "moe.placement.extra_slots=2", "moe.placement.interval=1"),
)
RECORDED = ("moe.placement.record=true", "optimizer.bucket_parameters=65536", "optimizer.early_update=always")
CONTEXT = ("model.attention_dropout=0",)  # attention over slices has none
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "ep2": (2, ["parallel.expert=2", "training.precision=bf16"]),
    "tp2": (2, ["parallel.tensor=2", "parallel.sequence=true", "optimizer.distributed=false"]),
    "pp2_ep2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "dp2": (2, ["training.precision=bf16"]),
    "dp2_by_layer": (2, ["training.pass_order=by_layer", "training.recompute=full"]),
    "cp2": (2, ["parallel.context=2", *CONTEXT]),
    "cp2_ep2": (
        2,
        ["parallel.context=2", "parallel.expert=2", "data.documents=separate", "training.precision=bf16", *CONTEXT],
    ),
    "cp4_ep4": (4, ["parallel.context=4", "parallel.context_heads=2", "parallel.expert=4", *CONTEXT]),
    # Routers that no loss balances, copies in most calls, homes that move whenever it pays.
    "moves": (2, ["parallel.expert=2", *MOVING]),
    "pp2_moves": (4, ["parallel.pipeline=2", "parallel.expert=2", "optimizer.bucket_parameters=65536", *MOVING]),
    # The same with state off the device, and every call on record.
    "recorded_moves": (2, ["parallel.expert=2", "optimizer.state_device=host", *RECORDED, *MOVING]),
    "pp2_recorded_moves": (
        4,
        ["parallel.pipeline=2", "parallel.expert=2", "optimizer.state_device=disk", *RECORDED, *MOVING],
    ),
}
TARGETS = {
    "device": [],
    "host": ["optimizer.state_device=host", "optimizer.engine=host"],
    "device_stream": ["optimizer.state_device=host", "optimizer.engine=device_stream"],
    "early": ["optimizer.state_device=host", "optimizer.engine=host", "optimizer.early_update=always"],
    "disk": ["optimizer.state_device=disk", "optimizer.early_update=always"],
    "experts_host": ["moe.weights_device=host", "optimizer.state_device=host", "moe.shard_weights=false"],
    "experts_host_disk": ["moe.weights_device=host", "optimizer.state_device=disk", "moe.weight_slots=3"],
    "experts_disk": ["moe.weights_device=disk", "optimizer.state_device=disk", "optimizer.early_update=always"],
}
WITH_OFFLOAD = [
    "optimizer.distributed=true",
    "optimizer.bucket_parameters=65536",
]  # of all runs, so that all can take all
CHANGING = ("from device", "host update", "disk write")  # copy streams that change a tier's state
KINDS = {"any": 0.25, "save": 0.35, "load": 0.2, "evaluate": 0.2}  # shares of the kills
MOVES = {"move": 0.6}  # beside them, where homes of experts move
RECORDS = {"record": 0.4}  # beside them, where calls are on record
OFFLOAD_KINDS = ("tier", "save", "resume")
EXPERT_KINDS = ("fetch", "store")  # beside them, where experts' weights lie off the device
# What a rank says that it does; of several at once what a kill was meant for, else the first here. A resume is the part
# of a load that comes once the checkpoint was chosen.
PHASES = ("save", "load", "evaluate", "tier", "resume", "move", "record", "fetch", "store")
# Seconds after the phase began.
LONGEST_DELAY = {
    "any": 2.0,
    "save": 0.03,
    "load": 0.015,
    "evaluate": 0.015,
    "tier": 0.0003,
    "resume": 0.03,
    "move": 0.002,
    "record": 0.0002,
    "fetch": 0.0003,
    "store": 0.0003,
}
# Times on each rank that a phase is let pass at most; a start looks for a checkpoint, then loads it.
MAX_COUNT = {
    "any": 6,
    "save": 6,
    "load": 2,
    "evaluate": 6,
    "tier": 120,
    "resume": 1,
    "move": 6,
    "record": 60,
    **dict.fromkeys(EXPERT_KINDS, 60),
}
LINGER = {"tier": 0.0005, **dict.fromkeys(EXPERT_KINDS, 0.0005)}  # seconds that work takes longer, to be met by kills
MOST = 255  # of what a byte counts
SURVIVORS = 0.5  # seconds at most that the other ranks outlive one that was killed
POLL = 0.0005  # seconds
LIMIT = 240.0  # seconds that one start may take
FAULTS = ("full", "full for a while", "read-only", "moved")
DISK_BYTES = 192 * 2**20
AFTER_FAULT = 20.0  # seconds that the other ranks have once one has ended with its line, as under a launcher
REPORTED = 3  # exit status of a rank that ended with a line of its own
COMPARED = ("step", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens")


@dataclass(frozen=True)
class Kill:
    """When, and whom: `delay` seconds after the start or after the `count`-th time that any rank begins `kind`; rank
    None is all ranks."""

    kind: str
    count: int
    delay: float
    rank: int | None
    gap: float  # seconds until the other ranks go, or until a full disk has room again
    fault: str | None = None  # of the disk, in place of a kill: one of FAULTS


@dataclass
class Run:
    """A run folder over several starts, and what it promised."""

    run_dir: Path
    log: Path
    disk: Disk | None = None
    announced: set[int] = field(default_factory=set)
    met: str | None = None  # the fault of the disk in the last start
    found: list[str] = field(default_factory=list)  # what a fault of the disk led to that it must not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all layouts together")
    parser.add_argument("--seed", type=int, default=None, help="of the kills; default: a new one")
    parser.add_argument(
        "--disk",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the kills that are faults of the disk instead; takes root",
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--tiers", help=f"of {', '.join(TARGETS)}, in turns; default: as the overrides say")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs")
    parser.add_argument(
        "--damages",
        type=lambda text: math.inf if text == "all" else int(text),
        default=0,
        metavar="NUMBER",
        help="of files of a killed run of each layout, one at a time; all: each file in each way",
    )
    arguments = parser.parse_args()
    layouts = arguments.layouts.split(",")
    targets = [] if arguments.tiers is None else arguments.tiers.split(",")
    for what, names, known in (("layout", layouts, LAYOUTS), ("tier", targets, TARGETS)):
        if unknown := set(names) - set(known):
            parser.error(f"no such {what}: {min(unknown)}; there are {', '.join(known)}")
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    over = ", ".join(layouts) + (f"; tiers: {', '.join(targets)}" if targets else "")
    damages = "all" if arguments.damages == math.inf else arguments.damages
    also = f", then {damages} damaged files of each" if damages else ""
    print(f"seed {seed}: {arguments.kills} kills over {over}{also}", flush=True)
    _adopt_orphans()
    gc.freeze()  # so that no rank copies all of it to look through it
    rng, begin = random.Random(seed), time.monotonic()
    landed: Counter[str] = Counter()
    victims: Counter[str] = Counter()
    found: list[str] = []
    runs = unfinished = damaged = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(layouts):
            share = arguments.kills // len(layouts) + (i < arguments.kills % len(layouts))
            run_folder = Path(folder) / name
            run_folder.mkdir()
            with Disk(run_folder) if arguments.disk > 0 else contextlib.nullcontext() as disk:
                plan = Plan(share, arguments.disk, targets, rng, "moves" in name, "recorded" in name, arguments.damages)
                result = kill_runs(name, plan, arguments.steps, run_folder, arguments.overrides, disk)
            landed += result.landed
            victims += result.victims
            found += result.found
            runs, unfinished = runs + result.runs, unfinished + result.unfinished
            damaged += result.damaged
            refused += result.refused
    for text in found:
        print(text)
    kills = sum(landed.values())
    where = ", ".join(f"{count} {_describe(kind)}" for kind, count in landed.most_common())
    whom = f"{victims['all']} of all ranks, {victims['one']} of one, {victims['disk']} faults of the disk"
    print(
        f"seed {seed}: {kills} kills ({where}; {whom}) in {runs} runs, {unfinished} left a "
        f"checkpoint unfinished; {'NOT ' if found else ''}bit for bit the undisturbed runs, "
        f"{'see above' if found else 'no announced checkpoint lost'}; {time.monotonic() - begin:.0f} s"
    )
    if damaged:
        print(f"{damaged} files were damaged: {damaged - refused} runs went on, {refused} ended with a line")
    if arguments.json:
        result_json = {"seed": seed, "kills": kills, "during": dict(landed), "victims": dict(victims), "runs": runs}
        damage_json = {"damaged": damaged, "refused": refused}
        print(json.dumps({**result_json, **damage_json, "unfinished": unfinished, "differences": found}))
    return 1 if found or kills < arguments.kills else 0


def _describe(kind: str) -> str:
    if kind.startswith("disk "):
        return kind
    return f"while in {kind}" if kind != "any" else "elsewhere"


@dataclass
class Result:
    """What the kills of one layout came to."""

    landed: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    runs: int = 0
    unfinished: int = 0
    damaged: int = 0
    refused: int = 0  # starts with a damaged file that ended with a line


@dataclass
class Plan:
    """Which kills there are in one layout, and where the optimizer's state lies in each start."""

    kills: int
    disk_share: float
    targets: Sequence[str]
    rng: random.Random
    moves: bool = False  # homes of experts do
    records: bool = False  # calls are on record
    damages: float = 0  # of files, afterwards
    _last: str = ""

    def is_done(self, landed: Counter[str]) -> bool:
        """Whether the kills so far are enough, by what they landed in."""
        enough = sum(landed.values()) >= self.kills
        return enough and (not self.targets or not self._lacking(landed))

    def _lacking(self, landed: Counter[str]) -> list[str]:
        kinds = list(OFFLOAD_KINDS)
        if any(_has_experts(target) for target in self.targets):
            kinds += [*EXPERT_KINDS, *(["move"] if self.moves else [])]
        return [kind for kind in kinds if landed[kind] < -(-self.kills // len(kinds))]

    def next(self, ranks: int, landed: Counter[str], has_checkpoint: bool) -> tuple[Kill, str]:
        """A kill, and the tier of the start that it ends."""
        rng = self.rng
        if self.targets:
            lacking = [kind for kind in self._lacking(landed) if has_checkpoint or kind != "resume"]
            kind = rng.choice(lacking or ["save"])
        else:
            kinds = KINDS | (MOVES if self.moves else {}) | (RECORDS if self.records else {})
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
        rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
        count = rng.randint(1, ranks * MAX_COUNT[kind])
        fault = rng.choice(FAULTS) if rng.random() < self.disk_share else None
        if fault is not None and kind not in ("save", "evaluate") and (kind == "load" or fault == "moved"):
            kind = "save"  # a folder that is moved before the run works in it is another folder
        kill = Kill(kind, count, rng.uniform(0, LONGEST_DELAY[kind]), rank, rng.uniform(0, SURVIVORS), fault)
        return kill, self.next_target(kind)

    def next_target(self, kind: str = "resume") -> str:
        """Another one than before, where there is one; none that keeps on the device what a kill of this kind needs
        elsewhere."""
        targets = (
            [target for target in self.targets if target != "device"]
            if kind not in ("resume", "move")
            else self.targets
        )
        if kind in EXPERT_KINDS:
            targets = [target for target in targets if _has_experts(target)]
        if targets:
            self._last = self.rng.choice([target for target in targets if target != self._last] or list(targets))
        return self._last


def _has_experts(target: str) -> bool:
    return target.startswith("experts_")


def kill_runs(
    name: str,
    plan: Plan,
    steps: int,
    folder: Path,
    overrides: Sequence[str],
    disk: Disk | None = None,
) -> Result:
    """Kill runs of one layout as often as planned. Raises RuntimeError where a start fails by itself."""
    ranks, layout = LAYOUTS[name]
    common = [
        *(
            "experiment=gpt_moe_tiny",
            "model.hidden_dropout=0.1",
            "model.attention_dropout=0.1",
            f"training.steps={steps}",
        ),
        *(
            "training.eval_interval=3",
            "training.eval_batches=2",
            "checkpoint.interval=2",
            "checkpoint.keep=2",
            "checkpoint.keep_every=10",
        ),
        *(
            "logging=quiet",
            "sample.prompts=[]",
            *layout,
            *(WITH_OFFLOAD if plan.targets else []),
            f"memory.disk_dir={folder}",
            *overrides,
        ),
    ]

    def new_run(label: str) -> Run:
        run = Run((folder if disk is None else disk.folder) / label, folder / f"{label}.log", disk)
        run.run_dir.mkdir(parents=True)
        return run

    def config_of(run: Run, target: str) -> Config:
        config = compose([*common, f"run_dir={run.run_dir}", *TARGETS.get(target, [])])
        validate(config, ranks)
        return config

    result, whole, run = Result(), new_run("whole"), new_run("run0")
    if start(config_of(whole, ""), ranks, whole) is not None:
        raise AssertionError("nobody asked for a kill")
    keep = config_of(whole, "").checkpoint.keep
    columns = f"{'kill':>5} {'in':>9} {'after s':>8}  {'victims':<8} {'steps':>6}  good checkpoints"
    print(f"{name}: {'tier':>13} {columns}" if plan.targets else f"{name}: {columns}", flush=True)
    good: list[int] = []
    while not plan.is_done(result.landed):
        kill, target = plan.next(ranks, result.landed, bool(good))
        during = start(config_of(run, target), ranks, run, kill)
        problems = [*lost(run, keep), *run.found]
        run.found = []
        if during is None:
            if run.met is not None:
                result.landed[run.met] += 1
                result.victims["disk"] += 1
            result.runs += 1
            problems += [*differences(run.run_dir, whole.run_dir), *leftovers(run.run_dir)]
            result.found += [f"{name}, {run.run_dir.name}: {text}" for text in problems]
            _forget(run)
            run, good = new_run(f"run{result.runs}"), []
            continue
        result.landed[during] += 1
        victim = "disk" if kill.fault is not None else "all" if kill.rank is None else "one"
        result.victims[victim] += 1
        result.unfinished += any((run.run_dir / "checkpoints").glob("*.*"))
        result.found += [f"{name}, {run.run_dir.name}: {text}" for text in problems]
        good = [int(path.name[5:]) for path in manifest.list_checkpoints(run.run_dir) if manifest.verify(path) is None]
        whom = victim if victim != "one" else f"rank {kill.rank}"
        print(
            f"{name}: {f'{target:>13} ' if target else ''}{sum(result.landed.values()):>5} {during:>9} "
            f"{kill.delay:>8.3f}  {whom:<8} {len(read_steps(run.run_dir)):>6}  {sorted(good)}",
            flush=True,
        )
    if plan.damages:
        _damage_one_by_one(name, plan, new_run("damaged"), whole, config_of, result)
    if plan.kills == 0:
        return result
    if start(config_of(run, plan.next_target()), ranks, run) is not None:
        raise AssertionError("nobody asked for a kill")
    result.runs += 1
    texts = [*lost(run, keep), *differences(run.run_dir, whole.run_dir), *leftovers(run.run_dir)]
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
    for path in sorted([*theirs.glob("*.plans"), *theirs.glob("*.trace")]):
        x, y = _recorded(ours / path.name, found), _recorded(path, found)
        if x != y:
            wrong = sorted(step for step in x.keys() | y.keys() if x.get(step) != y.get(step))
            found.append(f"{path.name} differs in steps {wrong}")
    return found


def _recorded(path: Path, damages: list[str]) -> dict[int, Any]:
    """What a file of plans or of routing counts says, by step."""
    if path.suffix == ".trace":
        return {step: (counts.shape, counts.tobytes()) for step, counts in trace.read(path, damages.append)}
    plans = read_plans(path)
    steps = {step for of_layer in plans.calls.values() for step in of_layer}
    return {step: _planned(plans, step) for step in steps}


def _planned(plans: Plans, step: int) -> Any:
    header = plans.header(step)
    calls = {layer: of_layer.get(step) for layer, of_layer in plans.calls.items()}
    return None if header is None else header.primaries, calls


def lost(run: Run, keep: int) -> list[str]:
    """Announced checkpoints that are neither good nor made up for by `keep` newer good ones; and resumes from older
    ones."""
    found = []
    for line in run.log.read_text(errors="replace").splitlines():
        if match := re.fullmatch(r"checkpoint \S*/step_(\d+)", line):
            run.announced.add(int(match[1]))
    good = [int(path.name[5:]) for path in manifest.list_checkpoints(run.run_dir) if manifest.verify(path) is None]
    for step in sorted(run.announced):
        if step not in good and sum(other > step for other in good) < keep:
            found.append(f"checkpoint {step} was announced but is lost; good are {sorted(good)}")
    return found


def leftovers(run_dir: Path) -> list[str]:
    """What a run that has ended must not leave: temporary files, and a lock."""
    found = [
        f"{path} was left"
        for path in run_dir.rglob("*")
        if ".tmp" in path.name or path.name.endswith(manifest.REPLACED)
    ]
    with open(run_dir / resume.LOCK, "a") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found.append(f"{run_dir / resume.LOCK} is still held")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Files that are damaged
# ---------------------------------------------------------------------------------------------------------------------

DAMAGES = ("flipped", "cut", "deleted", "swapped")
MAY_LACK = ("metrics.jsonl", ".plans", ".trace")  # how records end that may lack steps, where that is said


def _damage_one_by_one(
    name: str, plan: Plan, run: Run, whole: Run, config_of: Callable[[Run, str], Config], result: Result
) -> None:
    """Kill a run half-way; then damage a file of its folder or cache, start it again, and begin anew with the next."""
    ranks, config = LAYOUTS[name][0], config_of(run, plan.next_target())
    half_way = (2 * ranks + 1) * (config.training.steps // (2 * config.checkpoint.interval))
    kill = Kill("save", min(half_way, MOST), plan.rng.uniform(0, LONGEST_DELAY["save"]), None, 0.0)
    if start(config, ranks, run, kill) is None:
        raise RuntimeError(
            f"{name}: the run whose files were to be damaged ended before its kill; give it more --steps"
        )
    # A cache of its own; where it lies is nothing that a run must keep.
    there, kept = run.run_dir.with_name("there"), run.run_dir.with_name("kept")
    shutil.copytree(run.run_dir, kept / "run")
    shutil.copytree(config.data.cache_dir, kept / "cache")
    config = replace(config, run_dir=str(there / "run"), data=replace(config.data, cache_dir=str(there / "cache")))
    moved = Run(there / "run", run.log, run.disk)
    files = sorted(path.relative_to(kept) for path in kept.rglob("*") if path.is_file() and path.stat().st_size)
    chosen = [(file, way) for file in files for way in DAMAGES]
    if plan.damages < len(chosen):
        chosen = sorted(plan.rng.sample(chosen, int(plan.damages)))
    for file, way in chosen:
        shutil.copytree(kept, there)
        names, what = _damage(there, file, way, files, plan.rng)
        log_before = run.log.stat().st_size
        problems = _report_of(moved.run_dir, names) if file.parts[0] == "run" else []
        ended = start(config, ranks, moved, may_end=True)
        output = run.log.read_text(errors="replace")[log_before:]
        if ended is not None:
            result.refused += 1
            if not any("ends: " in line and any(one in line for one in names) for line in output.splitlines()):
                problems.append(f"no line that names it, but: {output[-2000:]}")
        else:
            found = differences(moved.run_dir, whole.run_dir)
            is_named = any(one in line for line in output.splitlines() for one in names)
            if found and is_named and any(one.endswith(MAY_LACK) for one in names):
                found = _other_steps(moved.run_dir, whole.run_dir)
                own = [each for each in found if each.startswith(f"{file.name} differs")]
                if way == "flipped" and own:  # a bit is of one step of its file
                    found.remove(own[0])
            problems += [*found, *leftovers(moved.run_dir)]
        if "Traceback" in output:
            problems.append(f"a traceback: {output[-2000:]}")
        result.damaged += 1
        wrong = [f"{name}, {what}: {text}" for text in [*problems, *moved.found]]
        result.found += wrong
        moved.found = []
        print(f"{name}: {what}: {'goes on' if ended is None else 'ends'}{', WRONG' if wrong else ''}", flush=True)
        for text in wrong:
            print(f"    {text}", flush=True)
        shutil.rmtree(there)
    shutil.rmtree(kept)


def _damage(there: Path, file: Path, way: str, files: Sequence[Path], rng: random.Random) -> tuple[list[str], str]:
    """Damage a file, and return the names of the damaged files and a description."""
    path = there / file
    size = path.stat().st_size
    at = rng.randrange(size)
    if way == "flipped":
        content = bytearray(path.read_bytes())
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        return [file.name], f"a bit of {file} flipped at byte {at} of {size}"
    if way == "cut":
        os.truncate(path, at)
        return [file.name], f"{file} cut at byte {at} of {size}"
    if way == "deleted":
        path.unlink()
        return [file.name], f"{file} deleted"
    alike = [other for other in files if other != file and other.suffix == file.suffix]
    other = rng.choice(alike or [other for other in files if other != file])
    path.rename(there / "aside")
    (there / other).rename(path)
    (there / "aside").rename(there / other)
    return [file.name, other.name], f"{file} swapped with {other}"


def _report_of(run_dir: Path, names: Sequence[str]) -> list[str]:
    """Render the report of a folder with damaged files; a line for each fault of the report."""
    try:
        render(sources.read(run_dir))
    except ConfigError as error:
        return [] if any(name in str(error) for name in names) else [f"the report does not name it: {error}"]
    except Exception as error:
        return [f"the report raised {type(error).__name__}: {error}"]
    return []


def _other_steps(ours: Path, theirs: Path) -> list[str]:
    """Return the differences between the steps that both runs recorded. A step that only our run has is a line whose
    number was damaged; a line without a loss belongs to the file that was swapped with metrics.jsonl."""
    expected = {line["step"]: line for line in read_steps(theirs)}
    steps = [line for line in read_steps(ours) if line["loss"] is not None]
    found = [f"metrics.jsonl differs: {line}" for line in steps if line != expected.get(line["step"])]
    for path in sorted([*theirs.glob("*.plans"), *theirs.glob("*.trace")]):
        x, y = _recorded(ours / path.name, []), _recorded(path, [])
        found += [f"{path.name} differs in step {step}" for step in x if x[step] != y[step]]
    return found


def _forget(run: Run) -> None:
    """Make room on the runs' disk."""
    if run.disk is not None:
        shutil.rmtree(run.run_dir)


# ---------------------------------------------------------------------------------------------------------------------
# The disk
# ---------------------------------------------------------------------------------------------------------------------


class Disk:
    """A small file system that can be filled and made read-only while files in it are open."""

    def __init__(self, folder: Path):
        self.folder, self._image, self._ballast = folder / "disk", folder / "image", folder / "disk" / "ballast"
        self._away: tuple[Path, Path] | None = None

    def __enter__(self) -> Disk:
        self.folder.mkdir()
        with open(self._image, "wb") as stream:
            stream.truncate(DISK_BYTES)
        _call("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        _call("mount", "-o", "loop", str(self._image), str(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        _call("umount", "-l", str(self.folder))

    def break_down(self, fault: str, run_dir: Path) -> None:
        """Make a fault, which `mend` takes back."""
        if fault == "read-only":
            _call("mount", "-o", "remount,abort", str(self.folder))
        elif fault == "moved":
            self._away = run_dir, run_dir.with_name("moved")
            run_dir.rename(self._away[1])
        else:
            with open(self._ballast, "wb") as stream:
                size = DISK_BYTES
                while size >= 1024:  # to the last block
                    try:
                        os.posix_fallocate(stream.fileno(), os.fstat(stream.fileno()).st_size, size)
                    except OSError:
                        size //= 2

    def mend(self, fault: str) -> list[str]:
        """Take the fault back; what was made in the place of a folder that was moved away."""
        found = []
        if fault == "read-only":
            _call("umount", str(self.folder))
            subprocess.run(["fsck.ext4", "-f", "-y", str(self._image)], capture_output=True, check=False)  # 1: mended
            _call("mount", "-o", "loop", str(self._image), str(self.folder))
        elif fault == "moved":
            assert self._away is not None
            run_dir, away = self._away
            if run_dir.exists():
                found = [f"made again after it was moved away: {sorted(map(str, run_dir.rglob('*')))}"]
                shutil.rmtree(run_dir)
            away.rename(run_dir)
        else:
            self._ballast.unlink(missing_ok=True)
        return found


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"--disk needs a file system of its own, but {' '.join(command)} failed: {done.stderr.strip()}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Starting and killing
# ---------------------------------------------------------------------------------------------------------------------


def start(config: Config, ranks: int, run: Run, kill: Kill | None = None, may_end: bool = False) -> str | None:
    """Start the run on forked ranks, and kill them as planned; what the first victim was doing, or None where the run
    ended. may_end: it may also end with a line of its own, which is "ends".

    Raises RuntimeError if it fails by itself or outlives the limit.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # For each rank and phase a byte that counts how often it is in it now, and one how often it began it.
    board = mmap.mmap(-1, ranks * 2 * len(PHASES))
    living = {_fork(partial(_rank_main, config, rank, ranks, port, board), run.log): rank for rank in range(ranks)}
    begin, moment, log_before = time.monotonic(), None, run.log.stat().st_size if run.log.exists() else 0
    broken: str | None = None  # the fault of the disk
    run.met = None
    mend_at, kill_at = math.inf, math.inf
    ended: list[int] = []  # exit statuses after a fault
    try:
        while living:
            now = time.monotonic()
            ended += _reap(living, run.log, any_status=broken is not None or may_end)
            if broken is not None or (may_end and any(ended)):
                if now >= mend_at and run.disk is not None and broken is not None:
                    run.found += run.disk.mend(broken)
                    mend_at = math.inf
                if any(ended) and kill_at == math.inf:
                    kill_at = now + AFTER_FAULT
                if now >= kill_at:
                    break
            if now - begin > LIMIT:
                raise RuntimeError(f"not finished within {LIMIT:g} s:\n{_tail(run.log)}")
            if kill is None or broken is not None:
                time.sleep(POLL)
                continue
            if moment is None and (kill.kind == "any" or _count_started(board, ranks, kill.kind) >= kill.count):
                moment = now + kill.delay
            if moment is None or now < moment:
                time.sleep(POLL)
                continue
            if kill.fault is not None:
                assert run.disk is not None
                broken, run.met = kill.fault, f"disk {kill.fault}"
                run.disk.break_down(kill.fault, run.run_dir)
                if kill.fault == "full for a while":
                    mend_at = time.monotonic() + kill.gap
                continue
            victim = next((pid for pid, rank in living.items() if rank == kill.rank), None)
            if kill.rank is not None and victim is not None:
                during = _doing(board, [kill.rank], kill.kind)
                os.kill(victim, signal.SIGKILL)
                time.sleep(kill.gap)
                return during
            if kill.rank is None:
                return _doing(board, range(ranks), kill.kind)
            kill = None  # that rank has already ended by itself: so will the others
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still theirs
        for pid in living:
            os.waitpid(pid, 0)
        if orphans := _children():
            run.found.append(f"processes were left: {orphans}")
    if broken is None:
        return "ends" if any(ended) else None
    assert run.disk is not None
    if broken.startswith("full") and any(ended) and (left := [*(run.run_dir / "checkpoints").glob("*.tmp")]):
        run.found.append(f"half a checkpoint kept its room on a full disk: {left}")
    if broken != "full for a while" or mend_at < math.inf:
        run.found += run.disk.mend(broken)
    if any(ended) and REPORTED not in ended:
        run.found.append(
            f"{broken}: no rank ended with a line of its own, but with {ended}: "
            f"{run.log.read_text(errors='replace')[log_before:][-2000:]}"
        )
    return run.met if any(ended) else None


def _board_index(rank: int, phase: str) -> int:
    return 2 * (rank * len(PHASES) + PHASES.index(phase))


def _count_started(board: mmap.mmap, ranks: int, phase: str) -> int:
    return sum(board[_board_index(rank, phase) + 1] for rank in range(ranks))


def _doing(board: mmap.mmap, ranks: Sequence[int], meant: str) -> str:
    """What a kill of these ranks lands in."""
    if meant in PHASES and any(board[_board_index(rank, meant)] for rank in ranks):
        return meant
    return next((phase for phase in PHASES if board[_board_index(ranks[0], phase)]), "any")


def _reap(living: dict[int, int], log: Path, any_status: bool) -> list[int]:
    """Take out the ranks that have ended; their exit statuses. Raises RuntimeError where one failed and may not."""
    found = []
    for pid, rank in list(living.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del living[pid]
            found.append(os.waitstatus_to_exitcode(status))
            if status != 0 and not any_status:
                raise RuntimeError(f"rank {rank} failed by itself:\n{_tail(log)}")
    return found


def _adopt_orphans() -> None:
    """Have processes whose parent is killed become this one's children, so that they are seen."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _children() -> list[str]:
    """What runs below this process, a moment after all ranks have ended."""
    gone, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=5)
    return [str(process) for process in alive]


def _rank_main(config: Config, rank: int, ranks: int, port: int, board: mmap.mmap) -> None:
    """A rank, as torchrun would start it, which says on the board what it is doing."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)

    lock = threading.Lock()  # several threads do something

    def counted(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        index = _board_index(rank, phase)

        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                board[index] += 1
                board[index + 1] = min(board[index + 1] + 1, MOST)
            try:
                time.sleep(LINGER.get(phase, 0.0))
                answer = function(*args, **kwargs)
                time.sleep(LINGER.get(phase, 0.0))
                return answer
            finally:
                with lock:
                    board[index] -= 1

        return call

    submit, way = CopyStream.submit, [""]  # of experts' weights or gradients, while the thread that computes submits it

    def submit_counted(stream: CopyStream, work: Callable[[], None], *rest: Any, **named: Any) -> Any:
        phase = way[0] or ("tier" if stream.name in CHANGING else "")
        return submit(stream, counted(phase, work) if phase else work, *rest, **named)

    def submits(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            way[0] = phase
            try:
                return function(*args, **kwargs)
            finally:
                way[0] = ""

        return call

    vars(resume)["find"] = counted("load", resume.find)
    vars(checkpoint_state)["load"] = counted("load", counted("resume", checkpoint_state.load))
    vars(expert_migration)["exchange_tensors"] = counted("move", expert_migration.exchange_tensors)
    vars(evaluation)["evaluate"] = counted("evaluate", evaluation.evaluate)
    vars(saver)["Saver"].start = counted("save", saver.Saver.start)
    vars(saver)["_WriterThread"]._run = counted("save", saver._WriterThread._run)
    vars(copy_stream)["CopyStream"].submit = submit_counted
    for name, phase in (("bring", "fetch"), ("add", "store"), ("sum_to", "store"), ("finish", "store")):
        setattr(OffloadedExperts, name, submits(phase, getattr(OffloadedExperts, name)))
    vars(files)["Log"].append = counted("record", files.Log.append)
    try:
        Trainer(config).fit()
    except (WriteError, SaveError, ConfigError) as error:
        print(f"rank {rank} ends: {error}", flush=True)
        os._exit(REPORTED)


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
