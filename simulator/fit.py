"""Fit a hardware's figures to measured steps.

    python -m simulator.fit ROWS.csv [MORE.csv ...] --hardware NAME [--start NAME]
    python -m simulator.fit RUN [RUN ...] --hardware NAME --start NAME

ROWS are CSV files of measured steps in the columns of vTrain's validation data; a RUN is the folder of a run of this
project, which contributes the median of its steps. The result is written to configs/hardware/NAME.yaml, or to NAME if
it is a path that ends in .yaml. The fit starts with the values that the file's sources state, or for a new file with
those of --start. An existing file is kept as NAME.yaml.old, or with a number after that name if it is taken.

The most probable figures are found, with the stated ones as the prior: every figure that a fit may change can differ by
a factor. Relative errors of predictions count; large errors count linearly (Huber), because one disturbed step tells
nothing about the others. So a few rows change a few figures, and many rows change all of them. Errors of steps on the
same number of ranks are correlated: four times as many such steps count twice as much.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

from base.errors import ConfigError
from base.exit_handler import WRONG_CONFIG
from configs import hardware_files
from simulator.clock.hardware import FIGURES, Hardware, hardware_yaml, load_hardware
from simulator.clock.predict import StepClock
from simulator.measured_steps import MeasuredStep, read_steps

DEFAULT_START = "a100_8x"
NOISE = 0.06  # relative error of a prediction that no figure explains
FAR = 1.0  # multiple of NOISE from which errors count linearly, not squared
RATE_PRIOR, TIME_PRIOR = 0.5, 1.0  # standard deviations of the logarithm of a figure over its stated value
ITERATIONS = 25
LEAST_GAIN = 1e-3  # relative decrease of the cost at which the fit has converged
SAME = 1e-6  # change of a logarithm below which a figure counts as unchanged
NUDGE = 1e-2  # step of a logarithm for numerical derivatives


def predicted(step: MeasuredStep, hardware: Hardware) -> float:
    """Return the predicted seconds of a measured step."""
    return StepClock(step.job, step.on(hardware), recipe=step.recipe).predict().seconds


def fit(hardware: Hardware, steps: Sequence[MeasuredStep], source: str) -> Hardware:
    """Fit the hardware's figures to measured steps, starting from their sources' values instead of an earlier fit.

    Raises ConfigError if there are no steps.
    """
    if not steps:
        raise ConfigError(
            "steps is empty; a fit needs at least one measured step. Give a CSV file of steps or a run's folder."
        )
    start = hardware.as_stated()
    names = [name for name, (_, _, may_change) in FIGURES.items() if may_change and start[name] > 0]
    measured = np.log([step.seconds for step in steps])
    of_ranks = Counter(step.job.world_size for step in steps)
    counts = np.array([of_ranks[step.job.world_size] ** -0.5 for step in steps])
    counts *= len(steps) / counts.sum()
    first = np.log([start[name] for name in names])
    prior = np.array([TIME_PRIOR if FIGURES[name][0] == "s" else RATE_PRIOR for name in names])

    def log_seconds(values: np.ndarray) -> np.ndarray:
        hardware = start.with_values(dict(zip(names, np.exp(values).tolist(), strict=True)), source)
        return np.log([predicted(step, hardware) for step in steps])

    def cost(values: np.ndarray, error: np.ndarray) -> float:
        size = np.abs(error) / NOISE
        far = np.where(size < FAR, size**2 / 2, FAR * (size - FAR / 2))
        return float(counts @ far + (((values - first) / prior) ** 2).sum() / 2)

    values, now = first.copy(), log_seconds(first)
    best, damping = cost(values, now - measured), 1e-2
    free = np.arange(len(names))
    for _ in range(ITERATIONS):
        slopes = np.zeros((len(steps), len(names)))
        for index in free:
            nudged = values.copy()
            nudged[index] += NUDGE
            slopes[:, index] = (log_seconds(nudged) - now) / NUDGE
        free = np.flatnonzero(np.abs(slopes).max(0) > 0)  # figures without influence are not tried again
        error = (now - measured) / NOISE
        weights = counts * np.minimum(1.0, FAR / np.maximum(np.abs(error), 1e-9))
        curvature = (slopes.T * weights) @ slopes / NOISE**2 + np.diag(1 / prior**2)
        gradient = (slopes.T * weights) @ error / NOISE + (values - first) / prior**2
        before = best
        for _ in range(8):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            tried = values + step
            seconds = log_seconds(tried)
            if (tried_cost := cost(tried, seconds - measured)) < best:
                values, now, best, damping = tried, seconds, tried_cost, max(damping / 5, 1e-7)
                break
            damping *= 5
        if before - best <= LEAST_GAIN * best:
            break
    changed = np.abs(values - first) > SAME
    found = {name: math.exp(value) for name, value, new in zip(names, values, changed, strict=True) if new}
    return start.with_values(found, source)


def mean_error(steps: Sequence[MeasuredStep], hardware: Hardware) -> float:
    """Return the mean absolute error of the predicted seconds, in percent."""
    return 100 * sum(abs(predicted(step, hardware) / step.seconds - 1) for step in steps) / len(steps)


def kendall(measured: Sequence[float], predicted_seconds: Sequence[float]) -> float:
    """Return Kendall's tau-b: concordant minus discordant pairs, divided by the pairs without ties."""
    # 1, 0 or -1 for each ordered pair. The factor 2 of counting each pair twice cancels.
    first, second = (np.sign(np.subtract.outer(each, each)) for each in (measured, predicted_seconds))
    below = math.sqrt(np.abs(first).sum() * np.abs(second).sum())
    return float((first * second).sum()) / below if below else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m simulator.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", type=Path, metavar="ROWS", help="CSV files, or folders of runs")
    parser.add_argument("--hardware", required=True, metavar="NAME", help="the file to write")
    parser.add_argument("--start", metavar="NAME", help="the file whose stated figures a new file starts with")
    parser.add_argument("--json", action="store_true", help="end with a line for scripts")
    args = parser.parse_args()
    try:
        is_path = args.hardware.endswith(".yaml")
        path = Path(args.hardware) if is_path else hardware_files.FOLDER / f"{args.hardware}.yaml"
        if not is_path and not args.hardware.replace("_", "").isalnum():
            raise ConfigError(
                f"--hardware ({args.hardware}) must consist of letters, digits and _, or be a path that ends in .yaml. "
                "Use a name such as my_cluster."
            )
        start = load_hardware(args.start or (str(path) if path.exists() else DEFAULT_START))
        steps = read_steps(args.rows)
        of = ", ".join(each.name for each in args.rows)
        found = fit(start, steps, f"fitted to {len(steps)} steps of {of}")
    except ConfigError as error:
        print(f"fit error: {error}", file=sys.stderr)
        return WRONG_CONFIG
    tested = {
        "of": f"{of}, which the figures were fitted to",
        "count": len(steps),
        "mean_absolute_error_percent": round(mean_error(steps, found), 2),
        "fitted_to": True,
    }
    text = hardware_yaml(Hardware(path.stem, found.kind, found.about, found.figures, (tested,)))
    kept = None
    if path.exists():
        names = (path.with_name(f"{path.name}.old{number if number > 1 else ''}") for number in count(1))
        kept = path.rename(next(name for name in names if not name.exists()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    for name, figure in found.figures.items():
        if figure.stated is not None and abs(figure.value / figure.stated - 1) >= 0.01:
            print(f"{name}: {figure.value:.4g} {FIGURES[name][0]}, stated {figure.stated:.4g}")
    print(f"mean absolute error {tested['mean_absolute_error_percent']}% on the {len(steps)} steps of the fit")
    print(f"written: {path}" + (f"; the earlier file is now {kept}" if kept else ""))
    if args.json:
        print(json.dumps({"hardware": str(path), **tested, "values": {k: v.value for k, v in found.figures.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
