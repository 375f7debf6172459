"""Bytes of replicas that a planner charged, compared with the bytes sent in replayed runs.

`python -m benchmarks.checks.placement_bytes [--steps 6] [--markdown] [--json] [key=value ...]`

Each run trains gpt_moe_tiny with a policy and records its plans; a second one replays them. The
messages of replicas are counted in both where they are sent: weights of replicas, and gradients that they return.
Evaluation is not counted: its passes send only weights and belong to no step. All numbers must be equal, and without
`bitwise` the numbers of sent replicas and of returned gradients are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.checks.layout_parity import LAYOUTS
from benchmarks.kit.tables import table
from tests import distributed
from tests.training.helpers import make_config, train

NAMES = ("copies", "returned", "sent_bytes", "charged_bytes")
FEW, MANY = "training.global_batch_size=8", "training.global_batch_size=32"
FULL, HALF = "training.recompute=full", "training.precision=bf16"
EARLY = ("optimizer.state_device=host", "optimizer.early_update=always")
BITWISE = ("moe.placement.bitwise=true", "moe.placement.block_rows=8")
TIMEOUT = 600.0  # seconds for one training


@dataclass(frozen=True)
class Case:
    layout: str
    policy: str
    more: tuple[str, ...] = ()


CASES = (
    Case("EP2", "solve", (FEW,)),
    Case("EP2", "solve", (MANY,)),
    Case("EP2", "flex", (MANY, FULL)),
    Case("EP2", "solve", (MANY, *EARLY)),
    Case("EP2", "least_loaded", (MANY, *BITWISE)),
    Case("EP4", "least_loaded", (MANY, HALF)),
    Case("DP2xEP2", "least_loaded", (MANY,)),
    Case("DP2xPP2xEP2", "solve", (MANY, FULL)),
    Case("DP2xPP2xVPP2xEP2", "solve", (MANY,)),
    Case("TP2+SPxEP2xETP2", "solve", (MANY, "moe.pipeline_degree=2")),
)


@dataclass(frozen=True)
class Row:
    case: Case
    recorded: dict[str, int]
    replayed: dict[str, int]

    @property
    def passed(self) -> bool:
        found = self.replayed
        once = found["copies"] == found["returned"] or BITWISE[0] in self.case.more
        return self.recorded == found and found["sent_bytes"] == found["charged_bytes"] > 0 and once


def measure(case: Case, steps: int, more: Sequence[str]) -> Row:
    """A run and its replay."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        common = ["experiment=gpt_moe_tiny", "checkpoint=off", "moe.aux_loss_coeff=0", f"training.steps={steps}"]
        common += ["moe.num_experts=8", f"moe.placement.policy={case.policy}", "moe.placement.extra_slots=2"]
        common += ["optimizer.lr=0.02", "optimizer.warmup_steps=0", "optimizer.schedule=constant"]
        common += [*LAYOUTS[case.layout].overrides, *case.more, *more]
        found = []
        for name, words in (("first", ["record=true"]), ("again", [f"replay={folder}/first"])):
            config = make_config(
                [*common, f"run_dir={folder}/{name}", *(f"moe.placement.{word}" for word in words)],
                LAYOUTS[case.layout].ranks,
            )
            lines = distributed.run(train, LAYOUTS[case.layout].ranks, config, timeout=TIMEOUT)[0]
            found.append({each: sum(line["placement"][each] for line in lines) for each in NAMES})
    return Row(case, *found)


def _cells(row: Row) -> list[str]:
    words = ", ".join(word.rpartition(".")[2] for word in row.case.more)
    return [row.case.layout, row.case.policy, words, *(str(row.replayed[name]) for name in NAMES), _mark(row)]


def _mark(row: Row) -> str:
    return "" if row.passed else f"FAILED, recorded {row.recorded}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args, more = parser.parse_known_args()
    table_rows: list[Row] = []
    try:
        for case in CASES:
            table_rows.append(measure(case, args.steps, more))
            print(" | ".join(_cells(table_rows[-1])), flush=True)
    finally:
        distributed.shutdown()
    heads = ["layout", "policy", "with", "copies", "gradients home", "bytes sent", "bytes charged", ""]
    print(f"\n{table(heads, [_cells(row) for row in table_rows], args.markdown)}\n")
    passed = sum(row.passed for row in table_rows)
    print(f"{passed} of {len(table_rows)} replayed runs sent the bytes that their planners charged")
    if args.json:
        result: dict[str, Any] = {"rows": [asdict(row) | {"passed": row.passed} for row in table_rows]}
        print(json.dumps(result))
    return 0 if passed == len(table_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
