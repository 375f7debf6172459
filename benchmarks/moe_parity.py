"""The MoE layer's numbers against the plain loop over tokens: outputs and all gradients, in every plan and layout.

`python -m benchmarks.moe_parity [--ranks 1 2 4] [--every 6] [--json] [--markdown]`

Degrees 1 to 8, forward and backward alike and different, times every memory strategy, with the backward order taking turns; top 1, 2,
4 and 8 of 8 experts; balanced, skewed, empty, dropped and all-on-one-expert routing; with and without a shared expert; flat and, on
four ranks as two nodes of two, hierarchical exchange. fp64, fp32, bf16. Each case meets every
6th plan, in turns, or every one with `--every 1` (an hour). An error is the largest difference of a tensor by its largest value.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

import torch

from benchmarks.tables import table
from moe.dispatch import AllToAll, FlatAllToAll
from moe.hierarchical import HierarchicalAllToAll
from moe.plan import STRATEGIES, Plan
from tests.distributed import run, shutdown
from tests.moe.oracle import Case, expected_on, largest_error, ours, problem, with_dtype
from tests.tolerances import MOE

ROUTINGS = ("balanced", "skewed", "empty_experts", "one_expert", "dropped")
TOP_K = (1, 2, 4, 8)
DEGREES = [(degree, degree) for degree in range(1, 9)] + [(1, 3), (4, 1), (3, 2), (2, 6)]


def plans() -> list[Plan]:
    """Every strategy in every pair of degrees that it allows."""
    found: list[Plan] = []
    for (degree, backward), strategy in itertools.product(DEGREES, STRATEGIES):
        if degree == backward or "offload" not in strategy:
            found.append(Plan(degree, backward, strategy, weight_lag=len(found) % (backward + 1)))
    return found


def errors(kind: str, dtype: str, every: int) -> tuple[int, float]:
    """On a rank: (number of comparisons, largest error)."""
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    exchange: AllToAll | None = None
    if size > 1:
        exchange = FlatAllToAll(group) if kind == "flat" else HierarchicalAllToAll(group, 2)
    number, worst = 0, 0.0
    for i, (routing, top_k, shared) in enumerate(itertools.product(ROUTINGS, TOP_K, (False, True))):
        case = with_dtype(Case(routing=routing, top_k=top_k, shared=shared), dtype)
        expected = expected_on(case, rank, size)
        for plan in plans()[i % every :: every]:
            worst = max(worst, largest_error(ours(case, problem(case, rank), plan, exchange, rank, size), expected))
            number += 1
    return number, worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--every", type=int, default=6, help="of the plans, for each case")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    rows = []
    try:
        for ranks in arguments.ranks:
            for kind in ("flat", "hierarchical") if ranks == 4 else ("flat",):
                for dtype in ("float64", "float32", "bfloat16"):
                    results = run(errors, ranks, kind, dtype, arguments.every, timeout=3600.0)
                    rows.append(
                        {
                            "ranks": ranks,
                            "exchange": kind if ranks > 1 else "none",
                            "dtype": dtype,
                            "comparisons": results[0][0],
                            "worst": max(worst for _, worst in results),
                            "allowed": MOE[dtype],
                        }
                    )
    finally:
        shutdown()
    cells = [[str(r["ranks"]), r["exchange"], r["dtype"], str(r["comparisons"]), f"{r['worst']:.1e}", f"{r['allowed']:.0e}"] for r in rows]
    print(table(["EP", "exchange", "dtype", "comparisons a rank", "largest error", "allowed"], cells, arguments.markdown))
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 0 if all(row["worst"] < row["allowed"] for row in rows) else 1


if __name__ == "__main__":
    from benchmarks import moe_parity  # under the name by which ranks find its functions

    sys.exit(moe_parity.main())
