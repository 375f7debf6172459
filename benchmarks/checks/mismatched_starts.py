"""Starts in which one of two ranks has another value of one key: both must end within seconds, each with one line that
names the key, both values and the ranks. Every other start is torchrun's, the others' ranks are started by hand.

    python -m benchmarks.checks.mismatched_starts [--keys N] [--markdown] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONG = 300  # seconds of a start
BASE = ("model=gpt_moe_tiny", "training.steps=2", "training.eval_interval=0", "training.global_batch_size=8")
# By key: a value that this model trains with, too.
OTHERS = {
    "optimizer.lr": "0.02",
    "optimizer.min_lr": "0.00001",
    "optimizer.weight_decay": "0.03",
    "optimizer.beta1": "0.8",
    "optimizer.beta2": "0.99",
    "optimizer.epsilon": "1e-6",
    "optimizer.clip_grad": "0.5",
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": "1",
    "optimizer.decay_steps": "10",
    "optimizer.distributed": "false",
    "optimizer.state_device": "host",
    "training.seed": "7",
    "training.steps": "3",
    "training.micro_batch_size": "1",
    "training.global_batch_size": "16",
    "training.recompute": "full",
    "training.precision": "bf16",
    "training.token_tile": "128",
    "training.deterministic": "true",
    "training.spike_factor": "3",
    "training.nonfinite": "skip",
    "data.documents": "separate",
    "data.documents_in_text": "line",
    "data.validation_fraction": "0.2",
    "data.prefetch": "2",
    "data.vocab_size": "500",
    "model.hidden_dropout": "0.1",
    "model.attention_dropout": "0.1",
    "model.norm_epsilon": "0.001",
    "model.init_std": "0.03",
    "model.num_layers": "1",
    "model.sequence_length": "32",
    "moe.aux_loss_coeff": "0.5",
    "moe.z_loss_coeff": "0.1",
    "moe.top_k": "3",
    "moe.capacity_factor": "2",
    "moe.pipeline_degree": "2",
    "parallel.expert": "2",
    "parallel.overlap_grad_reduce": "false",
    "checkpoint.interval": "1",
    "checkpoint.keep": "2",
    "logging.tensorboard": "false",
    "name": "another",
}


def start(folder: Path, key: str, value: str, with_torchrun: bool) -> tuple[list[int], list[str], float]:
    """The exit statuses, the last line of each rank, and the seconds of a start whose rank 1 has another value."""
    common = [sys.executable, "train.py", *BASE, f"run_dir={folder}/run", f"data.cache_dir={folder}/cache"]
    started = time.monotonic()
    if with_torchrun:
        plain, other = shlex.join(common), shlex.join([*common, f"{key}={value}"])
        script = f'if [ "$RANK" = 1 ]; then exec {other}; else exec {plain}; fi'
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*launcher, "--no-python", "bash", "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = [line for line in done.stderr.splitlines() if re.match(r"\[rank \d\] config error", line)]
        return [done.returncode], list(dict.fromkeys(lines)), time.monotonic() - started
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rendezvous = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*common, *([f"{key}={value}"] if rank else [])],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **rendezvous, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    lines = [(rank.communicate(timeout=LONG)[1].strip().splitlines() or [""])[-1] for rank in ranks]
    return [rank.returncode for rank in ranks], lines, time.monotonic() - started


def main() -> int:
    """Print a line for each start; the exit status: 1 where one did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=len(OTHERS), help="the first N keys alone")
    parser.add_argument("--markdown", action="store_true", help="print the table for benchmarks/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    table_rows: list[tuple[str, str, float, str, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (key, value) in enumerate(list(OTHERS.items())[: arguments.keys]):
            with_torchrun = number % 2 == 1
            statuses, lines, seconds = start(Path(folder), key, value, with_torchrun)
            named = [
                line for line in lines if re.search(rf"(^|[ ,]){re.escape(key)}\b.* must be the same on every", line)
            ]
            is_right = 0 not in statuses and len(named) == len(lines) > 0 and "on rank 0; " in lines[0]
            table_rows.append(
                (key, "torchrun" if with_torchrun else "by hand", seconds, lines[-1] if lines else "", is_right)
            )
            print(
                f"{'ok ' if is_right else 'BAD'} {key:30} {table_rows[-1][1]:8} {seconds:5.1f} s  {table_rows[-1][3]}",
                flush=True,
            )
    num_right, longest = sum(row[-1] for row in table_rows), max(row[2] for row in table_rows)
    print(
        f"{num_right} of {len(table_rows)} starts ended with a line that names the key; the longest took "
        f"{longest:.1f} s"
    )
    if arguments.markdown:
        print("\n| key | started | seconds | last line |\n|---|---|---|---|")
        for key, kind, seconds, line, _ in table_rows:
            print(f"| `{key}` | {kind} | {seconds:.1f} | {line.partition('error: ')[2]} |")
    if arguments.json:
        print(json.dumps({"starts": len(table_rows), "named": num_right, "longest_seconds": longest}))
    return 0 if num_right == len(table_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
