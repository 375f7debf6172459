"""Trains a GPT-MoE whose experts' records are 4 times its host budget, in as little memory as is counted: `python -m
benchmarks.speed.expert_memory [--layers 4] [--hidden 256] [--json] [key=value ...]`. Needs root: limits are control
groups.

The same model and data on one process, in a control group each: with experts on the device, whose peak without pages of
files is measured; then with weights, gradients and state of experts on the disk of --folder, by layer, in a group of
(that peak, less the bytes of experts that it counts, plus the slots of the device and the host budget) times 1.05. It
trains, saves, is started again and goes on; its losses and gradient norms must be those of the first, digit for digit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kit.cgroups import CgroupOutcome, MemoryCgroup, can_limit_memory, run_in
from benchmarks.kit.tables import table
from configs import derived
from configs.compose import compose
from configs.schema import Config
from optim.arrangement.buckets import GRAD_BYTES
from optim.arrangement.experts import ExpertRecords, expert_records, state_bytes_per_weight

MIB = 2**20
MARGIN, SHARE, STEPS, SAVED = 1.05, 4, 4, 2
SAME = ("step", "loss", "grad_norm", "learning_rate")


def words_of(args: argparse.Namespace, run_dir: Path, steps: int) -> list[str]:
    """Return the overrides that all runs share."""
    return [
        "model=gpt_moe_tiny",
        f"model.num_layers={args.layers}",
        f"model.hidden_size={args.hidden}",
        "model.tie_embeddings=false",
        f"moe.num_experts={args.experts}",
        f"moe.ffn_hidden_size={4 * args.hidden}",
        f"training.precision={args.precision}",
        "training.recompute=full",
        "training.pass_order=by_layer",
        "training.micro_batch_size=2",
        f"training.steps={steps}",
        "optimizer.schedule=constant",
        f"optimizer.bucket_parameters={args.layers * args.experts * args.hidden**2 // 4}",  # a 48th of the experts'
        f"checkpoint.interval={SAVED}",
        "sample.prompts=[]",
        "logging=quiet",
        "parallel.timeout_seconds=300",
        f"run_dir={run_dir}",
        *args.overrides,
    ]


def records_of(config: Config) -> ExpertRecords:
    """Return the plan of the experts' bytes in a run of one process."""
    found = expert_records(config, 1, sum(derived.moe_layer_pattern(config)))
    assert found is not None
    return found


def counted(config: Config) -> int:
    """Return the bytes of experts in a run that has them on the device: weights, gradients and state."""
    of = records_of(config)
    return of.num_layers * sum(of.numels) * (of.weight_bytes + GRAD_BYTES + state_bytes_per_weight(config))


def train(words: list[str], limit: int | None, timeout: float) -> CgroupOutcome:
    """Execute one run. Raises RuntimeError if it fails."""
    with MemoryCgroup(limit) as memory:
        outcome = run_in([sys.executable, "train.py", *words], memory, timeout=timeout)
    if outcome.verdict() != "ran":
        raise RuntimeError(f"{outcome.verdict()}: {outcome.stderr.strip().splitlines()[-1:]}")
    return outcome


def metrics(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return the numbers that must be equal in all runs, step by step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [tuple(each.get(key) for key in SAME) for each in map(json.loads, lines)]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Execute all runs."""
    resident, streamed = folder / "resident", folder / "streamed"
    off = ["moe.weights_device=disk", "optimizer.state_device=disk", f"memory.disk_dir={folder}"]
    config = compose([*words_of(args, streamed, STEPS), *off])
    of, kept = records_of(config), counted(config)
    budget = kept // SHARE
    off.append(f"memory.host_budget={budget // MIB}")
    whole = train(words_of(args, resident, STEPS), None, args.timeout)
    assert whole.peak_held_bytes is not None
    slot_bytes = of.weights_on_device + of.grads_on_device
    limit = int((whole.peak_held_bytes - kept + slot_bytes + budget) * MARGIN)
    first = train([*words_of(args, streamed, SAVED), *off], limit, args.timeout)
    second = train([*words_of(args, streamed, STEPS), *off], limit, args.timeout)
    runs = [each for each in (first, second) if each.peak_held_bytes is not None]
    return {
        "parameters_of_experts": of.num_layers * sum(of.numels),
        "records": kept,
        "host_budget": budget,
        "slots": slot_bytes,
        "resident_peak": whole.peak_held_bytes,
        "limit": limit,
        "peak": max(each.peak_held_bytes or 0 for each in runs),
        "resident_seconds": whole.seconds,
        "seconds": [first.seconds, second.seconds],
        "same": metrics(resident) == metrics(streamed),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a run")
    parser.add_argument("--folder", type=Path, help="a folder on a disk; none: a temporary one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if (reason := can_limit_memory()) is not None:
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args, Path(folder))
    sizes = ("records", "host_budget", "slots", "resident_peak", "limit", "peak")
    table_rows = [[name.replace("_", " "), f"{found[name] / MIB:.1f}"] for name in sizes]
    print(table(["MiB", args.precision], table_rows, markdown=False))
    print(f"losses and norms {'the same' if found['same'] else 'DIFFERENT'}; {found['seconds']} s in the group")
    if args.json:
        print(json.dumps(found))
    return 0 if found["same"] and found["peak"] <= found["limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
