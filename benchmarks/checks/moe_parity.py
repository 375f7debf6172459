"""The MoE layer's numbers against the plain loop over tokens: outputs and all gradients, in every plan and layout.

`python -m benchmarks.checks.moe_parity [--ranks 1 2 4] [--every 6] [--sizes 13 8 12] [--json] [--markdown]`

Degrees 1 to 8, forward and backward alike and different, times every memory strategy, with the backward order taking
turns; top 1, 2, 4 and 8 of 8 experts; balanced, skewed, empty, dropped and all-on-one-expert routing; with and without
a shared expert; flat and, on four ranks as two nodes of two, hierarchical exchange. fp64, fp32, bf16. Each case meets
every 6th plan, in turns, or every one with `--every 1` (an hour). The reference is the loop over tokens in fp64 on the
same rounded numbers. A tensor's error is the norm of its difference by its norm; beside it stands the worst single
number's, by the tensor's largest, and the same two of the loop over tokens in the precision itself: what rounding alone
does to so small tensors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass

import torch

from benchmarks.kit.tables import table
from moe.alltoall.flat import AllToAll, FlatAllToAll
from moe.alltoall.hierarchical import HierarchicalAllToAll
from tests.distributed import run, shutdown
from tests.moe.oracle import (
    HIDDEN,
    ROUTINGS,
    TOP_K,
    WIDTH,
    Case,
    compared,
    error_of_norms,
    largest_error,
    loop,
    plans,
    problem,
    with_dtype,
)
from tests.tolerances import MOE


@dataclass
class Errors:
    """Return the error of the worst of many tensors: by its norm, and of a single number by the tensor's largest."""

    number: int = 0
    by_norm: float = 0.0
    single: float = 0.0

    def add(self, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        """One comparison of all outputs and gradients."""
        self.number += 1
        self.single = max(self.single, largest_error(actual, expected))
        self.by_norm = max(self.by_norm, error_of_norms(actual, expected))


def errors(kind: str, dtype: str, every: int, sizes: tuple[int, int, int]) -> tuple[Errors, Errors]:
    """Compute on a rank the errors of our layer, and of the loop over tokens in this dtype (one process only)."""
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    exchange: AllToAll | None = None
    if size > 1:
        exchange = FlatAllToAll(group) if kind == "flat" else HierarchicalAllToAll(group, 2)
    num_tokens, hidden, width = sizes
    cases = [
        with_dtype(Case(num_tokens, top_k=top_k, routing=routing, shared=shared, hidden=hidden, width=width), dtype)
        for routing, top_k, shared in itertools.product(ROUTINGS, TOP_K, (False, True))
    ]
    own, plain = Errors(), Errors()
    for _, _, actual, expected in compared(
        ((case, plans()[i % every :: every]) for i, case in enumerate(cases)), exchange, rank, size
    ):
        own.add(actual, expected)
    for case in cases if size == 1 else ():
        plain.add(loop(case, problem(case), case.dtype), loop(case, problem(case)))
    return own, plain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--every", type=int, default=6, help="of the plans, for each case")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=3,
        metavar=("TOKENS", "HIDDEN", "WIDTH"),
        default=(Case.num_tokens, HIDDEN, WIDTH),
        help="tokens of a rank, hidden size, experts' width; compiled tiles take multiples of 32",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    table_rows = []
    try:
        for ranks in arguments.ranks:
            for kind in ("flat", "hierarchical") if ranks == 4 else ("flat",):
                for dtype in ("float64", "float32", "bfloat16"):
                    results = run(errors, ranks, kind, dtype, arguments.every, tuple(arguments.sizes), timeout=3600.0)
                    own, plain = zip(*results, strict=True)
                    table_rows.append(
                        {
                            "ranks": ranks,
                            "exchange": kind if ranks > 1 else "none",
                            "dtype": dtype,
                            "comparisons": own[0].number,
                            "error": max(each.by_norm for each in own),
                            "single": max(each.single for each in own),
                            "loop_error": max(each.by_norm for each in plain),
                            "loop_single": max(each.single for each in plain),
                            "allowed": MOE[dtype],
                        }
                    )
    finally:
        shutdown()
    header = [
        "EP",
        "exchange",
        "dtype",
        "comparisons a rank",
        "error",
        "allowed",
        "single number",
        "plain loop",
        "its single number",
    ]
    cells = [
        [str(r["ranks"]), r["exchange"], r["dtype"], str(r["comparisons"])]
        + [f"{r[key]:.1e}" for key in ("error", "allowed", "single")]
        + [f"{r[key]:.1e}" if r["ranks"] == 1 else "" for key in ("loop_error", "loop_single")]
        for r in table_rows
    ]
    print(table(header, cells, arguments.markdown))
    if arguments.json:
        print(json.dumps({"rows": table_rows}))
    return 0 if all(row["error"] < row["allowed"] for row in table_rows) else 1


if __name__ == "__main__":
    from benchmarks.checks import moe_parity  # under the name by which ranks find its functions

    sys.exit(moe_parity.main())
