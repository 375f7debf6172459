"""Plans of every planner of expert placement at the sizes of clusters, simulated: balance, replicas, predicted time.

`python -m benchmarks.speed.placement_plans [--seeds 3] [--ranks 64] [--markdown] [--json]`

256 experts on 8, 64 and 256 ranks and 1,024 on 1,024, two replica slots per rank, in one domain; then 64 ranks in
domains of 8 without replicas between them. Primaries are in order. Counts are those of `steady@1.5`, `@2` and `@3`
(benchmarks/kit/workloads.py): 8,192 tokens a rank, top 8.

Each case runs twice: with replicas that cost nothing, where only balance counts, and with the costs assumed for a GPU
(`moe.placement.policy`), where the time of the busiest rank counts. Columns per planner, over the seeds:

* max/mean of assignments over ranks, mean and worst; replicas; fan-out: the most replicas that one rank sends;
* time: predicted time of the busiest rank over that of `static`;
* again: the next micro-batch of the same popularity, in which a planner with memory has the replicas of the first one:
  new replicas, and the time with them.

Within domains of 8 no planner can go below the busiest domain, whose max/mean stands in the heading. Left out are
`moonep` there, since it copies between domains all the same, and at 1,024 ranks `flex` and `eplb`, which take seconds
for a call there. So the last tables compare times with those of `solve` in the same settings.

Last, how long `solve` takes for a call at 64 ranks on one core: the first, and where nothing has changed since. A time
is the least of ten calls, which depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from base import command
from base.errors import ConfigError
from benchmarks.kit.tables import table
from benchmarks.kit.workloads import Size, counts
from benchmarks.planners import PLANNERS, Entry, static
from moe.placement.planners.solve import solve
from moe.placement.policy import ASSUMED
from moe.placement.quotas import Costs, ReplicaLimits, check, held, outcome
from moe.placement_map import Integers, PlacementMap

RATIOS = ("1.5", "2", "3")
REPLICA_SLOTS, TOKENS, TOP_K = 2, 8192, 8
RANKS = {"flex": 256, "eplb": 256}  # at most
CALLS = 10  # of which the fastest counts
GPU = ASSUMED["cuda"].of_call(trains=True)
BALANCE, GPU_COSTS = "balance", "a GPU's costs"
COLUMNS = {
    "max/mean": ("imbalance", "{:.3f}"),
    "worst": ("worst", "{:.3f}"),
    "copies": ("copies", "{:,.1f}"),
    "fan-out": ("fan_out", "{:.1f}"),
    "time": ("time", "{:.3f}"),
    "again: new": ("again_copies", "{:,.1f}"),
    "again: time": ("again_time", "{:.3f}"),
}


@dataclass(frozen=True)
class Setting:
    """Ranks and experts, and what planners reckon with."""

    ranks: int
    experts: int
    domain: int
    costs: Costs
    words: str  # of the costs

    @property
    def domains(self) -> str:
        return "one domain" if self.domain == self.ranks else f"domains of {self.domain}"

    def is_asked(self, name: str) -> bool:
        """Whether a planner takes part."""
        return self.ranks <= RANKS.get(name, self.ranks) and (name != "moonep" or self.domain == self.ranks)


SIZES = ((8, 256), (64, 256), (256, 256), (1024, 1024))
SETTINGS = (
    *(Setting(ranks, experts, ranks, Costs(), BALANCE) for ranks, experts in SIZES),
    *(Setting(ranks, experts, ranks, GPU, GPU_COSTS) for ranks, experts in SIZES),
    Setting(64, 256, 8, Costs(replica_between=None), BALANCE),
    Setting(64, 256, 8, Costs(GPU.expert_overhead, GPU.replica_in_node, None), GPU_COSTS),
)


def calls(setting: Setting, ratio: str, seed: int) -> Integers:
    """[2, R, E]: two micro-batches of one popularity."""
    size = Size(setting.ranks, setting.experts, TOP_K, TOKENS, 2, seed)
    return next(iter(counts(f"steady@{ratio}", size, 1)))[0]


def planned(entry: Entry, setting: Setting, counts_MRE: Integers) -> dict[str, float]:
    """What a planner makes of two calls."""
    placement, limits = PlacementMap(setting.experts, setting.ranks), ReplicaLimits(REPLICA_SLOTS, setting.domain)
    result: dict[str, float] = {}
    for when, counts_RE in zip(("", "again_"), counts_MRE, strict=True):
        start = time.perf_counter()
        quotas_ER = entry.plan(counts_RE, placement, setting.costs, limits)
        result[when + "planning"] = time.perf_counter() - start
        check(
            quotas_ER,
            counts_RE,
            placement,
            ReplicaLimits(placement.num_expert_slots if entry.own_slots else REPLICA_SLOTS, setting.domain),
        )
        found = outcome(quotas_ER, placement, setting.costs, limits)
        at_primaries = outcome(static(counts_RE, placement, setting.costs, limits), placement, setting.costs, limits)
        new = np.nonzero((quotas_ER > 0) & ~held(placement))
        fan_out = np.bincount(placement.primary_ranks[new[0]], minlength=setting.ranks).max()
        result[when + "imbalance"], result[when + "time"] = found.imbalance, found.seconds / at_primaries.seconds
        result[when + "copies"], result[when + "fan_out"] = found.new_replicas, int(fan_out)
        if entry.keeps:
            replicas = tuple((int(expert), int(rank)) for expert, rank in zip(*new, strict=True))
            placement = PlacementMap(setting.experts, setting.ranks, replicas=replicas)
    return result


def planning(seeds: int) -> list[dict[str, Any]]:
    """By load: milliseconds that `solve` takes for a first call, and with its copies for the same one, the median of
    the seeds."""
    results: list[dict[str, Any]] = []
    for words, costs in ((BALANCE, Costs()), (GPU_COSTS, GPU)):
        setting, limits, unplaced = (
            Setting(64, 256, 64, costs, words),
            ReplicaLimits(REPLICA_SLOTS, 64),
            PlacementMap(256, 64),
        )
        for ratio in RATIOS:
            times: tuple[list[float], list[float]] = ([], [])
            for seed in range(seeds):
                counts_RE, placement = calls(setting, ratio, seed)[0], unplaced
                for of_call in times:
                    of_call.append(least_time(counts_RE, placement, costs, limits))
                    new = np.nonzero((solve(counts_RE, placement, costs, limits) > 0) & ~held(placement))
                    replicas = tuple((int(expert), int(rank)) for expert, rank in zip(*new, strict=True))
                    placement = PlacementMap(256, 64, replicas=placement.replicas + replicas)
            first, unchanged = (1e3 * median(of_call) for of_call in times)
            results.append({"costs": words, "ratio": ratio, "first_ms": first, "unchanged_ms": unchanged})
    return results


def least_time(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> float:
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        solve(counts_RE, placement, costs, limits)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, help="only the settings with so many ranks; all")
    parser.add_argument("--markdown", action="store_true", help="tables for benchmarks/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    return command.run(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Prints a table for each setting and load, one for each kind of setting, and one of planning times."""
    if arguments.seeds < 1:
        raise ConfigError(f"--seeds ({arguments.seeds}) must be at least 1")
    settings = [setting for setting in SETTINGS if arguments.ranks in (None, setting.ranks)]
    if not settings:
        raise ConfigError(f"--ranks ({arguments.ranks}) must be one of {', '.join(str(ranks) for ranks, _ in SIZES)}")
    results = []
    for setting in settings:
        for ratio in RATIOS:
            cases = [calls(setting, ratio, seed) for seed in range(arguments.seeds)]
            planners = {
                name: mean_of([planned(entry, setting, case) for case in cases])
                for name, entry in PLANNERS.items()
                if setting.is_asked(name)
            }
            floor = fmean(busiest_domain(case[0], setting) for case in cases)
            sizes = {"ranks": setting.ranks, "experts": setting.experts, "domains": setting.domains}
            results.append({**sizes, "costs": setting.words, "ratio": ratio, "floor": floor, "planners": planners})
            show(results[-1], arguments.markdown)
    for kind in dict.fromkeys((setting.domains, setting.words) for setting in settings):
        show_all(kind, [r for r in results if (r["domains"], r["costs"]) == kind], arguments.markdown)
    times = planning(arguments.seeds)
    print(("## " if arguments.markdown else "") + "solve's planning time, 64 ranks, 256 experts, one core\n")
    table_rows = [[t["costs"], t["ratio"], f"{t['first_ms']:.2f}", f"{t['unchanged_ms']:.2f}"] for t in times]
    print(table(["costs", "max/mean", "first call, ms", "nothing changed, ms"], table_rows, arguments.markdown))
    if arguments.json:
        print(json.dumps({"slots": REPLICA_SLOTS, "results": results, "planning": times}))


def busiest_domain(counts_RE: Integers, setting: Setting) -> float:
    """Assignments of the domain with the most by the mean one."""
    loads = counts_RE.sum(0).reshape(setting.ranks // setting.domain, -1).sum(1)
    return float(loads.max() / loads.mean())


def mean_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the seeds, and the worst imbalance."""
    means = {name: fmean(each[name] for each in found) for name in found[0]}
    return {**means, "worst": max(each["imbalance"] for each in found)}


def show(result: dict[str, Any], markdown: bool) -> None:
    domains = result["domains"]
    if domains != "one domain":
        domains += f", the busiest {result['floor']:.3f}"
    sizes = f"{result['ranks']:,} ranks, {result['experts']:,} experts, {domains}"
    print(f"{'## ' if markdown else ''}{sizes}, max/mean {result['ratio']}, {result['costs']}\n")
    table_rows = [
        [name, *(form.format(found[key]) for key, form in COLUMNS.values())]
        for name, found in result["planners"].items()
    ]
    print(table(["planner", *COLUMNS], table_rows, markdown) + "\n")


def show_all(kind: tuple[str, str], results: Sequence[dict[str, Any]], markdown: bool) -> None:
    """Of each planner, over the settings of a kind in which it takes part."""
    print(f"{'## ' if markdown else ''}All in {kind[0]}, {kind[1]}\n")
    table_rows = []
    for name in PLANNERS:
        if both := [(r["planners"][name], r["planners"]["solve"]) for r in results if name in r["planners"]]:
            balance = f"{fmean(own['imbalance'] for own, _ in both):.3f}", f"{max(own['worst'] for own, _ in both):.3f}"
            times = [f"{fmean(own[key] / ours[key] for own, ours in both):.3f}" for key in ("time", "again_time")]
            table_rows.append([name, str(len(both)), *balance, *times])
    headings = ["planner", "settings", "max/mean", "worst", "time by solve's", "again: time by solve's"]
    print(table(headings, table_rows, markdown) + "\n")


if __name__ == "__main__":
    sys.exit(main())
