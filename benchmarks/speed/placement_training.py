"""Training of a whole MoE model without a balancing loss: static map, placed experts, and Megatron-core's layer.

`python -m benchmarks.speed.placement_training [--preset gpt_moe_small] [--policy auto] [--rate 500mbit] [--before 40]
[--rounds 10] [--markdown] [--json] [key=value ...]`

Two ranks on an emulated cluster, one thread each, compute in earnest, as in end_to_end.py: models of one process with
the same initial weights, batches and dropout, which take their steps in turns. First `--before` steps at a high rate,
so that the routers have preferences; then the rounds that count. megatron: Megatron-core's MoELayer; static: ours
without replicas; placed: ours with the policy, two replica slots per rank, migration every 10 steps. max/mean:
assignments of the busiest rank over the mean rank's, without replicas, over the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from statistics import fmean, median

from benchmarks.kit import link, rounds
from benchmarks.kit.cluster import Cluster, ClusterError
from benchmarks.kit.tables import table
from benchmarks.speed import end_to_end
from benchmarks.speed.end_to_end import MEGATRON, NODES, ONE_CHUNK, PLACED, largest_difference, make_config
from data.prepare import prepare

NAMES = (MEGATRON, ONE_CHUNK, PLACED)
WORDS = {MEGATRON: "Megatron-core's layer", ONE_CHUNK: "ours, static", PLACED: "ours, placed"}
SKEWED = ("moe.aux_loss_coeff=0", "optimizer.lr=0.003", "optimizer.warmup_steps=0", "optimizer.schedule=constant")


@dataclass(frozen=True)
class Row:
    variant: str
    tokens_per_second: float
    speedup: float  # over Megatron-core's layer
    error: float
    over_static: float
    loss_difference: float  # from static's, relative, the largest of all steps


def placed() -> list[float]:
    """[at home, placed]: max/mean over ranks of the last step of the placed model, means over layers and calls."""
    from moe.layer import layers_of

    run = end_to_end._variants[PLACED].run
    tallies = [layer.placement.tally for layer in layers_of(run.engine.bare_chunks).values() if layer.placement]
    counted = [tally for tally in tallies if tally[0]]
    return [fmean(tally[i] / tally[0] for tally in counted) if counted else 1.0 for i in (1, 2)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt_moe_small")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--rate", default="500mbit", help="of the links")
    parser.add_argument("--before", type=int, default=40, help="steps before those that count")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments, overrides = parser.parse_known_args()
    placement = [f"moe.placement.policy={arguments.policy}", "moe.placement.extra_slots=2", "moe.placement.interval=10"]
    placement.append("moe.placement.costs=measured")
    try:
        config = make_config(arguments.preset, "fp32", [*SKEWED, *placement, *overrides])
        prepared = prepare(config.data, config.model.family, show_progress=False)
        num_batches = arguments.before + 4 * arguments.rounds + 8
        with Cluster(NODES, arguments.rate) as cluster, tempfile.TemporaryDirectory() as folder:
            print(link.in_words(cluster, link.measured_rate(cluster)), flush=True)
            cluster.call(end_to_end.build, config, prepared, num_batches, folder, NAMES)
            for _ in range(arguments.before):
                for name in NAMES:
                    cluster.call(end_to_end.step, name)
            found = rounds.measure(cluster, end_to_end.step, {name: (name,) for name in NAMES}, arguments.rounds)
            losses = cluster.call(end_to_end.course)[0]["loss"]
            at_home, after = cluster.call(placed)[0]
    except (ValueError, RuntimeError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tokens = config.training.global_batch_size * config.model.sequence_length
    seconds = {name: found.seconds[name]["step"] for name in NAMES}
    table_rows = []
    for name in NAMES:
        ratios = [a / b for a, b in zip(seconds[MEGATRON], seconds[name], strict=True)]
        over_static = median(a / b for a, b in zip(seconds[ONE_CHUNK], seconds[name], strict=True))
        table_rows.append(
            Row(
                WORDS[name],
                tokens / median(seconds[name]),
                median(ratios),
                rounds.standard_error(ratios),
                over_static,
                largest_difference(losses[name], losses[ONE_CHUNK]),
            )
        )
    cells = [
        [
            row.variant,
            f"{row.tokens_per_second:,.0f}",
            f"{row.speedup:.3f} ± {row.error:.3f}",
            f"{row.over_static:.3f}",
            f"{row.loss_difference:.1e}",
        ]
        for row in table_rows
    ]
    heads = ["model", "tokens/s", "over Megatron-core's layer", "over static", "loss apart"]
    print(table(heads, cells, arguments.markdown))
    print(
        f"\nmax/mean over ranks in the last of {len(losses[PLACED])} steps: {at_home:.2f} at home, {after:.2f} placed"
    )
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in table_rows], "at_home": at_home, "placed": after}))
    return 0


if __name__ == "__main__":
    from benchmarks.speed import placement_training  # under the name by which ranks find its functions

    sys.exit(placement_training.main())
