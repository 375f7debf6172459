"""A whole model's optimizer step against Hugging Face's model in a plain loop: `python -m benchmarks.speed.whole_model
[--cases dense_fp32 ...] [--sides eager ...] [--ranks 2] [--rounds 12] [--json | --markdown] [key=value ...]`.

Both sides start from the same weights (ours, exported) and train on the same made-up tokens, one thread a rank; a step
is forward, backward, clipping and AdamW on 4 x 512 tokens. Ours is the engine of a training without its callbacks.
Theirs is transformers' model with its default attention and experts, `clip_grad_norm_` and torch's fused AdamW, with
DistributedDataParallel on several ranks: `eager`, `compiled` (torch.compile) and, in bf16, `autocast` (weights in fp32;
the other two keep weights and moments in bf16, which ours does not). Ours adds its router losses; theirs go without.

In every round all sides take one step, in turns. With one rank CPU time counts, which other work on the machine
disturbs least; with more, time, that of the slowest rank. The ratio is their time by ours in the same round: the mean
over the rounds, and two standard errors of it.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit.tables import table
from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from parallel import topology
from training.engine import Engine
from training.starting.dry_run import made_up_batches
from training.step import train_step

CASES = {
    f"{kind}_{dtype}": (preset, dtype)
    for kind, preset in (("dense", "gpt_small"), ("moe", "gpt_moe_small"))
    for dtype in ("fp32", "bf16")
}
VOCAB_SIZE, MICRO_BATCH = 8192, 4
WARM_UP = 2  # steps
LOSSES_DIFFER = 0.02  # relative, of the first step: the sides do not train the same model then

Step = Callable[[dict[str, torch.Tensor]], float]


def sides_of(dtype: str) -> list[str]:
    """Return the sides of a case in this precision, ours first."""
    return ["ours", "eager", *(["autocast"] if dtype == "bf16" else []), "compiled"]


def _ours(engine: Engine) -> Step:
    steps = iter(range(1, sys.maxsize))
    return lambda batch: train_step(engine, [batch], next(steps)).loss


def _theirs(side: str, folder: Path, config: Config) -> Step:
    import transformers

    half = config.training.precision == "bf16"
    weights = torch.bfloat16 if half and side != "autocast" else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=weights, use_cache=False)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.min_lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    parameters = list(model.parameters())
    if dist.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if side == "compiled":
        model = torch.compile(model)

    def step(batch: dict[str, torch.Tensor]) -> float:
        with torch.autocast("cpu", torch.bfloat16) if side == "autocast" else contextlib.nullcontext():
            loss = model(batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def measure(case: str, rounds: int, overrides: list[str], sides: list[str] | None = None) -> dict[str, Any]:
    """Measure a case on every rank of the job, with these `sides` in addition to ours. Raises RuntimeError if the
    sides' first losses differ."""
    preset, dtype = CASES[case]
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    sizes = [f"training.micro_batch_size={MICRO_BATCH}", f"training.global_batch_size={MICRO_BATCH * ranks}"]
    config = compose(
        [
            f"model={preset}",
            f"training.precision={dtype}",
            "training.device=cpu",
            f"model.vocab_size={VOCAB_SIZE}",
            *sizes,
            *overrides,
        ]
    )
    validate(config, ranks)
    run_topology = topology.initialize(config)
    engine = Engine(config, run_topology, VOCAB_SIZE)
    batches = made_up_batches(config, rounds + WARM_UP, VOCAB_SIZE, seed=run_topology.data.rank)
    with tempfile.TemporaryDirectory() as folder:
        steps = {"ours": _ours(engine)}
        exported = _export(engine, Path(folder))
        for side in sides_of(dtype)[1:]:
            if sides is not None and side not in sides:
                continue
            steps[side] = _theirs(side, exported, config)
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    names, clock = list(steps), time.process_time if ranks == 1 else time.perf_counter
    for i, batch in enumerate(batches):
        losses = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            before = clock()
            losses[name] = steps[name](batch)
            seconds[name].append(_slowest(clock() - before))
        if i == 0 and max(losses.values()) > min(losses.values()) * (1 + LOSSES_DIFFER):
            raise RuntimeError(f"{case}: the sides do not compute the same loss: {losses}")
    engine.close()
    topology.destroy()
    taken = {side: values[WARM_UP:] for side, values in seconds.items()}
    tokens = MICRO_BATCH * ranks * config.model.sequence_length
    return {
        "case": case,
        "ranks": ranks,
        "rounds": rounds,
        "tokens_per_second": {name: tokens / statistics.median(values) for name, values in taken.items()},
        "ratio": {name: ratio(values, taken["ours"]) for name, values in taken.items() if name != "ours"},
    }


def _slowest(seconds: float) -> float:
    """Combine the times of all ranks."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def _export(engine: Engine, folder: Path) -> Path:
    from models.convert import export_folder
    from models.folder import save_logical_folder

    shared = [str(folder)]
    dist.broadcast_object_list(shared, src=0)
    logical, exported = Path(shared[0]) / "logical", Path(shared[0]) / "exported"
    save_logical_folder(engine.bare_chunks, logical, engine.config, engine.vocab_size, torch.float32)
    if dist.get_rank() == 0:
        export_folder(logical, exported)
    dist.barrier()
    return exported


def ratio(theirs: list[float], ours: list[float]) -> list[float]:
    """Return the mean of the rounds' ratios, and two standard errors of it."""
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    return [statistics.mean(ratios), 2 * statistics.stdev(ratios) / len(ratios) ** 0.5]


def show(results: list[dict[str, Any]], markdown: bool) -> str:
    """Return the table: one line for each case and side."""
    table_rows = [
        [
            result["case"],
            str(result["ranks"]),
            side,
            f"{speed:.0f}",
            "1" if side == "ours" else "{:.3f} +- {:.3f}".format(*result["ratio"][side]),
        ]
        for result in results
        for side, speed in result["tokens_per_second"].items()
    ]
    return table(["case", "ranks", "side", "tokens/s", "their time / ours"], table_rows, markdown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=sides_of("bf16")[1:], help="beside ours; all by default")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2")
    if not dist.is_torchelastic_launched():
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*launcher, str(arguments.ranks), "-m", "benchmarks.speed.whole_model", *sys.argv[1:]]
        return subprocess.run(command, check=False, timeout=7200, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    torch.set_num_threads(1)
    results = []
    for case in arguments.cases:
        results.append(measure(case, arguments.rounds, arguments.overrides, arguments.sides))
    if os.environ["RANK"] == "0":
        print(json.dumps({"cases": results}) if arguments.json else show(results, arguments.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
