"""The clock against measured steps of an emulated cluster: `python -m benchmarks.speed.clock_accuracy [--rounds 3]
[--kinds pipeline ...] [--save FILE] [--measured FILE ...] [--markdown] [--json]`

Forty cases (emulated_cases.py) are measured as emulated_step.py does. The figures of configs/hardware/cpu_emulated.yaml
are fitted to the steps of one half, and then the others' steps are predicted: trainings of kinds that the fit has not
seen. A case's link rate is what its cluster's links were measured to carry; nothing else is told of a case.

`--save` appends what is measured to a file of JSON lines, one for each case and round; `--measured` reads such files in
place of measuring. `--write` makes a file of the fitted figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.kit.cluster import ClusterError
from benchmarks.kit.emulated_cases import CASES, Case
from benchmarks.kit.emulated_settings import Machine
from benchmarks.kit.emulated_step import Measured, measure
from benchmarks.kit.tables import table
from configs.job import Job
from simulator.clock.hardware import Hardware, hardware_yaml, load_hardware
from simulator.clock.predict import predict_step
from simulator.fit import fit
from simulator.measured_steps import MeasuredStep

HARDWARE, RATE, ERROR = "cpu_emulated", "between.rate", "mean_absolute_error_percent"
SAME = 0.01  # share by which a fit changes a figure at least
MEAN_GOAL, WORST_GOAL = 0.05, 0.15


@dataclass(frozen=True)
class Row:
    """A case: seconds, and what they differ by."""

    kind: str
    fitted: bool
    ranks: int
    rate: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


def measure_all(cases: Sequence[Case], rounds: int, save: Path | None) -> dict[str, Measured]:
    """By a case's name. Raises ClusterError."""
    found: dict[str, Measured] = {}
    for ranks, rate in dict.fromkeys((case.ranks, case.rate) for case in cases):
        chosen = [case for case in cases if (case.ranks, case.rate) == (ranks, rate)]

        def told(index: int, measured: Measured, chosen: list[Case] = chosen) -> None:
            case = chosen[index]
            print(f"{case.name}: {measured.seconds[-1]:.3f} s", file=sys.stderr, flush=True)
            if save is not None:
                line = {"case": case.name, "seconds": measured.seconds[-1], "bytes_per_second": measured.rates[-1]}
                with save.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

        settings = [case.setting for case in chosen]
        results = measure(settings, ranks, rate, rounds, Machine(), told)
        found |= {case.name: result for case, result in zip(chosen, results, strict=True)}
    return found


def read(files: Sequence[Path]) -> dict[str, Measured]:
    """What `--save` has written."""
    found: dict[str, Measured] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            measured = found.setdefault(values["case"], Measured())
            measured.seconds.append(values["seconds"])
            measured.rates.append(values["bytes_per_second"])
    return found


def fitted(cases: Sequence[Case], found: dict[str, Measured], hardware: Hardware) -> Hardware:
    """The hardware with figures from the cases that are for that."""
    steps = []
    for case in cases:
        if case.is_fitted:
            measured, config = found[case.name], case.setting.config(case.ranks)
            link = ((RATE, measured.rate),)
            job = Job(config, case.ranks, case.setting.vocab_size, "cpu")
            steps.append(MeasuredStep(case.name, job, measured.median, figures=link))
    if not steps:
        return hardware
    return fit(hardware, steps, f"fitted to {len(steps)} steps by benchmarks/speed/clock_accuracy.py")


def compare(cases: Sequence[Case], found: dict[str, Measured], hardware: Hardware) -> list[Row]:
    """Predictions beside what was measured."""
    compared = []
    for case in cases:
        measured = found[case.name]
        own = hardware.with_values({RATE: measured.rate}, "benchmarks/kit/link.py")
        config = case.setting.config(case.ranks)
        seconds = predict_step(Job(config, case.ranks, case.setting.vocab_size, "cpu"), own).seconds
        compared.append(Row(case.kind, case.is_fitted, case.ranks, case.rate, measured.median, seconds))
    return compared


def with_errors(hardware: Hardware, compared: Sequence[Row]) -> Hardware:
    """The hardware as its file has it: a figure as stated where the fit left it there, and a case's own link; and what
    the predictions were off by."""
    stated = load_hardware(HARDWARE).as_stated().figures
    figures = {
        name: stated[name] if name == RATE or abs(figure.value - stated[name].value) <= SAME * figure.value else figure
        for name, figure in hardware.figures.items()
    }
    tests = []
    for is_fitted, what in ((False, "of kinds that were not fitted to"), (True, "which the figures were fitted to")):
        errors = [100 * abs(row.error) for row in compared if row.fitted is is_fitted]
        if errors:
            error = round(statistics.mean(errors), 2)
            tests.append({"of": f"steps of the emulated cluster, {what}", "count": len(errors), ERROR: error})
    return replace(hardware, figures=figures, errors=tuple(tests))


def summary(compared: Sequence[Row]) -> dict[str, float]:
    """Mean and largest errors, in percent, of both halves."""
    result: dict[str, float] = {}
    for name, half in (("fitted", True), ("predicted", False)):
        errors = [100 * abs(row.error) for row in compared if row.fitted is half]
        if errors:
            result |= {f"{name}_mean_error_percent": statistics.mean(errors), f"{name}_worst_percent": max(errors)}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", metavar="WORD", help="cases whose kind has one of these words")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--measured", type=Path, nargs="+", metavar="FILE")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="of the fitted hardware, as configs/hardware has them"
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.kinds or any(word in case.kind for word in options.kinds)]
    try:
        found = read(options.measured) if options.measured else measure_all(cases, options.rounds, options.save)
    except (ClusterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cases = [case for case in cases if case.name in found]
    hardware = fitted(cases, found, load_hardware(HARDWARE))
    compared = compare(cases, found, hardware)
    if options.write is not None:
        options.write.write_text(hardware_yaml(with_errors(hardware, compared)), encoding="utf-8")
    heads = ["kind", "ranks", "links", "half", "measured s", "predicted s", "error"]
    cells = [
        [
            *(row.kind, str(row.ranks), row.rate, "fitted" if row.fitted else "predicted"),
            *(f"{row.measured:.3f}", f"{row.predicted:.3f}", f"{row.error:+.1%}"),
        ]
        for row in compared
    ]
    print(table(heads, cells, options.markdown))
    result = summary(compared)
    print("virtual accelerator; " + ", ".join(f"{name} {value:.1f}" for name, value in result.items()))
    if options.json:
        print(json.dumps(result | {"rows": [asdict(row) for row in compared]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
