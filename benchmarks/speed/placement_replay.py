"""Evaluation of every planner of expert placement on recorded or synthetic routing counts, without training.

`python -m benchmarks.speed.placement_replay TRACE... [--planners solve,quota] [--ranks 8] [--slots 2] [--node 4]
[--markdown] [--json]`

TRACE is a file that `moe.placement.record` wrote, or a workload by name (benchmarks/kit/workloads.py): W0 to W7,
steady, zipf, drifting, bursty, jumping, the latter five also with the max/mean over ranks, as in drifting@2. A trace of
another number of ranks is split evenly.

For each planner: max/mean of assignments over ranks, mean over calls and worst call; replicas that a call computes
with; weights that are sent, by reason: a new replica, a replica that is stale after a step, again for the backward
pass; bytes of weights and token rows by link, in a node and between nodes; the share of assignments that another rank
computes; the predicted time over that of `static`, with the given costs; and the time to plan on this machine. Bytes
are MB per step over all ranks. Layers of a trace whose busiest expert has over 8 times the mean are shown separately.

A cost is in the time that an expert takes for one more assignment. Without costs planners balance, whatever it takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from base import command
from base.errors import ConfigError
from benchmarks.kit.tables import table
from benchmarks.kit.workloads import Size, counts, is_workload
from benchmarks.planners import PLANNERS
from benchmarks.planners.replay import Replay, Tally, correlation, spread
from moe.placement import trace
from moe.placement.quotas import Costs, ReplicaLimits
from moe.placement_map import Integers

COLLAPSED = 8  # times the mean, of a layer's busiest expert
STEPS = 12  # of a workload
AT_LEAST_ONE = ("ranks", "node", "steps", "experts", "top_k", "tokens", "micro_batches")
COLUMNS = {
    "max/mean": ("max_over_mean", "{:.3f}", 1.0),
    "worst": ("worst", "{:.2f}", 1.0),
    "copies": ("copies", "{:.1f}", 1.0),
    "new MB": ("first_bytes", "{:,.0f}", 1e-6),
    "refreshed": ("refresh_bytes", "{:,.0f}", 1e-6),
    "second": ("second_bytes", "{:,.0f}", 1e-6),
    "gradients": ("grad_bytes", "{:,.0f}", 1e-6),
    "in node": ("in_node_bytes", "{:,.0f}", 1e-6),
    "between": ("between_bytes", "{:,.0f}", 1e-6),
    "off rank": ("off_rank", "{:.1%}", 1.0),
    "time": ("predicted_time", "{:.3f}", 1.0),
    "plan ms": ("planning_ms", "{:.2f}", 1.0),
}


@dataclass
class Layer:
    """One layer of a trace: its calls through every planner."""

    replays: dict[str, Replay]
    totals: list[Integers] = field(default_factory=list)  # by call, of each expert

    def step(self, counts_MRE: Integers) -> None:
        self.totals.extend(counts_MRE.sum(1))
        for replay in self.replays.values():
            replay.step(counts_MRE)

    @property
    def collapsed(self) -> bool:
        return fmean(float(total.max()) / max(float(total.mean()), 1e-9) for total in self.totals) > COLLAPSED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="files, or workloads by name")
    parser.add_argument("--planners", help=f"of {', '.join(PLANNERS)}, with commas between; all")
    parser.add_argument("--ranks", type=int, help="of the expert parallel group; as in the trace, of a workload 4")
    parser.add_argument("--slots", type=int, default=2, help="copies that a rank may hold (2)")
    parser.add_argument("--node", type=int, help="ranks of a node; all")
    parser.add_argument("--steps", type=int, help=f"of a workload ({STEPS}), of a trace the first ones (all)")
    for name, default, what in (
        ("piece", 0, "cost of an expert with any assignments on a rank (0)"),
        ("copy", 0, "cost of a copy in a node (0)"),
        ("copy-between", 0, "cost of a copy between nodes (0)"),
        ("expert-bytes", 3 * 4096 * 1536 * 2, "weights of an expert (Qwen3-235B's in bf16)"),
        ("grad-bytes", 3 * 4096 * 1536 * 4, "its gradient (in fp32)"),
        ("row-bytes", 4096 * 2, "a row (of the same)"),
        ("experts", 32, "of a workload (32)"),
        ("top-k", 2, "of a workload (2)"),
        ("tokens", 1024, "of a rank in a micro-batch of a workload (1024)"),
        ("micro-batches", 8, "of a workload (8)"),
        ("seed", 0, "of a workload (0)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--copies-in-node", action="store_true", help="no copies between nodes")
    parser.add_argument("--markdown", action="store_true", help="tables for benchmarks/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    return command.run(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Prints a table for each trace, and one of their mean."""
    names = arguments.planners.split(",") if arguments.planners else list(PLANNERS)
    if unknown := [name for name in names if name not in PLANNERS]:
        raise ConfigError(f"--planners: there is no {unknown[0]}; there are {', '.join(PLANNERS)}")
    for option, value in vars(arguments).items():
        if type(value) is int and value < (low := int(option in AT_LEAST_ONE)):
            raise ConfigError(f"--{option.replace('_', '-')} ({value}) must be at least {low}")
    if arguments.top_k > arguments.experts:
        raise ConfigError(f"--top-k ({arguments.top_k}) must be at most --experts ({arguments.experts})")
    results = []
    for name in arguments.traces:
        for result in replayed(name, names, arguments):
            results.append(result)
            show(result, arguments.markdown)
    alike = [result for result in results if not result["collapsed"]]
    if len(alike) > 1:
        mean: dict[str, Any] = {"trace": f"mean of {len(alike)}", "collapsed": False}
        mean["planners"] = {name: mean_of([result["planners"][name] for result in alike]) for name in names}
        results.append(mean)
        show(mean, arguments.markdown)
    if arguments.json:
        print(json.dumps({"slots": arguments.slots, "node": arguments.node, "results": results}))


def replayed(name: str, planners: Sequence[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the result of each planner for a trace, and separately for its collapsed layers."""
    ranks, experts, top_k, steps = source(name, arguments)
    if experts % ranks:
        raise ConfigError(f"--ranks ({ranks}) must divide the {experts} experts of {name}")
    costs = Costs(arguments.piece, arguments.copy, None if arguments.copies_in_node else arguments.copy_between)
    limits = ReplicaLimits(arguments.slots, arguments.node or ranks)
    layers: list[Layer] = []
    number = micro_batches = 0
    for counts_LMRE in steps:
        number, micro_batches = number + 1, counts_LMRE.shape[1]
        if not layers:
            layers = [Layer({name: Replay(PLANNERS[name], costs, limits) for name in planners}) for _ in counts_LMRE]
        if len(counts_LMRE) != len(layers):
            raise ConfigError(
                f"{name}: a step has {len(counts_LMRE)} layers, and those before it {len(layers)}: the run went on in "
                f"another layout. Try --steps {number - 1}"
            )
        for layer, counts_MRE in zip(layers, counts_LMRE, strict=True):
            layer.step(np.stack([spread(counts_RE, ranks) for counts_RE in counts_MRE]))
    if not layers:
        raise ConfigError(f"{name} has no whole step")
    for collapsed in (False, True):
        if not (chosen := [layer for layer in layers if (layer.collapsed and not is_workload(name)) == collapsed]):
            continue
        alike = [value for layer in chosen if (value := correlation(layer.totals)) is not None]
        tallies = {planner: Tally() for planner in planners}
        for layer in chosen:
            for planner, replay in layer.replays.items():
                tallies[planner].add(replay.tally)
        yield {
            "trace": name,
            "collapsed": collapsed,
            "ranks": ranks,
            "experts": experts,
            "top_k": top_k,
            "layers": len(chosen),
            "steps": number,
            "micro_batches": micro_batches,
            "correlation": fmean(alike) if alike else None,
            "planners": {
                planner: tally.figures(number, arguments.expert_bytes, arguments.row_bytes, arguments.grad_bytes)
                for planner, tally in tallies.items()
            },
        }


def source(name: str, arguments: argparse.Namespace) -> tuple[int, int, int, Iterator[Integers]]:
    """Ranks, experts, top_k, and the counts of each step."""
    if is_workload(name):
        size = Size(
            ranks=4 if arguments.ranks is None else arguments.ranks,
            experts=arguments.experts,
            top_k=arguments.top_k,
            tokens=arguments.tokens,
            micro_batches=arguments.micro_batches,
            seed=arguments.seed,
        )
        number = STEPS if arguments.steps is None else arguments.steps
        return size.ranks, size.experts, size.top_k, counts(name, size, number)
    path = Path(name)
    header = trace.read_header(path)
    steps = islice((counts_LMRE for _, counts_LMRE in trace.read(path)), arguments.steps)
    ranks = header.num_ranks if arguments.ranks is None else arguments.ranks
    return ranks, header.num_experts, header.top_k, steps


def mean_of(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several traces; of the worst calls the worst."""
    return {name: (max if name == "worst" else fmean)([each[name] for each in figures]) for name in figures[0]}


def show(result: dict[str, Any], markdown: bool) -> None:
    print(("## " if markdown else "") + heading(result) + "\n")
    table_rows = [
        [name, *(form.format(figures[key] * unit) for key, form, unit in COLUMNS.values())]
        for name, figures in result["planners"].items()
    ]
    print(table(["planner", *COLUMNS], table_rows, markdown) + "\n")


def heading(result: dict[str, Any]) -> str:
    """What the calls are of, in a line."""
    if "ranks" not in result:
        return result["trace"]
    alike = result["correlation"]
    return (
        f"{result['trace']}{', collapsed layers' if result['collapsed'] else ''}: {result['ranks']} ranks, "
        f"{result['experts']} experts, top {result['top_k']}, layers: {result['layers']}, steps: {result['steps']}, "
        f"micro-batches: {result['micro_batches']}, correlation: {'none' if alike is None else format(alike, '.2f')}"
    )


if __name__ == "__main__":
    sys.exit(main())
