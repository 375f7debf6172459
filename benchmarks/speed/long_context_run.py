"""Long samples over context ranks, trained in earnest on this processor: `python -m benchmarks.speed.long_context_run
[--tokens 131072] [--document 16384] [--joined 32768] [--markdown] [--json]`

A GPT with experts, two layers, 128 channels, layers recomputed in the backward pass, the head in tiles, gloo ranks with
one thread each. Losses: a step over documents that stay apart, none longer than `--document`, and one over a joined
sample, each on one process and over two. Memory: the most bytes of tensors that a rank has at once in a step beside
weights, gradients and optimizer state, against what `plan=true` says of the same rank; exponents of its growth with the
tokens, fitted over the lengths shown: with as many ranks (so a rank's tokens stay the same), and on two ranks. Real, on
this processor.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.kit.tables import table
from benchmarks.speed.plan_accuracy import LiveBytes
from configs.job import Job
from configs.schema import Config
from tests import distributed
from tests.training.helpers import make_config

VOCAB_SIZE, WARM_UP = 1000, 1024
TIMEOUT = 7200.0
OVERRIDES = (
    *("experiment=gpt_moe_tiny", "training.device=cpu", "model.num_layers=2", "model.hidden_size=128"),
    *("model.num_attention_heads=2", "moe.ffn_hidden_size=256", "training.recompute=full", "training.token_tile=4096"),
    *("training.micro_batch_size=1", "training.global_batch_size=1", "optimizer.distributed=false"),
)
MIB = 2**20


def config_of(tokens: int, ranks: int, documents: str) -> Config:
    """Return the config of a training of one sample of this many tokens over this many context ranks."""
    sizes = f"model.sequence_length={tokens}", f"parallel.context={ranks}", f"data.documents={documents}"
    return make_config([*OVERRIDES, *sizes], ranks)


def lengths_of(tokens: int, longest: int) -> list[int]:
    """Documents of a sample: lengths whose logarithms are even, one of the longest among them."""
    rng, found, left = np.random.default_rng(0), [longest], tokens - longest
    while left:
        found.append(min(left, int(np.exp(rng.uniform(np.log(64), np.log(longest))))))
        left -= found[-1]
    return found


def batch_of(config: Config, tokens: int, documents: Sequence[int] | None) -> dict[str, torch.Tensor]:
    """Random tokens of one sample `[1, tokens]`; no document predicts the first token of the next."""
    from training.starting.dry_run import made_up_batches

    (made,) = made_up_batches(config, 1, VOCAB_SIZE)
    batch = {name: each[:, :tokens].contiguous() for name, each in made.items()}
    batch["loss_mask"] = torch.ones(1, tokens)
    batch["loss_mask"][0, -1] = 0.0
    if documents is not None:
        batch["positions"] = torch.cat([torch.arange(each) for each in documents])[None, :tokens].contiguous()
        batch["loss_mask"][0, :-1] = (batch["positions"][0, 1:] > 0).float()
    return batch


def step(config: Config, documents: Sequence[int] | None) -> dict[str, Any]:
    """Take, on a rank, one step over the whole sample, after one over its start. Return the loss, seconds, and peak
    bytes of tensors, measured and planned."""
    from memory.pool import WORKSPACE
    from parallel import topology as topology_module
    from simulator.run_plan import make_plan
    from training.engine import Engine
    from training.step import train_step

    topology = topology_module.initialize(config)
    plan = make_plan(Job(config, topology.world_size, VOCAB_SIZE, topology.device.type)).memory[topology.rank]
    model = Engine(config, topology, VOCAB_SIZE)
    train_step(model, [batch_of(config, WARM_UP, documents)], 1)
    WORKSPACE.pooled = False
    WORKSPACE._free.clear()  # a pool of host memory, which a GPU's allocator takes the place of
    try:
        gc.collect()
        batch = batch_of(config, config.model.sequence_length, documents)
        before = time.perf_counter()
        with LiveBytes() as live:
            result = train_step(model, [batch], 2)
        seconds = time.perf_counter() - before
    finally:
        WORKSPACE.pooled = True
        model.close()
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "tokens": result.predicted_tokens,
        "seconds": seconds,
        "peak": live.peak,
        "planned": plan.activations,
    }


@functools.cache
def run(tokens: int, ranks: int, longest: int | None) -> dict[str, Any]:
    """Run one training; `longest`: tokens of the longest separate document, None: the sample is one document."""
    from benchmarks.speed import long_context_run  # as ranks import it

    documents = None if longest is None else lengths_of(tokens, min(tokens, longest))
    config = config_of(tokens, ranks, "joined" if documents is None else "separate")
    found = distributed.run(long_context_run.step, ranks, config, documents, timeout=TIMEOUT)
    most = max(found, key=lambda each: each["peak"])
    result = {
        "documents": "joined" if documents is None else f"{len(documents)} of at most {max(documents)}",
        "n": tokens,
        "ranks": ranks,
        "predicted": found[0]["tokens"],
        "loss": found[0]["loss"],
        "grad_norm": found[0]["grad_norm"],
        "seconds": max(each["seconds"] for each in found),
        "peak": most["peak"],
        "planned": most["planned"],
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def exponent(runs: Sequence[dict[str, Any]]) -> float:
    """Return the fitted exponent of a rank's peak in the tokens."""
    return float(np.polyfit(np.log([row["n"] for row in runs]), np.log([row["peak"] for row in runs]), 1)[0])


def difference(one: dict[str, Any], two: dict[str, Any], key: str) -> float:
    """Return the relative difference of a number over two ranks from that of one process."""
    return float(abs(two[key] - one[key]) / one[key])


def report(runs: Sequence[dict[str, Any]], markdown: bool) -> str:
    """The table of all trainings."""
    headings = ("documents", "tokens", "ranks", "predicted", "loss", "grad norm", "s", "peak MiB", "planned / peak")
    cells = [
        [
            *(row["documents"], str(row["n"]), str(row["ranks"]), str(row["predicted"]), f"{row['loss']:.7f}"),
            *(f"{row['grad_norm']:.7f}", f"{row['seconds']:.0f}", f"{row['peak'] / MIB:.1f}"),
            f"{row['planned'] / row['peak']:.3f}",
        ]
        for row in runs
    ]
    return table(headings, cells, markdown)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, help="of the long samples, a multiple of 1024")
    parser.add_argument("--document", type=int, default=16384, help="tokens of the longest document that stays apart")
    parser.add_argument("--joined", type=int, default=32768, help="of the joined sample that one process trains too")
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    n = options.tokens
    try:
        separate = [run(n, ranks, options.document) for ranks in (1, 2)]
        joined = [run(options.joined, ranks, None) for ranks in (1, 2)]
        wide = [run(n // 4 * ranks, ranks, None) for ranks in (1, 2, 4)]
        two = [run(n // 4, 2, None), wide[1], run(n, 2, None)]
    finally:
        distributed.shutdown()
    runs = list({id(each): each for each in (*separate, *joined, *wide, *two)}.values())
    print(report(runs, options.markdown))
    figures = {
        "apart_loss": difference(separate[0], separate[1], "loss"),
        "joined_loss": difference(joined[0], joined[1], "loss"),
        "apart_norm": difference(separate[0], separate[1], "grad_norm"),
        "joined_norm": difference(joined[0], joined[1], "grad_norm"),
        "exponent_with_ranks": exponent(wide),
        "exponent_on_two": exponent(two),
    }
    print(f"\nlosses of two ranks: {figures['apart_loss']:.1e} (apart) and {figures['joined_loss']:.1e} (joined) away")
    print(f"norms of two ranks: {figures['apart_norm']:.1e} (apart) and {figures['joined_norm']:.1e} (joined) away")
    print(f"exponent of a rank's peak in tokens, as many for each rank: {figures['exponent_with_ranks']:.3f}")
    print(f"exponent of a rank's peak in tokens, on two ranks: {figures['exponent_on_two']:.3f}")
    if options.json:
        print(json.dumps({"rows": runs, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
