"""Regret of the planner's numbers of chunks against the measured best, over layers with different best numbers.

`python -m benchmarks.speed.planner_pick --out FILE [--part 1/4] [--rounds 7] [--quick]`, then `... --summary FILE
[--json] [--markdown]`

Each layer runs on an emulated cluster, in earnest (2 ranks) or with a virtual accelerator (2 and 4 ranks). Costs are
measured as training does, and the planner picks a number of chunks for each pass among 1, 2, 4 and 8. Then every number
is measured, for the backward pass with the weight gradients at once and one chunk later, and the pick itself, in rounds
that take turns; also what is chosen after a trial of the best few, as in a training's first steps. A round has some
steps of each, and candidates far from the fastest are dropped after the first rounds: on a shared machine, regrets over
ten steps have an error of 2%, and differences of 3% must be resolved. Each pass has a number of its own, so a layer's
passes are two cases. `--part` appends its layers to FILE, one JSON object per line; the summary uses the last of each.

Regret of a pick: the median over rounds of its time over that of the fastest candidate, minus 1. Policies to compare
with: the same number for every case, with the weight lag that the planner picks for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from benchmarks.kit import layer_step, link, rounds
from benchmarks.kit.accelerator import step_flops
from benchmarks.kit.cluster import UNCAPPED, Cluster, ClusterError
from benchmarks.kit.layer_step import Case
from benchmarks.kit.tables import table
from benchmarks.speed.pipeline_degree import tried
from moe.chunk_plan import STORED_LOAD, Plan
from moe.planning.costs import Limits
from moe.planning.layer_measurement import BUDGET
from moe.planning.planner import Planner, best_plan, predict, weight_lags

DEGREES = (1, 2, 4, 8)
PASSES = ("forward", "backward")
CLOSE = 0.03  # regret that counts as right
STEPS = 3  # of a plan in a round
LIMITS = Limits(degrees=DEGREES, backward_degrees=DEGREES, strategies=("keep",))


@dataclass(frozen=True)
class Layer:
    """A layer and its cluster. `compute_ms` is what both passes' experts take on a virtual accelerator; None: they
    compute."""

    ranks: int
    rate: str
    tokens: int
    hidden: int
    width: int
    top_k: int
    experts_per_rank: int
    compute_ms: float | None = None

    def case(self) -> Case:
        """For benchmarks.kit.layer_step."""
        case = Case(self.tokens, self.hidden, self.width, self.top_k, self.experts_per_rank)
        if self.compute_ms is None:
            return case
        return replace(
            case, flops_per_second=step_flops(self.tokens * self.top_k, self.hidden, self.width) / self.compute_ms * 1e3
        )

    def in_words(self) -> str:
        """Tokens x hidden x width and the rest, and how it computes."""
        kind = "real" if self.compute_ms is None else f"virtual {self.compute_ms:g} ms"
        return f"{self.tokens}x{self.hidden}x{self.width} top {self.top_k}, {self.experts_per_rank} exp, {kind}"


# Passes of 20 to 150 ms, in which a number of chunks makes a difference that can be measured. One chunk is best where
# the link is fast, or where experts are many and get few tokens; more, the more there is to hide and the less a chunk
# costs.
LAYERS = (
    Layer(2, UNCAPPED, 1024, 512, 512, 2, 8),
    Layer(2, UNCAPPED, 512, 512, 1024, 2, 8),
    Layer(2, UNCAPPED, 1024, 1024, 512, 1, 4),
    Layer(2, UNCAPPED, 2048, 256, 512, 2, 16),
    Layer(2, UNCAPPED, 512, 1024, 1024, 1, 4),
    Layer(2, "1gbit", 256, 512, 1024, 2, 16),
    Layer(2, "1gbit", 512, 512, 512, 2, 16),
    Layer(2, "1gbit", 1024, 256, 1024, 1, 16),
    Layer(2, "1gbit", 1024, 512, 512, 2, 8),
    Layer(2, "1gbit", 1024, 1024, 256, 2, 2),
    Layer(2, "1gbit", 2048, 512, 512, 1, 4),
    Layer(2, "1gbit", 1024, 512, 256, 2, 1, 120),
    Layer(2, "1gbit", 1024, 1024, 512, 2, 1, 220),
    Layer(2, "1gbit", 2048, 1024, 512, 2, 1, 440),
    Layer(2, "1gbit", 512, 512, 1024, 2, 2, 90),
    Layer(2, "500mbit", 256, 512, 1024, 2, 8),
    Layer(2, "500mbit", 512, 512, 512, 1, 16),
    Layer(2, "500mbit", 512, 512, 512, 2, 16),
    Layer(2, "500mbit", 512, 1024, 256, 2, 8),
    Layer(2, "500mbit", 1024, 512, 256, 2, 4),
    Layer(2, "500mbit", 1024, 512, 1024, 2, 1),
    Layer(2, "500mbit", 2048, 256, 512, 2, 4),
    Layer(2, "500mbit", 2048, 512, 512, 1, 1, 240),
    Layer(2, "500mbit", 1024, 1024, 512, 2, 1, 440),
    Layer(2, "500mbit", 512, 1024, 512, 2, 2, 200),
    Layer(2, "200mbit", 256, 512, 512, 2, 8),
    Layer(2, "200mbit", 256, 512, 512, 2, 16),
    Layer(2, "200mbit", 256, 1024, 512, 1, 8),
    Layer(2, "200mbit", 512, 512, 512, 1, 16),
    Layer(2, "200mbit", 512, 512, 1024, 2, 2),
    Layer(2, "200mbit", 512, 512, 256, 2, 1, 180),
    Layer(4, UNCAPPED, 2048, 512, 512, 2, 1, 60),
    Layer(4, UNCAPPED, 2048, 1024, 512, 1, 1, 90),
    Layer(4, UNCAPPED, 1024, 1024, 256, 2, 2, 120),
    Layer(4, "1gbit", 512, 1024, 512, 2, 1, 100),
    Layer(4, "1gbit", 1024, 512, 256, 1, 2, 60),
    Layer(4, "1gbit", 1024, 1024, 512, 2, 1, 220),
    Layer(4, "500mbit", 512, 512, 512, 2, 2, 90),
    Layer(4, "500mbit", 1024, 512, 512, 2, 1, 240),
    Layer(4, "500mbit", 1024, 1024, 512, 2, 1, 480),
)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def measure(cluster: Cluster, layer: Layer, num_rounds: int, budget: float) -> dict[str, Any]:
    """A layer's record: what the planner knew, predicted and picked, and the seconds of every candidate in every
    round."""
    case = layer.case()
    cluster.call(layer_step.build, case)
    known, load = cluster.call(layer_step.costs, budget)[0], layer_step.load(case, cluster.world_size)
    # The planner's pick where both passes have the same number, for its lag; and its own.
    fixed = [best_plan(known, load, replace(LIMITS, degrees=(r,), backward_degrees=(r,))).plan for r in DEGREES]
    planner = Planner(known, LIMITS)
    pick, chosen = planner.decide(load).plan, tried(cluster, planner, load)
    plans = [Plan(r, r, "keep", lag) for r in DEGREES for lag in weight_lags(r) if lag <= 1]
    plans += [plan for plan in dict.fromkeys([*fixed, pick, chosen]) if plan not in plans]
    names = {f"{plan.degree},{plan.backward_degree},{plan.weight_lag}": plan for plan in plans}
    variants = {name: (plan, STEPS) for name, plan in names.items()}
    picked = {name for name, plan in names.items() if plan in (pick, chosen)}
    result = rounds.measure_contenders(
        cluster, layer_step.step, variants, num_rounds, lambda first: contenders(first.seconds) | picked
    )
    return {
        "layer": asdict(layer),
        "costs": known.as_dict(),
        "load": {STORED_LOAD.get(key, key): each for key, each in asdict(load).items()},
        "plans": [
            {
                "plan": asdict(plan),
                "predicted": asdict(predict(known, load, plan)),
                "seconds": {pass_name: result.seconds[name][pass_name] for pass_name in PASSES},
            }
            for name, plan in names.items()
        ],
        "fixed": [asdict(plan) for plan in fixed],
        "pick": asdict(pick),
        "chosen": asdict(chosen),
        "rounds_dropped": result.num_dropped,
    }


def contenders(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> set[str]:
    """Names of the plans that may be the fastest in a pass or in both together, by the seconds of each pass in each
    round."""
    names: set[str] = set()
    for pass_names in (PASSES[:1], PASSES[1:], PASSES):
        medians = {name: statistics.median(_sums(of_plan, pass_names)) for name, of_plan in seconds.items()}
        names |= {name for name, median in medians.items() if median <= (1 + rounds.CONTENDS) * min(medians.values())}
    return names


def records(layers: Sequence[Layer], num_rounds: int, budget: float) -> Iterator[dict[str, Any]]:
    """Measure the layers, one cluster for all that follow one another on the same."""
    for (ranks, rate), of_cluster in groupby(layers, key=lambda layer: (layer.ranks, layer.rate)):
        with Cluster(ranks, rate) as cluster:
            bits_per_second = link.measured_rate(cluster)
            for layer in of_cluster:
                yield {**measure(cluster, layer, num_rounds, budget), "link_bits_per_second": bits_per_second}


# ---------------------------------------------------------------------------------------------------------------------
# Judging
# ---------------------------------------------------------------------------------------------------------------------


def regret(seconds: Sequence[float], fastest: Sequence[float]) -> float:
    """From one time per round of each, over the rounds that both ran in: the first ones."""
    return statistics.median(own / best for own, best in zip(seconds, fastest)) - 1


@dataclass(frozen=True)
class Grade:
    """One pass of one layer. `seconds` and `predicted` are by number of chunks, with the planner's lag; `regrets`
    too."""

    layer: Layer
    pass_name: str
    best: int
    pick: int
    regret: float
    regrets: dict[int, float]
    seconds: dict[int, float]
    predicted: dict[int, float]


def grade(record: dict[str, Any], which: str = "pick") -> list[Grade]:
    """Both passes of a layer: the planner's "pick", or what was "chosen" after a trial."""
    return [_grade_pass(record, pass_name, Plan(**record[which])) for pass_name in PASSES]


def _grade_pass(record: dict[str, Any], pass_name: str, pick: Plan) -> Grade:
    forward = pass_name == "forward"
    times: dict[tuple[int, int], list[list[float]]] = {}
    predicted = {}
    for entry in record["plans"]:
        plan = Plan(**entry["plan"])
        if plan.degree == plan.backward_degree:
            key = _key(plan, forward)
            times.setdefault(key, []).append(entry["seconds"][pass_name])
            predicted[key] = entry["predicted"][pass_name]
        if plan == pick:
            of_pick = entry["seconds"][pass_name]
    # The forward pass is the same whatever the lag: it has run several times in each round.
    seconds = {
        key: [statistics.fmean(filter(None, of_round)) for of_round in zip_longest(*lists)]
        for key, lists in times.items()
    }
    fixed = {plan.degree: _key(plan, forward) for plan in (Plan(**values) for values in record["fixed"])}
    fastest = min(seconds, key=lambda key: statistics.median(seconds[key]))
    # else it takes a little longer to prepare two kinds of chunks, which counts
    if pick.degree == pick.backward_degree:
        of_pick = seconds[_key(pick, forward)]
    return Grade(
        layer=Layer(**record["layer"]),
        pass_name=pass_name,
        best=fastest[0],
        pick=pick.degree if forward else pick.backward_degree,
        regret=max(0.0, regret(of_pick, seconds[fastest])),
        regrets={degree: max(0.0, regret(seconds[key], seconds[fastest])) for degree, key in fixed.items()},
        seconds={degree: statistics.median(seconds[key]) for degree, key in fixed.items()},
        predicted={degree: predicted[key] for degree, key in fixed.items()},
    )


def _key(plan: Plan, forward: bool) -> tuple[int, int]:
    return (plan.degree, 0) if forward else (plan.backward_degree, plan.weight_lag)


def whole_step_regret(record: dict[str, Any], which: str) -> float:
    """Of both passes together, against the fastest plan measured."""
    seconds = {Plan(**entry["plan"]): _sums(entry["seconds"]) for entry in record["plans"]}
    fastest = min(seconds.values(), key=statistics.median)
    return max(0.0, regret(seconds[Plan(**record[which])], fastest))


def _sums(seconds: Mapping[str, Sequence[float]], pass_names: Sequence[str] = PASSES) -> list[float]:
    return [sum(passes) for passes in zip(*(seconds[pass_name] for pass_name in pass_names), strict=True)]


def totals(cases: Sequence[Grade]) -> dict[str, Any]:
    """What all cases come to. Raises ValueError without any."""
    if not cases:
        raise ValueError("there are no cases to sum up; try --out FILE first, for every part")
    constants = {degree: statistics.fmean(case.regrets[degree] for case in cases) for degree in DEGREES}
    best = min(constants, key=lambda degree: constants[degree])
    mean = statistics.fmean(case.regret for case in cases)
    best_counts, pick_counts = Counter(case.best for case in cases), Counter(case.pick for case in cases)
    return {
        "cases": len(cases),
        "virtual_cases": sum(case.layer.compute_ms is not None for case in cases),
        "best_is": {degree: best_counts[degree] for degree in DEGREES},
        "pick_is": {degree: pick_counts[degree] for degree in DEGREES},
        "same_as_best": sum(case.pick == case.best for case in cases) / len(cases),
        "within_3_percent": sum(case.regret <= CLOSE for case in cases) / len(cases),
        "constant_within_3_percent": {
            degree: sum(case.regrets[degree] <= CLOSE for case in cases) / len(cases) for degree in DEGREES
        },
        "mean_regret": mean,
        "worst_regret": max(case.regret for case in cases),
        "constant_mean_regret": constants,
        "best_constant": best,
        "regret_by_best_constant": mean / constants[best] if constants[best] > 0 else float("inf"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Printing
# ---------------------------------------------------------------------------------------------------------------------


def cases_table(found: Sequence[dict[str, Any]], markdown: bool) -> str:
    """All cases, the largest regret after a trial first; milliseconds measured / predicted."""
    headings = (
        "ranks",
        "link",
        "layer",
        "pass",
        "best r",
        "pick",
        "regret",
        "tried",
        "regret",
        *(f"r={r}: ms / predicted" for r in DEGREES),
    )
    pairs = [pair for record in found for pair in zip(grade(record), grade(record, "chosen"), strict=True)]
    table_rows = [
        [
            str(pick.layer.ranks),
            pick.layer.rate,
            pick.layer.in_words(),
            pick.pass_name,
            str(pick.best),
            str(pick.pick),
            f"{pick.regret:.1%}",
            str(chosen.pick),
            f"{chosen.regret:.1%}",
            *(f"{pick.seconds[degree] * 1e3:.1f} / {pick.predicted[degree] * 1e3:.1f}" for degree in DEGREES),
        ]
        for pick, chosen in sorted(pairs, key=lambda pair: -pair[1].regret)
    ]
    return table(headings, table_rows, markdown)


def totals_text(sums: dict[str, Any], after_trial: dict[str, Any], markdown: bool) -> str:
    """The totals in words and a table of policies."""
    num_layers = sums["cases"] // len(PASSES)
    ours = {"planner": sums, "planner, after a trial of its best": after_trial}
    table_rows = [
        [name, f"{each['within_3_percent']:.0%}", f"{each['mean_regret']:.2%}"] for name, each in ours.items()
    ]
    table_rows += [
        [f"always r={r}", f"{sums['constant_within_3_percent'][r]:.0%}", f"{sums['constant_mean_regret'][r]:.2%}"]
        for r in DEGREES
    ]
    counts = _counts(sums["best_is"])
    lines = [
        f"{sums['cases']} cases: both passes of {num_layers} layers; {sums['virtual_cases']} of them with a virtual "
        "accelerator.",
        f"Measured best: {counts}.",
    ]
    for name, each in ours.items():
        lines.append(
            f"{name.capitalize()}: {_counts(each['pick_is'])}; the best one itself in {each['same_as_best']:.0%}. Mean "
            f"regret {each['mean_regret']:.2%} (worst {each['worst_regret']:.1%}), "
            f"{each['regret_by_best_constant']:.2f} times that of the best constant policy (r={each['best_constant']})."
        )
    return "\n".join([*lines, "", table(("policy", "within 3% of the best", "mean regret"), table_rows, markdown)])


def _counts(of_degrees: dict[int, int]) -> str:
    return ", ".join(f"{of_degrees[degree]} at r={degree}" for degree in DEGREES)


def read(path: Path) -> list[dict[str, Any]]:
    """A file's records, the last of each layer."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found[Layer(**record["layer"])] = record
    return list(found.values())


def _shard(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: a part and the number of parts, such as 1/4")
    return int(first), int(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--out", type=Path, help="file to which each layer's record is appended")
    parser.add_argument("--summary", type=Path, help="print the totals of such a file instead of measuring")
    parser.add_argument("--part", type=_shard, default=(1, 1), help="i/n: the i-th of n parts of the layers")
    parser.add_argument(
        "--rounds", type=int, default=7, help=f"of plans near the fastest; the others leave after {rounds.FOR_ALL}"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for measuring a layer's costs")
    parser.add_argument("--quick", action="store_true", help="two layers and two rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    shard, num_shards = arguments.part
    layers = LAYERS[(shard - 1) * len(LAYERS) // num_shards : shard * len(LAYERS) // num_shards]
    if arguments.quick:
        layers, arguments.rounds, arguments.budget = (LAYERS[3], LAYERS[10]), 2, 2.0
    found: list[dict[str, Any]] = []
    try:
        if arguments.summary is not None:
            found = read(arguments.summary)
        else:
            for record in records(layers, arguments.rounds, arguments.budget):
                found.append(record)
                if arguments.out is not None:
                    with arguments.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
                if not arguments.json:
                    print(cases_table([record], arguments.markdown), flush=True)
        cases = [case for record in found for case in grade(record)]
        sums, after_trial = totals(cases), totals([case for record in found for case in grade(record, "chosen")])
    except (OSError, ValueError, RuntimeError, ClusterError) as error:
        print(f"planner_pick: {error}", file=sys.stderr)
        return 1
    whole_steps = {which: [whole_step_regret(record, which) for record in found] for which in ("pick", "chosen")}
    if arguments.json:
        result = {
            "totals": sums,
            "after_trial": after_trial,
            "whole_step_regrets": whole_steps,
            "cases": [
                {"part" if key == "pass_name" else key: each for key, each in asdict(case).items()} for case in cases
            ],
        }
        print(json.dumps(result))
    else:
        print(f"\n{totals_text(sums, after_trial, arguments.markdown)}\n")
        for name, which in (("the planner's pick", "pick"), ("what a trial of its best chose", "chosen")):
            regrets = whole_steps[which]
            within = sum(each <= CLOSE for each in regrets) / len(regrets)
            print(
                f"Whole steps, {name}: within 3% in {within:.0%}, mean regret {statistics.fmean(regrets):.2%}, worst "
                f"{max(regrets):.1%}.\n"
            )
        if arguments.summary is not None:
            print(cases_table(found, arguments.markdown))
    return 0


if __name__ == "__main__":
    from benchmarks.speed import planner_pick  # under the name by which ranks find its functions

    sys.exit(planner_pick.main())
