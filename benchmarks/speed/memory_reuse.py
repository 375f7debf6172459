"""Memory and time of the MoE layer's memory strategies, and the planner's picks within a budget.

`python -m benchmarks.speed.memory_reuse [--layers 1gbit:1 500mbit:2 200mbit:4] [--rounds 7] [--budgets 16] [--quick]
[--json] [--markdown]`

Two ranks on an emulated cluster compute in earnest. A layer is a link's rate and its communication by computation.
Memory is exact: PyTorch's memory tracker counts every tensor from the start of the forward to the end of the backward
pass, without the layer's input, weights and their gradients; the largest over the ranks. Time is that of both passes,
in rounds that take turns; after the first rounds only the baseline, the picks and what may be the fastest within some
budget go on.

The baseline keeps everything in one chunk. Then the budget falls from what the largest plan needs to what the smallest
does: the planner's pick, from its own measured costs and a trial of its best few plans, as in the first steps of a
training of four such layers. Then it runs against the fastest measured plan that fits, in rounds of these two alone
(the median over rounds of one round's ratio); right is within 2% of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

import parallel  # noqa: F401  before Megatron-core, which warns of what is not installed
from benchmarks.kit import layer_step, link, rounds
from benchmarks.kit.cluster import Cluster, ClusterError, parse_rate
from benchmarks.kit.layer_step import Case
from benchmarks.kit.tables import table
from benchmarks.speed.pipeline_degree import HIDDEN, TOKENS, make_case, tried
from memory.pool import WORKSPACE
from moe.chunk_plan import LayerLoad, Plan
from moe.planning.costs import LayerCosts, Limits
from moe.planning.planner import Planner, best_plan, predict

BASELINE = Plan()
# On a host there is no other memory to offload to.
STRATEGIES = ("keep", "recompute", "communicate", "communicate_recompute")
DEGREES = (1, 2, 4, 8)
LAYERS = 4  # alike, of the training whose first steps try plans: as many as the smallest MoE presets have
STEPS = 3  # of a plan in a round
QUICK_TOKENS = 1024
DUEL = 3  # rounds of a pick and its rival, for each one of all plans
SAME = 1.02  # times within this factor cannot be told apart
MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------------
# On the ranks
# ---------------------------------------------------------------------------------------------------------------------


def peak_bytes(plan: Plan) -> int:
    """Return the most bytes of tensors at once during a step of this rank's layer, beyond its inputs, weights and their
    gradients."""
    layer = layer_step._layer
    assert layer is not None
    layer.clear()
    weights = (layer.weights.fc1, layer.weights.fc2)
    return tracked_peak(
        lambda: layer.forward(plan), layer.output_grad, (layer.x, layer.probs, layer.routing_map), weights
    )


def tracked_peak(
    forward: Callable[[], torch.Tensor],
    output_grad: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> int:
    """Return the most bytes of tensors at once during any step; the tensors have no gradients yet. What the forward
    pass returns is not its own afterwards."""
    from torch.distributed._tools.mem_tracker import MemTracker

    device, tracker = output_grad.device, MemTracker()
    tracker.track_external(*inputs, output_grad, *weights)

    def count(which: str) -> int:
        return tracker.get_tracker_snapshot(which)[device]["Total"]

    # what is given back is gone, as with a GPU's allocator, so that live memory is what is counted
    WORKSPACE.pooled = False
    try:
        with tracker:
            before = count("current")
            output = forward()
            peak_of_forward = count("peak") - before
            edge = torch.autograd.graph.get_gradient_edge(output)
            del output  # the next layer has it
            torch.autograd.backward(edge, output_grad)
            peak = count("peak") - before
    finally:
        WORKSPACE.pooled = True
    # Only the backward pass has made the weights' gradients.
    return max(peak_of_forward, peak - sum(weight.numel() * weight.element_size() for weight in weights))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def _grid() -> list[Plan]:
    plans = []
    for strategy in STRATEGIES:
        for degree in DEGREES:
            plans += [Plan(degree, degree, strategy, lag) for lag in sorted({0, min(1, degree - 1)})]
    return plans


def _key(plan: Plan) -> str:
    return f"{plan.memory_strategy} r={plan.degree},{plan.backward_degree} lag {plan.weight_lag}"


def measure(cluster: Cluster, case: Case, num_rounds: int, num_budgets: int) -> dict[str, Any]:
    """Measure memory and time of all plans on one layer, and the planner's picks under falling budgets."""
    cluster.call(layer_step.build, case)
    costs, load = cluster.call(layer_step.costs)[0], layer_step.load(case, cluster.world_size)
    limits = Limits(degrees=DEGREES, backward_degrees=DEGREES, strategies=STRATEGIES)
    memory = {_key(plan): max(cluster.call(peak_bytes, plan)) for plan in _grid()}
    budgets = _falling(max(memory.values()), min(memory.values()), num_budgets)
    picks: list[tuple[int, Plan]] = []
    for budget in budgets:
        planner = Planner(costs, replace(limits, memory_budget=budget))
        try:
            planner.decide(load)
        except ValueError:
            continue  # what the planner counts is a little more than the leanest plan needs
        picks.append((budget, tried(cluster, planner, load, LAYERS, LAYERS)))  # a budget takes a minute
    plans = {_key(plan): plan for plan in [*_grid(), *(plan for _, plan in picks)]}
    for key in plans.keys() - memory.keys():
        memory[key] = max(cluster.call(peak_bytes, plans[key]))
    base = _key(BASELINE)
    always = {base, *(_key(plan) for _, plan in picks)}
    variants = {key: (plan, STEPS) for key, plan in plans.items()}
    result = rounds.measure_contenders(
        cluster, layer_step.step, variants, num_rounds, lambda first: contenders(first, memory) | always
    )
    table_rows = [
        {
            "plan": asdict(plan),
            "name": key,
            "bytes": memory[key],
            "saved": 1 - memory[key] / memory[base],
            "seconds": result.median(key, "together"),
            "time_by_baseline": 1 / result.speedup(key, "together", base),
            "predicted": asdict(predict(costs, load, plan)),
        }
        for key, plan in plans.items()
    ]
    pairs = [(_key(plan), _fastest(table_rows, budget)) for budget, plan in picks]
    slower = {pair: _duel(cluster, variants, *pair, num_rounds) for pair in dict.fromkeys(pairs)}
    return {
        "case": asdict(case),
        "rate": cluster.rate,
        "rounds": result.num_rounds,
        "rounds_dropped": result.num_dropped,
        "rows": table_rows,
        "picks": [
            _compare(budget, *pair, memory[pair[0]], slower[pair])
            for (budget, _), pair in zip(picks, pairs, strict=True)
        ],
        "refusal": _refusal(costs, load, replace(limits, memory_budget=min(memory.values()) // 2)),
    }


def _falling(most: int, least: int, count: int) -> list[int]:
    return [int(least * (most / least) ** (1 - i / (count - 1)) * 1.001) for i in range(count)]


def contenders(result: rounds.Rounds, memory: Mapping[str, int]) -> set[str]:
    """Return the names of the plans that may be the fastest within some budget: none that needs no more memory is
    faster by much."""
    seconds = {name: result.median(name, "together") for name in result.seconds}
    return {
        name
        for name, own in seconds.items()
        if own <= (1 + rounds.CONTENDS) * min(other for of, other in seconds.items() if memory[of] <= memory[name])
    }


def _fastest(table_rows: Sequence[dict[str, Any]], budget: int) -> str:
    return min((row for row in table_rows if row["bytes"] <= budget), key=lambda row: row["time_by_baseline"])["name"]


def _duel(cluster: Cluster, variants: Mapping[str, tuple[Any, ...]], pick: str, rival: str, num_rounds: int) -> float:
    """Return the ratio of the times of the pick and its rival, in rounds of these two alone. The machine is not the
    same at both ends of a round of all plans, and the rival is the one that was lucky there."""
    if pick == rival:
        return 1.0
    both = {name: variants[name] for name in (pick, rival)}
    result = rounds.measure(cluster, layer_step.step, both, DUEL * num_rounds, warm_up=0)
    return 1 / result.speedup(pick, "together", rival)


def _compare(budget: int, pick: str, fastest: str, num_bytes: int, slower: float) -> dict[str, Any]:
    fits = num_bytes <= budget
    return {
        "budget": budget,
        "pick": pick,
        "fits": fits,
        "fastest": fastest,
        "slower": slower,
        "right": fits and slower <= SAME,
    }


def _refusal(costs: LayerCosts, load: LayerLoad, limits: Limits) -> str:
    try:
        return f"not refused: {best_plan(costs, load, limits).plan}"
    except ValueError as error:
        return str(error)


# ---------------------------------------------------------------------------------------------------------------------
# Printing
# ---------------------------------------------------------------------------------------------------------------------


def _report(layer: dict[str, Any], markdown: bool) -> str:
    table_rows = [
        [
            row["name"],
            f"{row['bytes'] / MIB:.1f} / {row['predicted']['memory'] / MIB:.1f}",
            f"{row['saved']:.0%}",
            f"{row['seconds'] * 1e3:.1f} / {(row['predicted']['forward'] + row['predicted']['backward']) * 1e3:.1f}",
            f"{row['time_by_baseline']:.3f}",
        ]
        for row in sorted(layer["rows"], key=lambda row: -row["bytes"])
    ]
    picks = [
        [f"{p['budget'] / MIB:.1f}", p["pick"], "yes" if p["fits"] else "NO", p["fastest"], f"{p['slower']:.3f}"]
        for p in layer["picks"]
    ]
    right = sum(pick["right"] for pick in layer["picks"])
    tables = [
        table(["plan", "MiB / counted", "saved", "ms / predicted", "time / baseline"], table_rows, markdown),
        table(["budget MiB", "pick", "fits", "fastest that fits", "pick / fastest"], picks, markdown),
        f"right picks: {right} of {len(layer['picks'])}",
        f"half the least: {layer['refusal']}",
    ]
    return "\n\n".join(tables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["1gbit:1", "500mbit:2", "200mbit:4"],
        help="link rate : communication by computation",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budgets", type=int, default=16, help="budgets per layer")
    parser.add_argument("--experts-per-rank", type=int, default=4)
    parser.add_argument("--tokens", type=int, help="of each rank; default: by the link's rate")
    parser.add_argument("--quick", action="store_true", help="one small layer, two rounds, few budgets")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.rounds, arguments.budgets = arguments.layers[:1], 2, 3
        arguments.tokens = arguments.tokens or QUICK_TOKENS
    layers = []
    try:
        for name in arguments.layers:
            rate, _, ratio = name.partition(":")
            with Cluster(2, rate) as cluster:
                rate_measured = link.measured_rate(cluster)
                tokens = arguments.tokens or TOKENS.get(parse_rate(rate) or 0.0, 4096)
                base = Case(tokens, HIDDEN, 512, 2, arguments.experts_per_rank)
                case = make_case(cluster, base, float(ratio), virtual=False)
                print(
                    f"\n{link.in_words(cluster, rate_measured)}; communication / computation {ratio}; {case}",
                    flush=True,
                )
                layers.append(measure(cluster, case, arguments.rounds, arguments.budgets))
                print(_report(layers[-1], arguments.markdown), flush=True)
    except (ValueError, ClusterError) as error:
        print(f"memory_reuse: {error}", file=sys.stderr)
        return 1
    picks = [pick for layer in layers for pick in layer["picks"]]
    print(f"\nright picks over all layers: {sum(pick['right'] for pick in picks)} of {len(picks)}")
    if arguments.json:
        print(json.dumps({"layers": layers}))
    return 0


if __name__ == "__main__":
    from benchmarks.speed import memory_reuse  # under the name by which ranks find its functions

    sys.exit(memory_reuse.main())
