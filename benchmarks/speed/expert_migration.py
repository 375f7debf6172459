"""Migration of experts, simulated on domains of 8 ranks without replicas between them.

`python -m benchmarks.speed.expert_migration [--seeds 3] [--ranks 64 ...] [--markdown] [--json]`

256 experts on 64 and 256 ranks and 1,024 on 1,024, two replica slots per rank, `solve` in each domain. Primaries are in
order at first. Migrations are planned from all counts of an interval of five steps (`moe.placement.migration`) and
evaluated on the next interval, whose counts are drawn anew: `steady` from the same popularity, `drifting` from one that
changes slowly, `jumping` from one that changes at once. Columns: max/mean of assignments over ranks, mean over calls,
as routed, with primaries in order, and after migration; the share of the imbalance above 1 that migration leaves;
experts that migrate after the first interval, and after the next two; milliseconds to plan migrations.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from benchmarks.kit.tables import table
from benchmarks.kit.workloads import Size, counts
from moe.placement.migration import num_migrated, plan_migrations
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries
from moe.placement_map import Integers, PlacementMap

LOADS = ("steady@1.5", "steady@2", "steady@3", "drifting", "jumping")
SIZES = ((64, 256), (256, 256), (1024, 1024))
DOMAIN, REPLICA_SLOTS, TOKENS, TOP_K = 8, 2, 8192, 8
INTERVAL, INTERVALS = 5, 4
INSIDE = Costs(replica_between=None)


@dataclass(frozen=True)
class Row:
    """Means over the seeds."""

    load: str
    ranks: int
    routed: float  # max/mean without replicas, primaries in order
    fixed: float  # with replicas
    moved: float  # with replicas, after migration
    moves: list[float]  # experts, after each interval
    milliseconds: float

    @property
    def left(self) -> float:
        """Share of the imbalance above 1 of fixed primaries that migration leaves."""
        return (self.moved - 1) / (self.fixed - 1)


def imbalance(counts_RE: Integers, placement: PlacementMap) -> float:
    """Return max/mean of a call that `solve` plans from scratch."""
    loads_R = solve(counts_RE, placement, INSIDE, ReplicaLimits(REPLICA_SLOTS, DOMAIN)).sum(0)
    return float(loads_R.max() / loads_R.mean())


def run(load: str, ranks: int, experts: int, seeds: int) -> Row:
    """Return the means of one load on one cluster."""
    found = [_once(load, ranks, experts, seed) for seed in range(seeds)]
    routed, fixed, moved, milliseconds, *moves = (fmean(column) for column in zip(*found, strict=True))
    return Row(load, ranks, routed, fixed, moved, moves, milliseconds)


def _once(load: str, ranks: int, experts: int, seed: int) -> list[float]:
    size, in_order = Size(ranks, experts, TOP_K, TOKENS, 1, seed), PlacementMap(experts, ranks)
    steps = [step_LMRE[0, 0] for step_LMRE in counts(load, size, INTERVAL * INTERVALS)]
    intervals = [steps[first : first + INTERVAL] for first in range(0, len(steps), INTERVAL)]
    placements, longest = [in_order], 0.0
    for calls in intervals[:-1]:
        start = time.perf_counter()
        placements.append(plan_migrations(np.sum(calls, axis=(0, 1)), placements[-1], DOMAIN))
        longest = max(longest, 1e3 * (time.perf_counter() - start))
    routed = fmean(_max_by_mean(at_primaries(counts_RE, in_order).sum(0)) for counts_RE in intervals[1])
    fixed, moved = (fmean(imbalance(counts_RE, each) for counts_RE in intervals[1]) for each in placements[:2])
    return [routed, fixed, moved, longest, *(num_migrated(*pair) for pair in pairwise(placements))]


def _max_by_mean(loads_R: Integers) -> float:
    return float(loads_R.max() / loads_R.mean())


def _cells(row: Row) -> list[str]:
    numbers = [f"{value:.3f}" for value in (row.routed, row.fixed, row.moved)]
    moves = [f"{value:.1f}" for value in row.moves]
    return [row.load, str(row.ranks), *numbers, f"{row.left:.0%}", *moves, f"{row.milliseconds:.1f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", choices=[ranks for ranks, _ in SIZES])
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sizes = [size for size in SIZES if args.ranks is None or size[0] in args.ranks]
    table_rows = [run(load, *size, args.seeds) for size in sizes for load in LOADS]
    heads = ["load", "ranks", "routed", "fixed homes", "moved homes", "left", "moves", "then", "then", "ms"]
    print(table(heads, [_cells(row) for row in table_rows], args.markdown))
    steady = [row for row in table_rows if row.load.startswith("steady")]
    left = fmean(row.left for row in steady)
    print(f"\nOf the imbalance above 1 that fixed homes leave, moved ones leave {left:.0%} on average (steady loads)")
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in table_rows], "left": left}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
