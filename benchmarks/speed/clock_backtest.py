"""The clock against measured steps of real clusters: `python -m benchmarks.speed.clock_backtest [--seeds 10] [--models
N] [--markdown] [--json]`

The steps are half of vTrain's (benchmarks/traces/vtrain): GPT on 2 to 8 and on 64 to 512 A100. Three tests, each of
figures that start from what the sources in configs/hardware/a100_8x.yaml state:

* all rows: fitted to them and compared with them. How good the form is, not how good predictions are;
* a model held out: its rows are predicted by figures that are fitted to all other models' rows of the same file;
* 20 rows: drawn by seeds, and all others predicted by a fit to these.
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

from benchmarks.kit.tables import table
from simulator.backtest import result
from simulator.clock.hardware import Hardware, load_hardware
from simulator.fit import fit, mean_error, predicted
from simulator.measured_steps import MeasuredStep, read_rows

FOLDER = Path(__file__).resolve().parents[1] / "traces" / "vtrain"
FILES = ("single_node.csv", "multi_node.csv")
HARDWARE, FEW = "a100_8x", 20


@dataclass(frozen=True)
class TestRow:
    """A test: of which file, how many rows were fitted to and predicted, and the mean absolute error in percent."""

    __test__ = False
    name: str
    file: str
    fitted: int
    predicted: int
    error: float
    tau: float | None = None  # Kendall's, the mean of groups
    close: float | None = None  # share of groups whose first choice is within 5% of the fastest
    worst: float | None = None  # the slowest first choice, over the fastest of its group


def _model(step: MeasuredStep) -> tuple[int, int]:
    return step.job.config.model.hidden_size, step.job.config.model.num_layers


def _compared(name: str, file: str, number: int, steps: Sequence[MeasuredStep], machine: Hardware) -> TestRow:
    found = result(list(steps), [predicted(step, machine) for step in steps])
    of_groups = found["kendall_tau_within_groups"], found["choices_within_5_percent"], found["worst_choice"]
    return TestRow(name, file, number, len(steps), found["mean_absolute_error_percent"], *of_groups)


def tests(file: str, seeds: int, models: int | None = None) -> list[TestRow]:
    """All tests of a file's rows, or of those of its smallest `models`."""
    start, steps = load_hardware(HARDWARE).as_stated(), read_rows(FOLDER / file)
    kept = sorted(set(map(_model, steps)))[:models]
    steps = [step for step in steps if _model(step) in kept]
    test_rows = [_compared("as stated", file, 0, steps, start)]
    test_rows.append(_compared("all rows", file, len(steps), steps, fit(start, steps, "these rows")))
    for model in kept:
        others = [step for step in steps if _model(step) != model]
        own = [step for step in steps if _model(step) == model]
        name = f"held out: hidden {model[0]}, {model[1]} layers"
        test_rows.append(_compared(name, file, len(others), own, fit(start, others, "others' rows")))
    errors = []
    for seed in range(seeds):
        few = random.Random(seed).sample(steps, FEW)
        others = [step for step in steps if step not in few]
        errors.append(mean_error(others, fit(start, few, "few rows")))
    if errors:
        middle = statistics.median(errors)
        test_rows.append(TestRow(f"{FEW} rows, median of {seeds} seeds", file, FEW, len(steps) - FEW, middle))
        test_rows.append(TestRow(f"{FEW} rows, worst of {seeds} seeds", file, FEW, len(steps) - FEW, max(errors)))
    return test_rows


def _cells(row: TestRow) -> list[str]:
    shares = ["-" if row.tau is None else f"{row.tau:.3f}", "-" if row.close is None else f"{row.close:.0%}"]
    shares.append("-" if row.worst is None else f"{row.worst:.2f}")
    return [row.file, row.name, str(row.fitted), str(row.predicted), f"{row.error:.2f}%", *shares]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--models", type=int, help="the smallest models alone")
    parser.add_argument("--files", nargs="+", default=list(FILES), choices=FILES)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    test_rows = [row for file in args.files for row in tests(file, args.seeds, args.models)]
    heads = ["rows", "test", "fitted to", "compared", "mean error", "tau in groups", "choices near", "worst choice"]
    print(table(heads, [_cells(row) for row in test_rows], args.markdown))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in test_rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
