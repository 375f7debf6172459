"""Whether the search's first layout is the fastest: `python -m benchmarks.speed.search_pick [--cases 0 1 ...] [--rounds
3] [--save FILE] [--markdown] [--json]`

Twenty-four cases on an emulated cluster (emulated_step.py): three MoE and two dense models, two and four ranks, three
link rates, three caps of memory. A case's layouts are the first four that `plan=search` names and four drawn by a fixed
seed from those that fit and should take at most twice as long as its first. All run in turns, each round on a new
cluster. `ratio` is the first's time by that of the fastest measured, the median over rounds, with its standard error:
its goal is within 3% or two standard errors.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kit import link
from benchmarks.kit.cluster import Cluster, ClusterError
from benchmarks.kit.emulated_cases import BERT, EXPERTS, GPT, RATES, VOCABULARY, WIDE
from benchmarks.kit.emulated_settings import Machine, Setting
from benchmarks.kit.emulated_step import measure
from benchmarks.kit.rounds import standard_error
from benchmarks.kit.tables import table
from benchmarks.speed.clock_accuracy import HARDWARE
from configs.job import Job
from configs.schema import Config
from simulator.clock.hardware import Hardware, load_hardware
from simulator.search.answer import LayoutAnswer
from simulator.search.search import changes, layout_explorer, search_layout
from simulator.search.sizer import memory_limits
from simulator.search.timer import clock_timer

GIB = 2**30
FIRST, DRAWN, SLOWEST, SEED = 4, 4, 2.0, 36
NEAR, FAR, NEAR_GOAL = 1.03, 1.10, 22
BATCH = ("training.global_batch_size=8", "training.micro_batch_size=1")
MODELS = {
    "gpt": (*GPT, *BATCH),
    "wide bert": (*BERT[:1], *WIDE[1:], *BATCH),
    "moe": (*GPT, *EXPERTS, *BATCH),
    "wide moe": (*WIDE, "moe.num_experts=4", "moe.top_k=2", "moe.ffn_hidden_size=384", *BATCH),
    "bert moe": (*BERT, *EXPERTS, *BATCH),
}
# Of the memory that the fastest layout without a cap needs; 1: no cap.
CAPS = (1.0, 0.8, 0.6)


@dataclass(frozen=True)
class Pick:
    """A case."""

    model: str
    ranks: int
    rate: str
    cap: float

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"{self.model}, {self.ranks} ranks, {self.rate}, memory {self.cap:.0%}"


@dataclass(frozen=True)
class Row:
    """What came of a case. `layouts`: overrides, predicted and measured seconds of each, the search's first one first;
    `ratio` and `error` of it by the fastest."""

    case: str
    ratio: float
    error: float
    layouts: list[tuple[list[str], float, float]]

    @property
    def is_near(self) -> bool:
        """Whether the goal is met."""
        return self.ratio <= max(NEAR, 1 + 2 * self.error)


def picks() -> list[Pick]:
    """The cases: each value of each kind about as often as the others, and beside each of the others."""
    names, found = list(MODELS), []
    for number in range(24):
        model, ranks = names[number % len(names)], (2, 4)[number % 2]
        found.append(Pick(model, ranks, RATES[(number // 2) % 3], CAPS[(number // 6 + number) % 3]))
    return found


def answer_of(pick: Pick, hardware: Hardware) -> tuple[Setting, LayoutAnswer]:
    """The setting with its cap, and what the search says of it. Raises ConfigError where nothing fits."""
    setting = Setting(MODELS[pick.model], VOCABULARY)
    answer = search_layout(Job(setting.config(1), pick.ranks, VOCABULARY, "cpu"), hardware, frozenset())
    if pick.cap == 1:
        return setting, answer
    cap = pick.cap * answer.best.memory.device / GIB
    setting = Setting((*setting.overrides, f"training.memory_limit_gib={cap:.4g}"), VOCABULARY)
    return setting, search_layout(Job(setting.config(1), pick.ranks, VOCABULARY, "cpu"), hardware, frozenset())


def layouts_of(pick: Pick, config: Config, answer: LayoutAnswer, hardware: Hardware) -> list[tuple[list[str], float]]:
    """Overrides and predicted seconds: the search's first ones, and some of all the others that fit."""
    chosen = [answer.best, *answer.runners_up][:FIRST]
    layouts = [(each.overrides, each.prediction.seconds) for each in chosen]
    limits = memory_limits(config, pick.ranks, hardware)
    explorer = layout_explorer(Job(config, pick.ranks, VOCABULARY, "cpu"), hardware, frozenset(), clock_timer(), limits)
    space = explorer.space
    candidates = [
        (cell, saving)
        for group in space.groups()
        for cell in space.cells(group)
        for saving in space.legal_savings(cell)
    ]
    random.Random(SEED).shuffle(candidates)
    for cell, saving in candidates:
        if len(layouts) == len(chosen) + DRAWN:
            break
        memory = explorer.sizer.memory(cell, saving)
        if memory.device > limits.device or memory.host > limits.host or memory.disk > limits.disk:
            continue
        layout = space.layout(cell, saving)
        overrides, seconds = changes(config, layout), explorer.time(cell, saving).seconds
        if seconds <= SLOWEST * answer.best.prediction.seconds and overrides not in [each[0] for each in layouts]:
            layouts.append((overrides, seconds))
    return layouts


def run(pick: Pick, hardware: Hardware, rounds: int) -> Row:
    """Search, measure, compare. Raises ClusterError and ConfigError."""
    with Cluster(nodes=pick.ranks, rate=pick.rate) as cluster:
        rate = max(link.measured_rate(cluster) for _ in range(3)) / 8
    own = hardware.with_values({"between.rate": rate}, "benchmarks/kit/link.py")
    setting, answer = answer_of(pick, own)
    layouts = layouts_of(pick, setting.config(1), answer, own)
    settings = [Setting((*setting.overrides, *overrides), VOCABULARY) for overrides, _ in layouts]
    found = measure(settings, pick.ranks, pick.rate, rounds, Machine())
    fastest = min(found, key=lambda each: each.median)
    ratios = [first / best for first, best in zip(found[0].seconds, fastest.seconds, strict=True)]
    return Row(
        pick.name,
        statistics.median(ratios),
        standard_error(ratios),
        [(*layout, measured.median) for layout, measured in zip(layouts, found, strict=True)],
    )


def summary(case_rows: Sequence[Row]) -> dict[str, float]:
    """How many picks are near, and the worst."""
    return {
        "cases": len(case_rows),
        "near": sum(row.is_near for row in case_rows),
        "worst_ratio": max((row.ratio for row in case_rows), default=1.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", metavar="NUMBER", help="of 0 to 23; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="append each case's JSON line")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [pick for number, pick in enumerate(picks()) if options.cases is None or number in options.cases]
    hardware, case_rows = load_hardware(HARDWARE), list[Row]()
    try:
        for pick in cases:
            row = run(pick, hardware, options.rounds)
            case_rows.append(row)
            print(f"{row.case}: {row.ratio:.3f} +- {row.error:.3f}", file=sys.stderr, flush=True)
            if options.save is not None:
                with options.save.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    except (ClusterError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cells = [
        [
            row.case,
            " ".join(row.layouts[0][0]) or "as it is",
            *(f"{value:.3f}" for value in row.layouts[0][1:]),
            f"{min(seconds for _, _, seconds in row.layouts):.3f}",
            f"{row.ratio:.3f} ± {row.error:.3f}",
        ]
        for row in case_rows
    ]
    heads = ["case", "its first", "predicted s", "measured s", "fastest s", "ratio"]
    print(table(heads, cells, options.markdown))
    result = summary(case_rows)
    print(f"virtual accelerator; near {result['near']:.0f} of {len(case_rows)}, worst {result['worst_ratio']:.3f}")
    if options.json:
        print(json.dumps(result | {"rows": [asdict(row) for row in case_rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
