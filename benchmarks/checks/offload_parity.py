"""Optimizer state off the device changes no bit: losses, gradient norms, weights and state against those of a training
with its state on the device.

`python -m benchmarks.checks.offload_parity [--models gpt ...] [--layouts TP2+SP ...] [--every 80] [--json]
[--markdown]`

Tiny models in fp32, bf16 and fp16, with the first moment in fp32 or bf16, on one process and in layouts of two and four
ranks; most, some or none of the steps clipped; global batches of several micro-batches. Each of these trainings meets
every 80th way to keep its state elsewhere, in turns: tier, engine, early or waiting updates, size of buckets, and a
pace: free; eager, where early updates are over before the backward pass goes on; slow, where the link and the host are
held to a rate, so that a step's updates are not over when the next step begins. Every rank compares each step's
numbers, its weights and what it owns of the state bit by bit. A way that is to update early fails where no early update
was kept, or none dropped though steps were clipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.checks.layout_parity import LAYOUTS, Layout
from benchmarks.kit.tables import table
from configs.schema import Config
from tests import distributed
from tests.optim.offload import parity
from tests.optim.offload.parity import CLIPS, Variant

MODELS = {
    "gpt": ["experiment=gpt_tiny"],
    "gpt tied": ["experiment=gpt_tiny", "model.tie_embeddings=true"],
    "gpt moe": ["experiment=gpt_moe_tiny"],
    "bert": ["experiment=bert_tiny"],
    "bert moe": ["experiment=bert_moe_tiny"],
}
SINGLE = "single"
NAMES = (
    *(SINGLE, "DP2", "EP2", "TP2+SP", "PP2", "PP2xVPP2"),
    *("DP2xTP2+SP", "TP2+SPxPP2", "DP2xPP2xEP2", "DP2xPP2xVPP2xEP2", "TP2+SPxEP2xETP2"),
)
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("host", "disk", "auto")
ENGINES = ("device_stream", "host", "split")
MOMENTS = ("fp32", "bf16")
TIMEOUT = 600.0  # seconds for all ways of one training


@dataclass(frozen=True)
class Row:
    """One way to keep a training's state, on all ranks."""

    model: str
    layout: str
    precision: str
    clip: str
    moment: str
    variant: Variant
    tensors: int
    committed: int
    dropped: int
    clipped: int
    steps: int
    bucket_counts: tuple[int, ...]
    problems: list[str]


def config_of(model: str, layout: str, precision: str, moment: str) -> tuple[Config, int]:
    """A training's config with its state on the device, and its number of ranks."""
    laid = LAYOUTS.get(layout, Layout(1, ()))
    overrides = [*MODELS[model], *laid.overrides, f"optimizer.moment_dtype={moment}"]
    return parity.config_of(overrides, laid.ranks, precision), laid.ranks


def one(
    model: str,
    layout: str,
    precision: str,
    clip: str,
    variants: Sequence[Variant],
    steps: int,
    moment: str = "fp32",
    folder: str = "",
) -> list[Row]:
    """A training beside the same with its state in other places. `folder`: of a disk, for state there."""
    config, size = config_of(model, layout, precision, moment)
    ranks = distributed.run(parity.outcomes, size, config, clip, list(variants), steps, folder, timeout=TIMEOUT)
    return [
        Row(
            *(model, layout, precision, clip, moment, variant),
            tensors=sum(each.compared for each in found),
            committed=sum(each.committed for each in found),
            dropped=sum(each.dropped for each in found),
            clipped=found[0].clipped,
            steps=found[0].taken,
            bucket_counts=found[0].bucket_counts,
            problems=parity.problems(variant, clip, found),
        )
        for variant, *found in zip(variants, *ranks, strict=True)
    ]


def trainings(models: Sequence[str], layouts: Sequence[str]) -> list[tuple[str, str, str, str, str]]:
    """(model, layout, precision, clipping, first moment): what has a run of its own on the device."""
    axes = itertools.product(layouts, models, PRECISIONS)
    turns = itertools.cycle(itertools.product(MOMENTS, CLIPS))
    return [
        (model, layout, precision, clip, moment)
        for layout, model, precision in axes
        if layout == SINGLE or LAYOUTS[layout].fits(model)
        for moment, clip in [next(turns)]
    ]


def summary(results: Sequence[Row], markdown: bool) -> str:
    """A line for each layout and precision."""
    heads = ["layout", "precision", "models", "ways", "tensors compared", "early kept", "early dropped", "differ"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results:
        groups.setdefault((row.layout, row.precision), []).append(row)
    lines = [
        [
            *key,
            str(len({row.model for row in found})),
            *(str(number) for number in (len(found), *_sums(found), sum(bool(row.problems) for row in found))),
        ]
        for key, found in groups.items()
    ]
    return table(heads, lines, markdown)


def _sums(results: Sequence[Row]) -> tuple[int, int, int]:
    return sum(r.tensors for r in results), sum(r.committed for r in results), sum(r.dropped for r in results)


def _show(row: Row) -> None:
    about = f"{row.model} | {row.layout} | {row.precision}, exp_avg {row.moment} | {row.variant}"
    verdict = "; ".join(row.problems) or "same bits"
    print(f"{about:<95} clipped {row.clipped}/{row.steps} early {row.committed}+{row.dropped}  {verdict}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="all unless given")
    parser.add_argument("--layouts", nargs="+", choices=NAMES, default=list(NAMES), metavar="LAYOUT", help=str(NAMES))
    parser.add_argument("--every", type=int, default=80, help="of the ways to keep state, for each training")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--disk-dir", help="folder on a disk, for state there; one under the system's for temporary files"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    arguments = parser.parse_args()
    variants, results, begin = parity.variants(DEVICES, ENGINES), [], time.perf_counter()
    random.Random(1).shuffle(variants)  # so that each layout and precision meets all kinds
    with tempfile.TemporaryDirectory(dir=arguments.disk_dir) as folder:
        try:
            for i, training in enumerate(trainings(arguments.models, arguments.layouts)):
                model, layout, precision, clip, moment = training
                some = variants[i % arguments.every :: arguments.every]
                found = one(model, layout, precision, clip, some, arguments.steps, moment, folder) if some else []
                for row in found:
                    _show(row)
                results += found
        finally:
            distributed.shutdown()
    print(f"\n{summary(results, arguments.markdown)}\n")
    broken = sum(bool(row.problems) for row in results)
    minutes = (time.perf_counter() - begin) / 60
    print(
        f"{len(results) - broken} of {len(results)} ways have the bits of state on the device, in {minutes:.0f} minutes"
    )
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "rows": [_plain(row) for row in results]}))
    return 1 if broken else 0


def _plain(row: Row) -> dict[str, Any]:
    fields = {"places" if name == "bucket_counts" else name: value for name, value in vars(row).items()}
    return {**fields, "variant": vars(row.variant)}


if __name__ == "__main__":
    sys.exit(main())
