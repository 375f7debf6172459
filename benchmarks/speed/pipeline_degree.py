"""The gain of the MoE layer's chunk pipeline over computing and communicating in turn, on an emulated cluster.

`python -m benchmarks.speed.pipeline_degree [--mode virtual|real] [--ranks 2] [--rates 500mbit] [--ratios 0.25 0.5 1 2
4] [--rounds 5] [--quick] [--json] [--markdown]`

Each layer is made so that its communication takes `ratio` times its computation, both at degree 1: in the mode `real`
by the width of its experts, with a virtual accelerator by that one's rate. In every round the same step, forward and
backward, runs at degrees 1, 2 (FasterMoE's choice), 4 and 8, by the planner's choice and by Megatron-core's alltoall
layer with the same weights and routing; all of them exchange rows full duplex. Two controls have nothing to gain: an
uncapped link, and messages of a few KB.

Speedups are over `in turn`: the layer at degree 1 that does one thing at a time, as other layers do (and PipeMoE's r =
1). Ours at r=1 is faster than that, since its weight gradients already run beside the exchange of the input gradients.
The ideal is the pipeline without overheads: chunks of equal times, no start-up costs, one computation and one transfer
at a time, in the best of the degrees for each pass. Computation is what a step in turn takes beyond its exchanges.
Share of the ideal gain = (speedup - 1) / (ideal - 1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.kit import layer_step, link, rounds
from benchmarks.kit.accelerator import step_flops
from benchmarks.kit.cluster import UNCAPPED, Cluster, ClusterError, parse_rate
from benchmarks.kit.layer_step import EXCHANGES, IN_TURN, MEGATRON, Case
from benchmarks.kit.tables import headline, line
from moe.chunk_plan import LayerLoad, Plan
from moe.planning.costs import Limits
from moe.planning.planner import Planner
from moe.planning.trial import Trial, TrialPolicy

DEGREES = (1, 2, 4, 8)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
PHASES = ("forward", "backward", "together")
HIDDEN, TOP_K = 512, 2
# Tokens of each rank: at degree 8 every message has at least 256 KiB, and an exchange takes 0.15 to 0.3 s.
TOKENS = {200e6: 2048, 500e6: 4096, 1e9: 8192}
TINY_TOKENS = 4  # messages of 8 KiB
# Real experts of about this many multiply-adds per row and rank are tried to find how long a width takes.
TRIAL_WIDTHS = (128, 512)
WIDTH_STEP = 16
FLAT = "flat"  # the only all-to-all of one rank a node
CONTROLS = {"uncapped": 5, "tiny": 100}  # times as many rounds: their steps are so short that a few say nothing


# ---------------------------------------------------------------------------------------------------------------------
# The ideal
# ---------------------------------------------------------------------------------------------------------------------


def ideal_seconds(exchange: float, compute: float, later: float, degree: int) -> float:
    """Return the time of a pass without overheads: an event simulation of one computation and one first-in-first-out
    link.

    `exchange` is the time of all dispatches, and of all answers; `compute` what a chunk's answer waits for, all chunks;
    `later` what nobody waits for (weight gradients), which each chunk leaves behind.
    """
    chunk_exchange, work, rest = exchange / degree, compute / degree, later / degree
    arrivals = [chunk_exchange * (i + 1) for i in range(degree)]  # all dispatches are on their way at once
    link_free, now, left = arrivals[-1], 0.0, 0
    for arrival in arrivals:
        while left and now + rest <= arrival:  # fill the wait, if that delays nothing
            now, left = now + rest, left - 1
        now = max(now, arrival) + work
        left += 1
        link_free = max(link_free, now) + chunk_exchange
    return max(now + left * rest, link_free)


def ideal_speedups(
    exchange: Mapping[str, float], step: Mapping[str, float], degrees: Sequence[int] = DEGREES
) -> dict[str, float]:
    """Return the best schedule's speedup of each phase, from the seconds of exchanges alone and of the step in turn."""
    best = {}
    for phase in ("forward", "backward"):
        compute = max(0.0, step[phase] - exchange[phase])
        later = compute / 2 if phase == "backward" else 0.0  # input and weight gradients are as much work
        best[phase] = min(ideal_seconds(exchange[phase] / 2, compute - later, later, degree) for degree in degrees)
    before = {phase: max(step[phase], exchange[phase]) for phase in best}
    return {
        **{phase: before[phase] / best[phase] for phase in best},
        "together": sum(before.values()) / sum(best.values()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def auto_plan(cluster: Cluster, case: Case) -> Plan:
    """Return the plan that a training chooses for the layer that was built, from costs that it measures now; it
    keeps everything, as the others do."""
    costs = cluster.call(layer_step.costs)[0]
    planner = Planner(costs, Limits(strategies=("keep",)))
    return tried(cluster, planner, layer_step.load(case, cluster.world_size), num_layers=TrialPolicy.turns)


def tried(cluster: Cluster, planner: Planner, load: LayerLoad, num_layers: int = 1, steps: int = 1) -> Plan:
    """What a training of so many layers chooses after its first steps, in which it tries the plans that may be fastest:
    the fewer layers, the more often. In a turn so many steps of this one layer are timed, as if each were another
    layer's."""
    choices = [(FLAT, decision) for decision in planner.close(load)]
    trial = Trial(choices, num_layers)
    while not trial.is_over:
        _, decision = trial.choice
        results = zip(*cluster.call(layer_step.steps, decision.plan, steps), strict=True)
        trial.took(
            [
                (max(rank["forward"] for rank in of_step), max(rank["backward"] for rank in of_step))
                for of_step in results
            ]
        )
    planner.learn(trial.factors(FLAT))
    return planner.decide(load).plan


def _median_step(cluster: Cluster, what: Plan | str, repeats: int = 3) -> float:
    results = [cluster.call(layer_step.step, what) for _ in range(repeats)]
    return statistics.median(max(rank["together"] for rank in result) for result in results)


def _exchange_and_computation(cluster: Cluster, case: Case) -> tuple[float, float]:
    cluster.call(layer_step.build, case)
    exchange = _median_step(cluster, EXCHANGES)
    return exchange, _median_step(cluster, IN_TURN) - exchange


def make_case(cluster: Cluster, case: Case, ratio: float, virtual: bool) -> Case:
    """Return the case with the accelerator's rate, or the experts' width, that makes communication `ratio` times the
    computation.

    Where the rest of a layer's work alone takes longer than that, the narrowest experts are as near as it gets (a row
    says what was met); a virtual accelerator cannot come near, and raises ValueError.
    """
    if virtual:
        assignments = cluster.call(layer_step.build, replace(case, flops_per_second=1e30))[0]
        exchange = _median_step(cluster, EXCHANGES)
        rest = max(0.0, _median_step(cluster, IN_TURN) - exchange)
        seconds = exchange / ratio - rest
        if seconds <= 0:
            raise ValueError(
                f"ratio={ratio:g} at {cluster.rate}: the layer's other work takes longer than {exchange / ratio:.3f} "
                "s; try a smaller one"
            )
        return replace(case, flops_per_second=step_flops(assignments, case.hidden, case.width) / seconds)
    narrow, width = TRIAL_WIDTHS
    _, least = _exchange_and_computation(cluster, replace(case, width=narrow))
    exchange, seconds = _exchange_and_computation(cluster, replace(case, width=width))
    slope = (seconds - least) / (width - narrow)
    if slope <= 0:
        if not rounds.times_count():
            return replace(case, width=width)
        raise ValueError(
            f"ratio={ratio:g} at {cluster.rate}: experts {width} wide took no longer than {narrow} wide. Try again "
            "when no other program runs on this machine."
        )
    nearer = _nearer_width(width, (exchange / ratio - seconds) / slope)
    exchange, seconds = _exchange_and_computation(cluster, replace(case, width=nearer))
    return replace(case, width=_nearer_width(nearer, (exchange / ratio - seconds) / slope))


def _nearer_width(width: int, change: float) -> int:
    return max(WIDTH_STEP, round((width + change) / WIDTH_STEP) * WIDTH_STEP)


def measure(cluster: Cluster, case: Case, num_rounds: int, megatron: bool, weight_lag: int) -> dict[str, Any]:
    """Measure medians and speedups of all variants on one layer: a row of the table."""
    cluster.call(layer_step.build, case)
    variants: dict[str, tuple[Any, ...]] = {name: (name,) for name in (EXCHANGES, IN_TURN)}
    variants |= {f"r={degree}": (Plan(degree, degree, weight_lag=min(weight_lag, degree - 1)),) for degree in DEGREES}
    auto = auto_plan(cluster, case)
    variants["auto"] = (auto,)
    if megatron:
        variants[MEGATRON] = (MEGATRON,)
    result = rounds.measure(cluster, layer_step.step, variants, num_rounds, warm_up=0)
    seconds = {name: {phase: result.median(name, phase) for phase in PHASES} for name in variants}
    ideal = ideal_speedups(seconds[EXCHANGES], seconds[IN_TURN])
    speedups = {
        name: {phase: result.speedup(name, phase, IN_TURN) for phase in PHASES}
        for name in variants
        if name != EXCHANGES
    }
    # Each pass has a degree of its own, so each pass's best counts.
    ours = [*(f"r={degree}" for degree in DEGREES), "auto"]
    fastest = {phase: max(ours, key=lambda name: speedups[name][phase]) for phase in PHASES}
    best = {phase: speedups[fastest[phase]][phase] for phase in PHASES}
    return {
        "ranks": cluster.world_size,
        "rate": cluster.rate,
        "case": asdict(case),
        "virtual_accelerator": case.flops_per_second is not None,
        "ratio_measured": seconds[EXCHANGES]["together"]
        / max(1e-9, seconds[IN_TURN]["together"] - seconds[EXCHANGES]["together"]),
        "rounds": result.num_rounds,
        "rounds_dropped": result.num_dropped,
        "auto": asdict(auto),
        "seconds": seconds,
        "speedup": speedups,
        "ideal": ideal,
        "fastest": fastest,
        "best": best,
        "best_over_r1": {phase: best[phase] / speedups["r=1"][phase] for phase in PHASES},
        "share_of_ideal": {phase: (best[phase] - 1) / (ideal[phase] - 1) for phase in PHASES if ideal[phase] > 1.005},
    }


def _tokens(rate: str) -> int:
    bits = parse_rate(rate)
    return TOKENS[max((known for known in TOKENS if bits is None or known <= bits), default=200e6)]


def measure_all(arguments: argparse.Namespace, report: Any) -> list[dict[str, Any]]:
    """Measure everything that was selected; `report` is called with each row and, before those of a cluster, its links
    in words."""
    found = []
    virtual = arguments.mode == "virtual"
    clusters = [(rate, arguments.ratios) for rate in arguments.rates]
    if "uncapped" in arguments.controls:
        clusters.append((UNCAPPED, []))
    for rate, ratios in clusters:
        with Cluster(arguments.ranks, rate, cpu_share=arguments.cpu_share) as cluster:
            rate_measured = link.measured_rate(cluster)
            report(link.in_words(cluster, rate_measured))
            if arguments.megatron:
                cluster.call(layer_step.start_megatron)
            tokens = arguments.tokens or _tokens(rate)
            base = Case(tokens, HIDDEN, arguments.width, TOP_K, arguments.experts_per_rank)
            cases = [(f"{ratio:g}", make_case(cluster, base, ratio, virtual)) for ratio in ratios]
            flops_per_second = arguments.accelerator_rate if virtual else None
            if rate == UNCAPPED:
                cases.append(("uncapped", replace(base, flops_per_second=flops_per_second)))
            elif "tiny" in arguments.controls:
                cases.append(("tiny", replace(base, tokens=TINY_TOKENS, flops_per_second=flops_per_second)))
            for name, case in cases:
                num_rounds = arguments.rounds * CONTROLS.get(name, 1)
                row = {
                    "layer": name,
                    "link_bits_per_second": rate_measured,
                    **measure(cluster, case, num_rounds, arguments.megatron, arguments.weight_lag),
                }
                found.append(row)
                report(row)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Printing
# ---------------------------------------------------------------------------------------------------------------------

COLUMNS = ("r=1", "r=2", "r=4", "r=8", "auto", MEGATRON)


def _cells(row: dict[str, Any], phase: str) -> list[str]:
    speedups = [f"{row['speedup'][name][phase]:.2f}" if name in row["speedup"] else "-" for name in COLUMNS]
    share = row["share_of_ideal"].get(phase)
    return [
        str(row["ranks"]),
        row["rate"],
        row["layer"],
        f"{row['ratio_measured']:.2f}",
        phase,
        f"{row['seconds'][EXCHANGES][phase] * 1e3:.1f}",
        f"{row['seconds'][IN_TURN][phase] * 1e3:.1f}",
        *speedups,
        f"{row['ideal'][phase]:.2f}",
        "-" if share is None else f"{share:.0%}",
        "{degree},{backward_degree},{weight_lag}".format(**row["auto"]),
    ]


HEADINGS = ("ranks", "link", "layer", "comm/comp", "part", "comm ms", "turn ms", *COLUMNS, "ideal", "share", "auto is")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument(
        "--mode", choices=["virtual", "real"], default="virtual", help="virtual accelerator, or experts that compute"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", nargs="*", default=["500mbit"])
    parser.add_argument("--ratios", nargs="*", type=float, default=list(RATIOS), help="communication by computation")
    parser.add_argument("--controls", nargs="*", choices=CONTROLS, default=[], help="layers that have nothing to gain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, help="of each rank; default: by the link's rate")
    parser.add_argument(
        "--width", type=int, default=512, help="of the experts, with a virtual accelerator and in the controls"
    )
    parser.add_argument("--experts-per-rank", type=int, default=1)
    parser.add_argument(
        "--accelerator-rate", type=float, default=1e11, help="FLOP/s of the virtual accelerator in the controls"
    )
    parser.add_argument(
        "--weight-lag",
        type=int,
        default=1,
        help="chunks by which weight gradients are late, see moe.chunk_plan.Plan",
    )
    parser.add_argument("--cpu-share", type=float, help="part of one core that each rank computes with")
    parser.add_argument("--no-megatron", dest="megatron", action="store_false", help="leave Megatron-core's layer out")
    parser.add_argument("--quick", action="store_true", help="one ratio and two rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ratios, arguments.rounds = [1.0], 2

    def report(what: Any) -> None:
        if isinstance(what, str):
            print(f"\n{what}; {kind}\n" + headline(HEADINGS, arguments.markdown))
        else:
            print("\n".join(line(_cells(what, phase), HEADINGS, arguments.markdown) for phase in PHASES))
        sys.stdout.flush()

    kind = "virtual accelerator" if arguments.mode == "virtual" else "real computation, one thread a rank"
    print(
        f"hidden {HIDDEN}, top {TOP_K}, fp32, SwiGLU; columns r=1 to {MEGATRON}: speedup over in turn, median of "
        f"{arguments.rounds} rounds"
        + "".join(f", of {name} {arguments.rounds * CONTROLS[name]}" for name in arguments.controls)
    )
    try:
        found = measure_all(arguments, report)
    except (ValueError, ClusterError) as error:
        print(f"pipeline_degree: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"mode": kind, "rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
