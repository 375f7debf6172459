"""Steps whose optimizer state lies off the device, against the bound of their engine: `python -m
benchmarks.speed.offload_step [--rounds 5] [--ratios 0.25 0.5 1 2 4] [--disk FOLDER] [--markdown] [--json]`

One process, virtual accelerator, emulated link (benchmarks/kit/offload_rig.py): passes and the device's update sleep
for their time, copies are real and held to a rate in each direction, the host's update and the disk are real. ratio:
the time that the link needs for all state in one direction, by that of the passes. Engines run in turns, a few steps
each round. bound: what optim/arrangement/engines.py says of the engine's buckets with rates that were measured alone:
early the most of the passes, each direction of the link, the host's update and the disk; waiting the backward pass, and
the most of the forward pass and these; and the time that one bucket takes through what is less busy. auto against the
best engine of its round. Clipping: steps that are clipped redo what was early.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from benchmarks.kit.offload_rig import Rig, Sizes, join
from benchmarks.kit.rounds import standard_error
from benchmarks.kit.tables import table
from optim.arrangement import engines
from optim.arrangement.engines import ElementBytes, Engine, Passes, choose, predict
from optim.offload.bandwidths import measure
from parallel import topology as topology_module
from simulator.offload.state import engine_seconds

PASSES = 0.1, 0.2  # seconds of the forward and of the backward pass
DEVICE_RATE = 20e9  # bytes per second that the virtual device updates
STEPS = 3  # of a round
ENGINES: tuple[Engine | Literal["auto"], ...] = (*engines.ENGINES, "auto")
PATTERNS = {0: (False,) * 10, 10: (True, *(False,) * 9), 50: (True, False) * 5, 100: (True,) * 10}  # percent clipped
BAR, AUTO_BAR = 0.08, 0.05


@dataclasses.dataclass(frozen=True)
class Variant:
    engine: Engine | Literal["auto"]
    early: bool
    tier: str = "host"

    def overrides(self, folder: str | None) -> list[str]:
        """Keys of its config."""
        disk = [f"memory.disk_dir={folder}"] if folder is not None else []
        early = "always" if self.early else "never"
        return [
            f"optimizer.state_device={self.tier}",
            f"optimizer.engine={self.engine}",
            f"optimizer.early_update={early}",
            *disk,
        ]


def set_up(rig: Rig, variant: Variant, ratio: float) -> tuple[float, float]:
    """Hold the rig's link to its rate, have the engine choose its ways as a run does; (the bound of a step, what
    plan=true says of one with these rates) in seconds."""
    tiers, arrangement = rig.tiers, rig.tiers.memory.arrangement
    rig.link(sum(arrangement.sizes) / (ratio * sum(rig.passes)), DEVICE_RATE)
    rates = dataclasses.replace(measured(rig), device=DEVICE_RATE)
    element, passes = ElementBytes.of(arrangement), rig.passes_alone()
    tiers.engines = choose(variant.engine, arrangement.numels, arrangement.targets, element, rates)
    own = Passes(*passes, variant.early)
    planned = engine_seconds(arrangement, sum(passes), rates)
    predicted = min(planned.values()) if variant.engine == "auto" else planned[variant.engine]
    return predict(tiers.engines, arrangement.numels, arrangement.targets, element, rates, own), predicted


def measured(rig: Rig) -> Any:
    """The rig's rates, each alone. Rigs of one engine have no memory for the other's: that of one with both is used."""
    return measure(rig.tiers.memory)


@contextlib.contextmanager
def rigs(variants: Sequence[Variant], sizes: Sizes, folder: str | None) -> Iterator[dict[Variant, Rig]]:
    """One for each variant, all with memory for both engines."""
    topology = join()
    made: dict[Variant, Rig] = {}
    try:
        for variant in variants:
            flexible = dataclasses.replace(variant, engine="split")
            made[variant] = Rig(sizes, PASSES, topology, flexible.overrides(folder))
        yield made
    finally:
        for rig in made.values():
            rig.close()
        topology_module.destroy()


def compare(
    variants: Sequence[Variant], ratios: Sequence[float], rounds: int, folder: str | None
) -> list[dict[str, Any]]:
    """A row for each variant and ratio: bound, median step, standard error of the median."""
    results = []
    with rigs(variants, Sizes(), folder) as made:
        for ratio in ratios:
            bounds = {variant: set_up(rig, variant, ratio) for variant, rig in made.items()}
            times: dict[Variant, list[float]] = {variant: [] for variant in variants}
            for turn in range(rounds):
                order = [*variants[turn % len(variants) :], *variants[: turn % len(variants)]]
                for variant in order:
                    times[variant].append(made[variant].steps(STEPS))
            for variant in variants:
                others = [
                    v for v in variants if (v.early, v.tier) == (variant.early, variant.tier) and v.engine != "auto"
                ]
                best = min(others, key=lambda v: statistics.median(times[v])) if others else variant
                over = [a / b for a, b in zip(times[variant], times[best], strict=True)]
                results.append(
                    {
                        **dataclasses.asdict(variant),
                        "ratio": ratio,
                        "bound": bounds[variant][0],
                        "planned": bounds[variant][1],
                        "step": statistics.median(times[variant]),
                        "error": standard_error(times[variant]),
                        "over_best": statistics.median(over),
                        "over_best_error": standard_error(over),
                    }
                )
    return results


def holds(row: dict[str, Any]) -> bool:
    """Whether the step is within the bar of its bound, or two standard errors of that; auto also of the best engine."""
    within = row["step"] <= (1 + BAR) * row["bound"] + 2 * row["error"]
    return within and (row["engine"] != "auto" or row["over_best"] <= 1 + AUTO_BAR + 2 * row["over_best_error"])


def clipping(rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step, early, by how many of ten steps are clipped; the link takes as long as the passes."""
    variants = [Variant(engine, True) for engine in ("device_stream", "host")]
    results = []
    with rigs(variants, Sizes(), None) as made:
        for variant, rig in made.items():
            set_up(rig, variant, 1.0)
        for variant, rig in made.items():
            for percent, pattern in PATTERNS.items():
                times = [rig.steps(len(pattern), pattern) for _ in range(rounds)]
                results.append({"engine": variant.engine, "clipped": percent, "step": statistics.median(times)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--disk", metavar="FOLDER", help="measure state on this folder's disk too, at ratio 1")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    variants = [Variant(engine, early) for early in (False, True) for engine in ENGINES]
    results = compare(variants, args.ratios, args.rounds, None)
    if args.disk is not None:
        on_disk = [Variant(engine, early, "disk") for early in (False, True) for engine in ("device_stream", "host")]
        results += compare(on_disk, [1.0], args.rounds, args.disk)
    cells = [
        [
            row["tier"],
            "early" if row["early"] else "waiting",
            f"{row['ratio']:g}",
            row["engine"],
            f"{row['bound']:.3f}",
            f"{row['step']:.3f}",
            f"{row['error']:.3f}",
            f"{row['step'] / row['bound'] - 1:+.1%}",
            f"{row['step'] / row['planned'] - 1:+.1%}",
            f"{row['over_best'] - 1:+.1%}" if row["engine"] == "auto" else "",
            "yes" if holds(row) else "no",
        ]
        for row in results
    ]
    headings = [
        "state on",
        "update",
        "ratio",
        "engine",
        "bound s",
        "step s",
        "error s",
        "over bound",
        "over plan",
        "over best",
        "holds",
    ]
    print(table(headings, cells, args.markdown))
    clipped = clipping(max(args.rounds // 2, 1))
    print()
    lines = [[row["engine"], f"{row['clipped']}%", f"{row['step']:.3f}"] for row in clipped]
    print(table(["early, ratio 1", "steps clipped", "step s"], lines, args.markdown))
    if args.json:
        print(json.dumps({"rows": results, "clipping": clipped}))


if __name__ == "__main__":
    main()
