"""Where `moe.weights_device=auto` and `training.pass_order=auto` put experts, against what is measured:
`python -m benchmarks.speed.expert_tiers_pick [--groups ...] [--cases ...] [--rounds 3] [--seconds 1.0] [--markdown]
[--json]`

Virtual accelerator, emulated link, throttled disk (benchmarks/kit/expert_tiers_rig.py). A case has the rates of all
three, and how much a rank may take of its device and its host. It is described to the planner as a machine of
configs/hardware, of which the rates are the rig's and what is computed in earnest is cpu_emulated's. The planner picks;
all candidates that fit are measured once (again where one should have been the best and took twice as long: a shared
disk has hiccups), then the pick and its best rival in paired rounds.

A pick is right where its step takes at most 5% longer than the rival's, or two standard errors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.kit.expert_tiers_rig import VOCABULARY, Ranks, Rates, StepMoves
from benchmarks.kit.rounds import standard_error
from benchmarks.kit.tables import table
from benchmarks.speed.expert_tiers_step import Shape, in_turns, seconds
from configs.compose import compose
from configs.job import Job
from configs.keys import get
from configs.schema import Config
from configs.validate import validate
from optim.arrangement.buckets import Capacity
from optim.arrangement.experts import expert_traffic
from simulator.clock.hardware import Hardware, load_hardware
from simulator.clock.predict import predict_step
from simulator.memory import over_budget, rank_memory
from simulator.offload.expert_choice import decide
from simulator.offload.expert_options import ORDER, WEIGHTS, expert_candidates

BAR, NEEDED = 1.05, 14  # times the best rival's step; cases
RESIDENT = ("device", "by_micro_batch")
Way = tuple[str, str]  # values of WEIGHTS and ORDER
ROOMY = 2.0  # times what a rank of its resident training takes
DOUBTED = 2.0  # times its prediction: what should have been the best is measured again
SPARE = 1.02  # times what a streamed training takes, where no more fits


@dataclass(frozen=True)
class Case:
    """Seconds, by --seconds, that passes take on the accelerator, and that experts streamed by micro-batch use the
    link's busier direction and the disk's; what fits: all on the device, all on the host, or neither."""

    computing: float
    link: float
    disk: float
    fits: str = "host"


@dataclass(frozen=True)
class Group:
    """Cases of one training."""

    name: str
    shape: Shape
    cases: tuple[Case, ...]
    ranks: int = 1
    more: tuple[str, ...] = ()

    def overrides(self, way: Way) -> list[str]:
        """Keys of a config with its experts there."""
        # Each rank computes all samples of its batches for half of the experts.
        expert = [f"parallel.expert={self.ranks}"] if self.ranks > 1 else []
        return [*self.shape.overrides(*way, self.ranks), *expert, *self.more]

    def config(self, way: Way) -> Config:
        """Checked. Raises ConfigError."""
        config = compose([*self.overrides(way), "memory.disk_dir=/var/tmp"])
        validate(config, self.ranks)
        return config

    def open(self) -> Config:
        """The config that leaves the choice to the planner."""
        state = "optimizer.state_device="
        given = [each for each in self.overrides(("auto", "auto")) if not each.startswith(state)]
        config = compose([*given, "memory.disk_dir=/var/tmp"])
        validate(config, self.ranks)
        return config


# Small enough that a shared disk carries what a case takes of it: 50 to 150 MB/s.
_SIZES = Shape(layers=6, width=192)
_INPUTS = replace(_SIZES, width=32, experts=4, samples=8, micro_batches=4)
GROUPS = (
    Group(
        "bf16, 2 micro-batches",
        _SIZES,
        (Case(1, 0.25, 2, "device"), Case(1, 0.25, 2), Case(0.3, 1, 2), Case(0.5, 0.5, 1.5, "disk")),
    ),
    Group(
        "fp32, 4 micro-batches",
        replace(_SIZES, samples=2, micro_batches=4, precision="fp32"),
        (Case(1, 1, 2), Case(0.6, 2, 2), Case(0.5, 0.5, 2, "disk")),
    ),
    Group(
        "bf16, 1 micro-batch",
        replace(_SIZES, samples=8, micro_batches=1),
        (Case(0.4, 1, 2), Case(1, 0.5, 1), Case(0.5, 0.5, 1.5, "disk")),
    ),
    Group(
        "EP2, bf16, 2 micro-batches",
        replace(_SIZES, samples=2),
        (Case(1, 1, 2, "device"), Case(0.5, 1, 2), Case(0.5, 0.5, 1.5, "disk")),
        ranks=2,
    ),
    Group(
        "layer inputs on the host, 4 micro-batches",
        _INPUTS,
        (Case(0.1, 0.5, 0.5), Case(0.4, 0.1, 0.2), Case(0.1, 0.3, 0.3)),
        more=("training.activation_offload=auto",),
    ),
)


@dataclass(frozen=True)
class Planned:
    """What the planner knows and says of a case."""

    rates: Rates
    hardware: Hardware
    capacity: Capacity
    pick: Way
    predicted: Mapping[Way, float]  # seconds of a step of each candidate that fits
    line: str  # what the planner says


def planned(group: Group, case: Case, scale: float) -> Planned:
    """The case's rates, and the planner's pick for them. scale: seconds of a case's 1."""
    world, open_config = group.ranks, group.open()
    rates = rates_of(group, case, scale)
    hardware = machine(rates)
    every = {
        (get(each, WEIGHTS), get(each, ORDER)): each for each in expert_candidates(open_config, world, moves_state=True)
    }
    every_memory = {way: rank_memory(Job(each, world, VOCABULARY, "cpu")) for way, each in every.items()}
    device, host = (
        {way: max(getattr(rank, tier) for rank in ranks) for way, ranks in every_memory.items()}
        for tier in ("total", "host")
    )
    of_tier = {tier: [way for way in every if way[0] == tier] for tier in ("host", "disk")}
    small = [max(host[way] for way in of_tier["disk"]), min(host[way] for way in of_tier["host"])]
    capacity = Capacity(
        ROOMY * device[RESIDENT]
        if case.fits == "device"
        else SPARE * max(device[way] for way in every if way != RESIDENT),
        sum(small) / 2 if case.fits == "disk" else math.inf,
    )
    memory = {way: rank_memory(Job(each, world, VOCABULARY, "cpu"), capacity=capacity) for way, each in every.items()}
    fitting = [
        way
        for way, ranks in memory.items()
        if max(rank.total for rank in ranks) <= capacity.device and not over_budget(ranks, capacity)
    ]
    choice = decide(Job(open_config, world, VOCABULARY, "cpu"), hardware, capacity, frozenset())
    return Planned(
        rates,
        hardware,
        capacity,
        (choice.values[WEIGHTS], choice.values[ORDER]),
        {way: predict_step(Job(every[way], world, VOCABULARY, "cpu"), hardware).seconds for way in fitting},
        choice.line,
    )


def rates_of(group: Group, case: Case, scale: float) -> Rates:
    """What the rig is to emulate."""
    found = expert_traffic(group.config(("disk", "by_micro_batch")), group.ranks, 0)
    assert found is not None
    total = found.total
    link, disk = max(total.up, total.down) / case.link, max(total.read, total.written) / case.disk
    return Rates(group.shape.operations / case.computing / scale, link / scale, disk / scale)


def machine(rates: Rates) -> Hardware:
    """The rig, as a file of configs/hardware says it: each rank is a node with a link and a disk of its own."""
    values = dict.fromkeys(("products.fp32", "products.half", "attention.half"), rates.flops)
    values |= dict.fromkeys(("host.up", "host.down"), rates.link) | dict.fromkeys(
        ("disk.read", "disk.write"), rates.disk
    )
    values |= {"between.rate": LOOPBACK}
    return replace(
        load_hardware("cpu_emulated").with_values(values, "benchmarks/speed/expert_tiers_pick.py"), name="rig"
    )


LOOPBACK = 1e9  # bytes per second that gloo sends to itself, about


@dataclass(frozen=True)
class Row:
    """A measured case; seconds by way are medians."""

    group: str
    case: Case
    pick: Way
    rival: Way | None  # None: nothing else fits
    predicted: Mapping[str, float]
    first: Mapping[str, float]  # each candidate's step, measured once
    picked: float
    best: float
    ratio: float
    error: float
    moves: Mapping[str, Any]  # of the pick's and the rival's steps

    @property
    def holds(self) -> bool:
        """Within the bar, or two standard errors of the rival."""
        return self.ratio <= BAR or self.ratio - 2 * self.error <= 1.0


def words(way: Way | None) -> str:
    """A way in a word or two."""
    return "none" if way is None else "resident" if way == RESIDENT else f"{way[0]} {way[1]}"


@contextlib.contextmanager
def trainings(group: Group, found: Sequence[Way]) -> Iterator[dict[Way, Ranks]]:
    """Each of these, in processes of its own; they begin side by side."""
    made = {way: Ranks(group.overrides(way), group.ranks, disk=way[0] == "disk") for way in found}
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(Ranks.__enter__, made.values()))
        for each in made.values():
            stack.push(each.__exit__)
        yield made


def measure(group: Group, numbers: Sequence[int], rounds: int, scale: float) -> Iterator[Row]:
    """The cases of a group with these numbers in it."""
    plans = {number: planned(group, group.cases[number], scale) for number in numbers}
    with trainings(group, list(dict.fromkeys(way for plan in plans.values() for way in plan.predicted))) as running:
        for number, plan in plans.items():
            for way in plan.predicted:
                running[way].hold(plan.rates)
            first = {way: running[way].steps(1) for way in plan.predicted}
            best = min(each.seconds for each in first.values())
            for way, seconds_predicted in plan.predicted.items():
                if seconds_predicted < best and first[way].seconds > DOUBTED * seconds_predicted:
                    first[way] = running[way].steps(1)
            yield _row(group, group.cases[number], plan, first, running, rounds)


def _row(
    group: Group, case: Case, plan: Planned, first: Mapping[Way, StepMoves], running: Mapping[Way, Ranks], rounds: int
) -> Row:
    rivals = [way for way in first if way != plan.pick]
    rival = min(rivals, key=lambda way: first[way].seconds, default=None)
    picked, best = [first[plan.pick]], list[StepMoves]()
    if rival is not None:
        compared = running[plan.pick], running[rival]
        picked, best = in_turns([lambda: compared[0].steps(1), lambda: compared[1].steps(1)], rounds)
    ratios = [a / b for a, b in zip(seconds(picked), seconds(best), strict=True)] if best else [1.0]
    return Row(
        group.name,
        case,
        plan.pick,
        rival,
        {words(way): value for way, value in plan.predicted.items()},
        {words(way): each.seconds for way, each in first.items()},
        statistics.median(seconds(picked)),
        statistics.median(seconds(best or picked)),
        statistics.median(ratios),
        standard_error(ratios),
        {words(way): asdict(each[-1]) for way, each in ((plan.pick, picked), (rival, best)) if each},
    )


def report(results: Sequence[Row], markdown: bool) -> str:
    """A table of cases."""
    headings = ["training", "computing, link, disk", "fits", "pick", "best rival", "predicted s", "measured s"]
    headings += ["pick by rival", "right"]
    cells = []
    for row in results:
        pair = [words(row.pick), words(row.rival)]
        said = " : ".join(f"{row.predicted[way]:.2f}" for way in pair if way in row.predicted)
        cells.append(
            [
                row.group,
                f"{row.case.computing:g}, {row.case.link:g}, {row.case.disk:g}",
                row.case.fits,
                *pair,
                said,
                f"{row.picked:.2f} : {row.best:.2f}",
                f"{row.ratio:.3f} +- {row.error:.3f}",
                "yes" if row.holds else "no",
            ]
        )
    return table(headings, cells, markdown)


def line(row: Row) -> str:
    """A case, as it is measured: each candidate's prediction and its first step."""
    others = ", ".join(f"{way} {value:.2f} ({row.first[way]:.2f})" for way, value in row.predicted.items())
    rival = f"{row.ratio:.3f} +- {row.error:.3f} of {words(row.rival)}"
    return f"{row.group} {row.case}: {words(row.pick)}, {rival}; predicted (measured): {others}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=list(range(len(GROUPS))), help="numbers, from 0")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers in each group, from 0; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a case's 1")
    parser.add_argument("--dry", action="store_true", help="predictions alone")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results, start = list[Row](), time.monotonic()
    for number in args.groups:
        group = GROUPS[number]
        numbers = [each for each in range(len(group.cases)) if args.cases is None or each in args.cases]
        if args.dry:
            for each in numbers:
                plan = planned(group, group.cases[each], args.seconds)
                said = ", ".join(f"{words(way)} {value:.3f}" for way, value in plan.predicted.items())
                print(f"{group.name} {group.cases[each]}: {words(plan.pick)}; {said}\n  {plan.line}")
            continue
        for row in measure(group, numbers, args.rounds, args.seconds):
            results.append(row)
            print(line(row), file=sys.stderr, flush=True)
    if args.dry:
        return
    why = Ranks([], disk=True).emulated
    disk = "each rank's disk throttled by a blkio control group" if why is None else f"emulated disk ({why})"
    took = time.monotonic() - start
    print(f"\nvirtual accelerator, emulated link, {disk}; {args.rounds} rounds of a case, {took:.0f} s in all\n")
    print(report(results, args.markdown))
    right = sum(row.holds for row in results)
    print(
        f"\n{right} of {len(results)} picks within 5% of the best rival, or two standard errors ({NEEDED} of 16 needed)"
    )
    if args.json:
        print(json.dumps({"right": right, "rows": [asdict(row) for row in results]}))


if __name__ == "__main__":
    main()
