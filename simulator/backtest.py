"""Compare predicted with measured steps of real clusters.

    python -m simulator.backtest ROWS.csv [MORE.csv ...] --hardware NAME [--json] [--rows]

ROWS are CSV files of measured steps in the columns of vTrain's validation data (benchmarks/traces/vtrain), or folders
of runs. Steps with the same model, number of ranks and global batch form a group. In each group the layouts are ranked,
and the layout with the shortest predicted step is compared with the one that was measured as fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from base.exit_handler import WRONG_CONFIG
from simulator.clock.hardware import load_hardware
from simulator.fit import kendall, predicted
from simulator.measured_steps import MeasuredStep, read_steps

CLOSE = 1.05  # multiple of the fastest measured step up to which a choice counts as right


def result(steps: list[MeasuredStep], seconds: list[float]) -> dict[str, Any]:
    """Compare predicted seconds with measured ones: errors in percent, rank correlations, quality of choices.

    `worst_choice` is the measured time of the predicted-best layout, divided by that of the measured-best one.
    """
    errors = [100 * abs(each / step.seconds - 1) for step, each in zip(steps, seconds, strict=True)]
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for step, each in zip(steps, seconds, strict=True):
        groups[step.group].append((step.seconds, each))
    several = [of for of in groups.values() if len(of) > 1]
    taus = [kendall([a for a, _ in of], [b for _, b in of]) for of in several]
    chosen = [min(of, key=lambda pair: pair[1])[0] / min(a for a, _ in of) for of in several]
    return {
        "steps": len(steps),
        "mean_absolute_error_percent": statistics.fmean(errors),
        "median_absolute_error_percent": statistics.median(errors),
        "worst_absolute_error_percent": max(errors),
        "kendall_tau": kendall([step.seconds for step in steps], seconds) if len(steps) > 1 else None,
        "groups": len(several),
        "kendall_tau_within_groups": statistics.fmean(taus) if taus else None,
        "choices_within_5_percent": sum(each <= CLOSE for each in chosen) / len(chosen) if chosen else None,
        "worst_choice": max(chosen) if chosen else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m simulator.backtest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", type=Path, metavar="ROWS", help="CSV files, or folders of runs")
    parser.add_argument("--hardware", required=True, metavar="NAME", help="a file of configs/hardware, or a path")
    parser.add_argument("--rows", dest="each", action="store_true", help="print every step")
    parser.add_argument("--json", action="store_true", help="end with a line for scripts")
    args = parser.parse_args()
    try:
        hardware, steps = load_hardware(args.hardware), read_steps(args.rows)
        seconds = [predicted(step, hardware) for step in steps]
    except ConfigError as error:
        print(f"backtest error: {error}", file=sys.stderr)
        return WRONG_CONFIG
    found = {"hardware": hardware.name, **result(steps, seconds)}
    if args.each:
        for step, each in zip(steps, seconds, strict=True):
            share = each / step.seconds - 1
            print(f"{step.name}: measured {step.seconds:.4g} s, predicted {each:.4g} s ({share:+.1%})")
    print(
        f"{found['steps']} steps on {hardware.name}: mean absolute error {found['mean_absolute_error_percent']:.2f}%, "
        f"worst {found['worst_absolute_error_percent']:.1f}%"
    )
    if found["groups"]:
        print(
            f"{found['groups']} groups of layouts: Kendall's tau {found['kendall_tau_within_groups']:.3f} "
            f"(of all steps {found['kendall_tau']:.3f}); the first choice is within 5% of the fastest in "
            f"{found['choices_within_5_percent']:.0%}, the worst takes {found['worst_choice']:.2f} times as long"
        )
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
