"""One run in every layout: the same losses and gradient norms, step by step: python -m benchmarks.checks.layout_parity.

Trains the tiny models with the same seed, data and global batch on one process and in each layout, and compares every
step's loss and gradient norm with the one-process run: the largest relative difference over all steps. In fp32 a loss
may differ by 1e-5 and a norm by 1e-4, in bf16 a loss by 1e-2 (a norm is shown only); the exit status says whether all
did.

Experts fold over data parallel ranks, so EP2xPP2 on 4 ranks is DP2xPP2xEP2 and stands once. In DP2xEP2 each expert has
two copies. MoE models under tensor parallelism run with sequence parallelism, which Megatron-core asks for.

`--batches` says which micro-batches, and whether documents stay apart: those of the presets, or joined_N and separate_N
with N samples in each of a global batch of 24. BERT has no separate documents.

The ranks are processes of one pool, over gloo on the CPU; each training goes through `Trainer` with its real data
loader. Further arguments are config overrides for all runs, such as data.corpus=... or model.hidden_dropout=0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from base.errors import ConfigError
from base.exit_handler import WRONG_CONFIG
from tests import distributed
from tests.tolerances import BF16_LOSS, FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, make_config, train_on_ranks

MODELS = ("gpt_tiny", "gpt_moe_tiny", "bert_tiny", "bert_moe_tiny")
SINGLE = "single"
TIMEOUT = 600.0  # seconds for one training


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and the overrides that distribute the model over them; `models`: all, or only those with or
    without experts."""

    ranks: int
    overrides: tuple[str, ...]
    models: str = "all"  # all | dense | moe

    def fits(self, model: str) -> bool:
        return self.models == "all" or (self.models == "moe") == ("moe" in model)


def _layout(ranks: int, models: str = "all", **sizes: Any) -> Layout:
    return Layout(ranks, tuple(f"parallel.{key}={str(value).lower()}" for key, value in sizes.items()), models)


LAYOUTS: dict[str, Layout] = {
    "TP2": _layout(2, "dense", tensor=2),
    "TP2+SP": _layout(2, tensor=2, sequence=True),
    "PP2": _layout(2, pipeline=2),
    "PP2xVPP2": _layout(2, pipeline=2, virtual_pipeline=2),
    "DP2": _layout(2),
    "EP2": _layout(2, "moe", expert=2),
    "TP2xPP2": _layout(4, "dense", tensor=2, pipeline=2),
    "TP2+SPxPP2": _layout(4, tensor=2, sequence=True, pipeline=2),
    "DP2xTP2": _layout(4, "dense", tensor=2),
    "DP2xTP2+SP": _layout(4, tensor=2, sequence=True),
    "DP2xPP2": _layout(4, "dense", pipeline=2),
    "DP2xPP2xEP2": _layout(4, "moe", pipeline=2, expert=2),
    "DP2xPP2xVPP2xEP2": _layout(4, "moe", pipeline=2, virtual_pipeline=2, expert=2),
    "EP4": _layout(4, "moe", expert=4),
    "DP2xEP2": _layout(4, "moe", expert=2),
    "TP2+SPxEP2xETP1": _layout(4, "moe", tensor=2, sequence=True, expert=2, expert_tensor=1),
    "TP2+SPxEP2xETP2": _layout(4, "moe", tensor=2, sequence=True, expert=2, expert_tensor=2),
}

PRESET = "preset"
# What is trained on: a global batch that every number of ranks above divides into micro-batches of each size.
BATCHES: dict[str, tuple[str, ...]] = {
    PRESET: (),
    **{
        f"{documents}_{size}": (
            f"data.documents={documents}",
            f"training.micro_batch_size={size}",
            "training.global_batch_size=24",
        )
        for documents in ("joined", "separate")
        for size in (1, 2, 3)
    },
}


@dataclass(frozen=True)
class Row:
    """One layout of one model against its one-process run: largest relative differences over the steps."""

    model: str
    layout: str
    ranks: int
    loss_difference: float
    grad_norm_difference: float
    last_loss: float
    seconds: float
    passed: bool


def compare(
    models: Sequence[str],
    layouts: Sequence[str],
    overrides: Sequence[str],
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Train each model on one process and in each layout that suits it. `on_row` gets each row as soon as it is
    known."""
    table_rows = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            common = [f"experiment={model}", "checkpoint=off", f"run_dir={folder}", *overrides]
            precision = make_config(common).training.precision
            begin = time.perf_counter()
            single = _train(common, 1)
            table_rows.append(Row(model, SINGLE, 1, 0.0, 0.0, single[-1]["loss"], time.perf_counter() - begin, True))
            on_row(table_rows[-1])
            for name in layouts:
                layout = LAYOUTS[name]
                if not layout.fits(model):
                    continue
                begin = time.perf_counter()
                lines = _train([*common, *layout.overrides], layout.ranks)
                loss, norm = (largest_difference(lines, single, key) for key in ("loss", "grad_norm"))
                passed = loss <= FP32_LOSS and norm <= FP32_GRAD_NORM if precision == "fp32" else loss <= BF16_LOSS
                table_rows.append(
                    Row(model, name, layout.ranks, loss, norm, lines[-1]["loss"], time.perf_counter() - begin, passed)
                )
                on_row(table_rows[-1])
    return table_rows


def _train(overrides: Sequence[str], ranks: int) -> Lines:
    with contextlib.redirect_stdout(io.StringIO()):  # the ranks' own output would break the table
        return train_on_ranks(overrides, ranks, TIMEOUT)


def markdown(table_rows: Sequence[Row]) -> str:
    """Return a table with a line per layout and a column per model: difference of loss / of gradient norm."""
    models = list(dict.fromkeys(row.model for row in table_rows))
    cells = {(row.layout, row.model): row for row in table_rows if row.layout != SINGLE}
    layouts = [name for name in LAYOUTS if any((name, model) in cells for model in models)]
    lines = [f"| layout | ranks | {' | '.join(models)} |", f"|---|---|{'---|' * len(models)}"]
    for name in layouts:
        found = [cells.get((name, model)) for model in models]
        texts = ["" if row is None else f"{row.loss_difference:.0e} / {row.grad_norm_difference:.0e}" for row in found]
        lines.append(f"| {name} | {LAYOUTS[name].ranks} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _show(row: Row) -> None:
    if row.layout == SINGLE:
        differences = f"{'':>12}{'':>12}"
    else:
        differences = f"{row.loss_difference:>12.1e}{row.grad_norm_difference:>12.1e}"
    verdict = "" if row.passed else "  TOO FAR"
    print(
        f"{row.model:<15}{row.layout:<18}{row.ranks:>5}{differences}{row.last_loss:>12.6f}{row.seconds:>9.1f}{verdict}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT", help=", ".join(LAYOUTS)
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--batches", nargs="+", choices=BATCHES, default=[PRESET], metavar="BATCH", help=", ".join(BATCHES)
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown too")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="overrides for all runs; after -- if a list comes before"
    )
    arguments = parser.parse_args()
    overrides = [f"training.steps={arguments.steps}", f"training.precision={arguments.precision}", *arguments.overrides]
    print(
        f"{arguments.steps} steps in {arguments.precision}, beside one process: largest relative difference of any step"
    )
    print(
        f"{'model':<15}{'layout':<18}{'ranks':>5}{'loss':>12}{'grad norm':>12}{'last loss':>12}{'seconds':>9}",
        flush=True,
    )
    begin = time.perf_counter()
    try:
        tables = {}
        for batch in arguments.batches:
            print(f"{batch}:", flush=True)
            models = [model for model in arguments.models if model.startswith("gpt") or "separate" not in batch]
            tables[batch] = compare(models, arguments.layouts, [*BATCHES[batch], *overrides], _show)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return WRONG_CONFIG
    finally:
        distributed.shutdown()
    table_rows = [row for each in tables.values() for row in each]
    broken = [row for row in table_rows if not row.passed]
    compared = sum(row.layout != SINGLE for row in table_rows)
    print(f"{compared - len(broken)} of {compared} within the bounds, in {time.perf_counter() - begin:.0f} s")
    if arguments.markdown:
        for batch, each in tables.items():
            print(f"\n{batch}:\n\n{markdown(each)}\n")
    if arguments.json:
        print(
            json.dumps(
                {
                    "steps": arguments.steps,
                    "precision": arguments.precision,
                    "rows": [{"batch": batch, **vars(row)} for batch, each in tables.items() for row in each],
                }
            )
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
