"""Training speed of presets on this machine: tokens/s, step time and model FLOPs utilisation of real runs of
`train.py`.

`python -m benchmarks.speed.throughput [--experiments gpt2_124m gpt_moe_small] [--ranks 1] [--steps 30] [--json]
[key=value ...]`

The first third of the steps is warm-up and does not count. MFU is printed where the device's peak is known.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit import tables

HEADINGS = ("experiment", "ranks", "tokens/s", "step s", "MFU", "GiB", "loss")


def measure(experiment: str, ranks: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train `steps` steps of an experiment and summarise the metrics of the last two thirds. Raises RuntimeError if it
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        settings = [
            f"experiment={experiment}",
            f"run_dir={folder}/run",
            f"training.steps={steps}",
            "training.eval_interval=0",
        ]
        quiet = [
            "checkpoint.at_end=false",
            "checkpoint.interval=0",
            "logging.wandb=off",
            "sample.prompts=[]",
            "optimizer.warmup_steps=0",
        ]
        command = [*launcher, "train.py", *settings, *quiet, *overrides]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3600)
        if done.returncode != 0:
            raise RuntimeError(
                f"{experiment} ended with status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    counted = lines[len(lines) // 3 :]
    utilisation = [line["mfu"] for line in counted if "mfu" in line]
    return {
        "experiment": experiment,
        "ranks": ranks,
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in counted),
        "step_seconds": statistics.median(line["step_seconds"] for line in counted),
        "mfu": statistics.median(utilisation) if utilisation else None,
        "peak_memory_gib": max(line["peak_memory_bytes"] for line in counted) / 2**30,
        "last_loss": counted[-1]["loss"],
    }


def cells(row: dict[str, Any]) -> list[str]:
    """What was measured, under HEADINGS."""
    return [
        row["experiment"],
        str(row["ranks"]),
        f"{row['tokens_per_second']:,.0f}",
        f"{row['step_seconds']:.3f}",
        "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
        f"{row['peak_memory_gib']:.2f}",
        f"{row['last_loss']:.3f}",
    ]


def device_name() -> str:
    """What the runs train on, for the heading of a table."""
    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.processor() or platform.machine()} CPU"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--experiments", nargs="+", default=["gpt2_124m", "gpt_moe_small"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    results = [measure(name, arguments.ranks, arguments.steps, arguments.overrides) for name in arguments.experiments]
    print(f"{device_name()}, torch {torch.__version__}")
    print(tables.table(HEADINGS, [cells(row) for row in results], markdown=False))
    if arguments.json:
        print(json.dumps({"device": device_name(), "torch": torch.__version__, "rows": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
