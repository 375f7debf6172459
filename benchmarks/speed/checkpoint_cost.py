"""Measures the time that checkpoints add to a training.

`python -m benchmarks.speed.checkpoint_cost [--rounds 10] [--steps 20] [--ranks 1] [--json] [key=value ...]`

One process trains on, in rounds of `--steps` steps without and with a save at their beginning, in turns; the
quickstart's model, unless overrides say otherwise. Saving is what a run does: the snapshot, the writing beside the next
steps, and all that the callback does until the checkpoint is announced. A round is dropped when other processes took
part of the machine. Printed: the medians of both, by how much throughput is lower with saves (a median over rounds),
and the time that training stands still for a save as a share of a step, but for the first save, which allocates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch.distributed as dist

from benchmarks.kit.rounds import Load, is_disturbed
from benchmarks.kit.tables import table
from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from training.callbacks.checkpoints import Checkpoints
from training.resilience import events
from training.starting.run_builder import build_run
from training.trainer import Trainer

MAX_DROPPED = 2  # rounds dropped for each one that counts, before we give up


def measure(config: Config, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of rounds with and without a save, in turns. Every rank of the job calls it. Raises RuntimeError on a
    busy machine."""
    trainer = Trainer(config)
    run = build_run(config, trainer.callbacks, contextlib.ExitStack())
    saver = Checkpoints()
    saver.on_start(run)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def timed(saves: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        for i in range(steps):
            metrics = trainer.train_step(run)
            assert metrics is not None  # no health policy is on
            if saves and i == 0:
                saver.start(run)
            else:
                saver.after_step(run, metrics)
        saver.finish_pending(run)
        dist.barrier()
        return time.perf_counter() - start

    for saves in (False, True):  # first calls allocate
        timed(saves)
    times: dict[bool, list[float]] = {False: [], True: []}
    dropped = 0
    while len(times[True]) < rounds:
        before, pair = Load.now(set(pids)), {}
        for saves in (False, True) if len(times[True]) % 2 == 0 else (True, False):
            pair[saves] = timed(saves)
        disturbed = [is_disturbed(before, Load.now(set(pids)))]
        dist.broadcast_object_list(disturbed, src=0)
        if disturbed[0]:
            dropped += 1
            if dropped > MAX_DROPPED * rounds:
                raise RuntimeError(f"{dropped} rounds were disturbed: too much else runs on this machine")
            continue
        for saves, seconds in pair.items():
            times[saves].append(seconds)
    for callback in [*trainer.callbacks, saver]:
        callback.close()
    run.loader.close()
    step = statistics.median(times[False]) / steps
    saved = [event for event in events.read(run.run_dir) if event["kind"] == "checkpoint_saved"]
    pauses = [event["pause_seconds"] for event in saved[1:]]
    return {
        "ranks": dist.get_world_size(),
        "rounds": rounds,
        "dropped": dropped,
        "megabytes": saved[0]["bytes"] / 1e6,
        "step_ms": 1000 * step,
        "step_with_saves_ms": 1000 * statistics.median(times[True]) / steps,
        "cost": 1
        - statistics.median(
            without / with_saves for without, with_saves in zip(times[False], times[True], strict=True)
        ),
        "first_pause_ms": 1000 * saved[0]["pause_seconds"],
        "pause_ms": 1000 * statistics.median(pauses),
        "pause_share": statistics.median(pauses) / step,
        "longest_pause_share": max(pauses) / step,
        "save_ms": 1000 * statistics.median(event["seconds"] for event in saved[1:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round: one save in so many")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.ranks > 1 and not dist.is_torchelastic_launched():
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(arguments.ranks),
        ]
        return subprocess.run(
            [*launcher, "-m", "benchmarks.speed.checkpoint_cost", *sys.argv[1:]], check=False, timeout=3600
        ).returncode
    with tempfile.TemporaryDirectory() as folder:
        quiet = [
            f"run_dir={folder}",
            "checkpoint.resume=never",
            "checkpoint.interval=0",
            "logging=quiet",
            "training.eval_interval=0",
        ]
        config = compose([*quiet, "training.steps=1000000", "checkpoint.keep=2", *arguments.overrides])
        validate(config, arguments.ranks)
        result = measure(config, arguments.rounds, arguments.steps)
        if dist.get_rank() == 0:
            headings = [
                "ranks",
                "MB",
                "step ms",
                "with saves",
                "throughput",
                "pause ms",
                "of a step",
                "longest",
                "first ms",
                "save ms",
                "dropped",
            ]
            row = [
                *(
                    f"{result['ranks']}",
                    f"{result['megabytes']:.1f}",
                    f"{result['step_ms']:.1f}",
                    f"{result['step_with_saves_ms']:.1f}",
                ),
                *(f"{-result['cost']:+.2%}", f"{result['pause_ms']:.1f}", f"{result['pause_share']:.1%}"),
                *(
                    f"{result['longest_pause_share']:.1%}",
                    f"{result['first_pause_ms']:.1f}",
                    f"{result['save_ms']:.0f}",
                    f"{result['dropped']}",
                ),
            ]
            print(table(headings, [row], markdown=False))
            if arguments.json:
                print(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
