"""Effect of expert placement on the step time of an MoE layer, on an emulated cluster with a virtual accelerator.

`python -m benchmarks.speed.placement_step [--cases steady@2 ...] [--rounds 7] [--rate 1gbit] [--markdown] [--json]`

A step is the forward and backward passes of some micro-batches through one layer, four ranks or two, each a node of the
emulated cluster. The experts take the time of a virtual accelerator; token rows, weights and gradients are sent over
the links, and all else is real. As on a GPU, sending a replica's weights and gradients takes about a hundredth of a
micro-batch's computation. All variants run in turn in each round; a ratio is the median over rounds, with its standard
error.

* ideal: the same number of rows, routed evenly, without replicas: the result of perfect balance.
* static: without replicas. The planners: with two replica slots per rank (moonep: as many as it needs). Those whose
  papers have no memory fetch their replicas for each micro-batch.
* capacity 1.25: without replicas, but each rank's tokens beyond 1.25 times the mean of an expert are dropped.

Ideal time over a variant's time: 100% is perfect. plan ms: planning time in a step, on the rank where it is greatest.
`--real` computes on two ranks without the virtual accelerator, also in blocks (`bitwise`, of 256 rows); `--chunks`
compares distributions of an expert's tokens over its replicas; `--copies` has replicas that cost 1%, 5% and 20% of a
micro-batch, and 1, 4 and 16 micro-batches per step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.kit import link, rounds
from benchmarks.kit.accelerator import step_flops
from benchmarks.kit.cluster import Cluster, ClusterError
from benchmarks.kit.tables import table
from benchmarks.speed.placement_layer import BITWISE, CONTIGUOUS, DROPS, HIDDEN, IDEAL, STATIC, Case, build, run
from moe.placement.quotas import Costs

VARIANTS = (IDEAL, STATIC, "solve", "flex", "quota", "least_loaded", "shadowing", "eplb", "moonep", DROPS)
OF_CHUNKS = (IDEAL, STATIC, "solve", f"solve, {CONTIGUOUS}")
OF_COPIES = (IDEAL, STATIC, "solve")
IN_EARNEST = (IDEAL, STATIC, "solve", f"static, {BITWISE}", f"solve, {BITWISE}")
CASES = (
    *(Case(4, load) for load in ("steady@2", "steady@3")),
    *(Case(2, load) for load in ("steady@1.5", "steady@1.8")),
    *(Case(4, load, steps=2) for load in ("drifting@2", "jumping@2")),
    Case(4, "W0"),
)
CHUNKS = tuple(Case(4, "steady@3", degree=degree) for degree in (1, 2, 4))
REPLICA_CASES = tuple(
    Case(2, "steady@1.5", share=share, micro_batches=number) for share in (0.01, 0.05, 0.2) for number in (1, 4, 16)
)
REAL = (Case(2, "steady@1.8", seconds=None, tokens=8192, width=1024),)


@dataclass(frozen=True)
class Row:
    case: str
    max_by_mean: float
    variant: str
    seconds: float
    of_ideal: float
    error: float
    of_static: float
    planning_ms: float
    dropped: float


def costs_of(case: Case, bytes_per_second: float) -> Costs:
    """In assignments: weights to a copy, and its gradient home, over a link of this rate."""
    seconds = case.seconds if case.seconds is not None else step_flops(1, HIDDEN, case.width) / 40e9
    trip = round(4 * 3 * HIDDEN * case.width / bytes_per_second / seconds)
    return Costs(expert_overhead=4, replica_in_node=trip, grad_in_node=trip)


def measure(cluster: Cluster, case: Case, variants: Sequence[str], num_rounds: int, rate: float) -> list[Row]:
    """All variants of a case."""
    case = case.at_rate(rate)
    facts = cluster.call(build, case, costs_of(case, rate))
    dropped = sum(each["dropped"] for each in facts) / len(facts)
    found = rounds.measure(cluster, run, {name: (name,) for name in variants}, num_rounds)
    ideal, static = (found.seconds[name]["step"] for name in (IDEAL, STATIC))
    table_rows = []
    for name in variants:
        own = found.seconds[name]
        shares = [a / b for a, b in zip(ideal, own["step"], strict=True)]
        table_rows.append(
            Row(
                case.name,
                facts[0]["ratio"],
                name,
                median(own["step"]),
                median(shares),
                rounds.standard_error(shares),
                median(a / b for a, b in zip(static, own["step"], strict=True)),
                1e3 * median(own["planning"]) / case.steps,
                dropped if name == DROPS else 0.0,
            )
        )
    return table_rows


def _cells(row: Row) -> list[str]:
    numbers = [f"{row.max_by_mean:.2f}", row.variant, f"{row.seconds:.3f}", f"{row.of_ideal:.1%} ± {row.error:.1%}"]
    return [row.case, *numbers, f"{row.of_static:.2f}", f"{row.planning_ms:.2f}", f"{row.dropped:.1%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=None, metavar="LOAD", help="loads of the cases, as workloads")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", default="1gbit", help="of each link")
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = CHUNKS if args.chunks else REPLICA_CASES if args.copies else REAL if args.real else CASES
    cases = tuple(case for case in cases if args.cases is None or case.load in args.cases)
    variants: Sequence[str] = OF_CHUNKS if args.chunks else OF_COPIES if args.copies else args.variants
    variants = IN_EARNEST if args.real else variants
    named, table_rows = list(dict.fromkeys((IDEAL, STATIC, *variants))), list[Row]()
    try:
        for ranks in sorted({case.ranks for case in cases}):
            with Cluster(nodes=ranks, rate=args.rate) as cluster:
                rate = link.measured_rate(cluster)  # bits a second
                print(link.in_words(cluster, rate), flush=True)
                for case in cases:
                    if case.ranks == ranks:
                        table_rows += measure(cluster, case, named, args.rounds, rate / 8)
                        print(" | ".join(_cells(table_rows[-1])), flush=True)
    except (ClusterError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    heads = ["case", "max/mean", "variant", "s", "ideal by it", "static by it", "plan ms", "dropped"]
    print(table(heads, [_cells(row) for row in table_rows], args.markdown))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in table_rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
