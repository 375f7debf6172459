"""Parity of losses: trainings with each placement policy compared with those without replicas and migration.

`python -m benchmarks.checks.placement_parity [--layouts EP2 ...] [--policies solve ...] [--steps 24] [--bitwise]
[--markdown] [--json] [key=value ...]`

gpt_moe_tiny without an auxiliary loss in fp32, the same seed, data and global batch, in layouts with experts on two and
four ranks. `scattered` plans random ranks and quotas within the slots for each call, so that replicas change all
the time; it is run with the layer's memory strategies, pipeline degrees and full recomputation in turn. Losses may
differ by 1e-6, as sums have other orders; each run must have computed with replicas. Experts migrate every third step.
With `--bitwise` all losses, gradient norms and, at the end, all weights must be the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from benchmarks.checks.layout_parity import LAYOUTS
from benchmarks.kit.tables import table
from tests import distributed
from tests.moe.placement.scattered import train_on_rank
from tests.tolerances import PLACEMENT_LOSS
from tests.training.helpers import largest_difference, make_config

NAMES = ("EP2", "EP4", "DP2xEP2", "DP2xPP2xEP2", "DP2xPP2xVPP2xEP2", "TP2+SPxEP2xETP1", "TP2+SPxEP2xETP2")
SCATTERED = "scattered"
POLICIES = ("flex", "least_loaded", "solve")
PASSES = (
    ("moe.memory_strategy=keep",),
    ("moe.memory_strategy=recompute", "moe.pipeline_degree=3", "moe.backward_pipeline_degree=2"),
    ("moe.memory_strategy=communicate", "training.recompute=full"),
    ("moe.memory_strategy=offload", "moe.pipeline_degree=2"),
    ("moe.memory_strategy=communicate_recompute", "moe.pipeline_degree=2", "moe.weight_lag=1"),
    ("training.recompute=full", "moe.pipeline_degree=2"),
)
# Blocks of one degree, small ones so that there are many.
BITWISE = ("moe.placement.bitwise=true", "moe.placement.block_rows=8", "moe.backward_pipeline_degree=null")
INTERVAL = 3  # steps between moves of homes
TIMEOUT = 600.0  # seconds for one training
Trained = tuple[list[dict[str, Any]], dict[str, str]]


@dataclass(frozen=True)
class Case:
    layout: str
    policy: str
    passes: tuple[str, ...] = PASSES[0]
    bitwise: bool = False

    def overrides(self, policy: str, more: Sequence[str]) -> list[str]:
        """Of its training, or of the static one."""
        static = policy == "static"
        return [
            "experiment=gpt_moe_tiny",
            "checkpoint=off",
            "moe.aux_loss_coeff=0",
            f"moe.placement.policy={policy if policy != SCATTERED else 'solve'}",
            f"moe.placement.extra_slots={0 if static else 2}",
            f"moe.placement.interval={INTERVAL}",
            *LAYOUTS[self.layout].overrides,
            *self.passes,
            *(BITWISE if self.bitwise else ()),
            *more,
        ]


@dataclass(frozen=True)
class Row:
    case: Case
    difference: float  # of a loss, relative
    at_home: float  # the busiest rank's assignments by the mean's
    placed: float
    num_replicas: int
    moved: int  # experts that got another home
    same: bool  # losses, gradient norms and, at the end, all weights to the bit

    @property
    def passed(self) -> bool:
        close = self.same if self.case.bitwise else self.difference <= PLACEMENT_LOSS
        return close and (self.num_replicas > 0 or self.case.policy != SCATTERED)


def compare(case: Case, more: Sequence[str]) -> Row:
    """A training beside the static one."""
    static, static_weights = static_training(replace(case, policy="static"), tuple(more))
    placed, weights = trained(case, case.policy, more)
    numbers = [line["placement"] for line in placed]
    at_home, after = (sum(each[name] for each in numbers) / len(numbers) for name in ("at_home", "placed"))
    num_replicas, moved = (sum(each.get(name, 0) for each in numbers) for name in ("copies", "moved"))
    same = weights == static_weights and [_exact(line) for line in placed] == [_exact(line) for line in static]
    return Row(case, largest_difference(placed, static, "loss"), at_home, after, num_replicas, moved, same)


@cache
def static_training(case: Case, more: tuple[str, ...]) -> Trained:
    """That of all cases that differ in the policy alone."""
    return trained(case, case.policy, more)


def trained(case: Case, policy: str, more: Sequence[str]) -> Trained:
    """One training: its lines, and hashes of its last weights."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ranks = LAYOUTS[case.layout].ranks
        config = make_config([*case.overrides(policy, more), f"run_dir={folder}"], ranks)
        return distributed.run(train_on_rank, ranks, config, policy == SCATTERED, timeout=TIMEOUT)[0]


def _exact(line: dict[str, Any]) -> tuple[float, float]:
    return line["loss"], line["grad_norm"]


def cases(layouts: Sequence[str], policies: Sequence[str], bitwise: bool) -> Iterator[Case]:
    """All of them."""
    turns = itertools.cycle(PASSES)
    for layout, policy in itertools.product(layouts, policies):
        placements = PASSES if policy == SCATTERED else [next(turns)]
        yield from (Case(layout, policy, passes, bitwise) for passes in placements)


def run(chosen: Sequence[Case], more: Sequence[str], on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Compare all of these."""
    table_rows = []
    for case in chosen:
        table_rows.append(compare(case, more))
        on_row(table_rows[-1])
    return table_rows


def _cells(row: Row) -> list[str]:
    passes = ", ".join(word.rpartition(".")[2] for word in row.case.passes)
    difference = "the same bits" if row.same else f"{row.difference:.1e}"
    numbers = (difference, f"{row.at_home:.3f}", f"{row.placed:.3f}", str(row.num_replicas), str(row.moved))
    return [row.case.layout, row.case.policy, passes, *numbers, "" if row.passed else "FAILED"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=NAMES, default=list(NAMES), metavar="LAYOUT", help=str(NAMES))
    parser.add_argument("--policies", nargs="+", choices=(SCATTERED, *POLICIES), default=[SCATTERED, *POLICIES])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--bitwise", action="store_true", help="with moe.placement.bitwise")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args, more = parser.parse_known_args()
    try:
        table_rows = run(
            list(cases(args.layouts, args.policies, args.bitwise)),
            [f"training.steps={args.steps}", *more],
            lambda row: print(" | ".join(_cells(row)), flush=True),
        )
    finally:
        distributed.shutdown()
    heads = ["layout", "policy", "passes", "losses differ by", "at home", "placed", "copies", "moved", ""]
    print(f"\n{table(heads, [_cells(row) for row in table_rows], args.markdown)}\n")
    failed = sum(not row.passed for row in table_rows)
    what = "weights, to the bit" if args.bitwise else f"losses within {PLACEMENT_LOSS:g}"
    print(f"{len(table_rows) - failed} of {len(table_rows)} trainings have the static run's {what}")
    if args.json:
        print(
            json.dumps(
                {
                    "rows": [
                        {"copies" if key == "num_replicas" else key: each for key, each in asdict(row).items()}
                        for row in table_rows
                    ]
                }
            )
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
