"""Figures of a machine from measured steps.

    python -m simulator.fit ROWS.csv [MORE.csv ...] --hardware NAME [--start NAME]
    python -m simulator.fit RUN [RUN ...] --hardware NAME --start NAME

ROWS are measured steps in the columns of vTrain's validation data, or folders of runs of this project, of which each
gives the median of its steps. The file configs/hardware/NAME.yaml is written, or NAME where it is a path that ends in
.yaml. It begins with what the sources in it state, or in --start where it is new. A file that was there is kept beside
it as NAME.yaml.old, with a number behind that where this one is there too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import hardware_files
from configs.exit_status import WRONG_CONFIG
from configs.schema import ConfigError
from simulator.clock import files
from simulator.clock.hardware import FIGURES, Hardware
from simulator.fit.fitting import fit, mean_error
from simulator.fit.rows import MeasuredStep, read_rows
from simulator.fit.runs import read_run

DEFAULT_START = "a100_8x"


def read(paths: list[Path]) -> list[MeasuredStep]:
    """The steps of CSV files and of runs' folders. Raises ConfigError."""
    return [step for path in paths for step in ([read_run(path)] if path.is_dir() else read_rows(path))]


def back_test(steps: list[MeasuredStep], hardware: Hardware, of: str) -> Mapping[str, Any]:
    """What a machine's file says of how good its figures are."""
    error = mean_error(steps, hardware)
    return {"of": of, "count": len(steps), "mean_absolute_error_percent": round(error, 2), "fitted_to": True}


def _kept(path: Path) -> Path:
    """Where the file that is there goes."""
    number, kept = 1, path.with_name(f"{path.name}.old")
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.old{number}")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m simulator.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", type=Path, metavar="ROWS", help="CSV files, or folders of runs")
    parser.add_argument("--hardware", required=True, metavar="NAME", help="the file that is written")
    parser.add_argument("--start", metavar="NAME", help="the file that a new one begins with")
    parser.add_argument("--json", action="store_true", help="end with a line for scripts")
    args = parser.parse_args()
    try:
        is_path = args.hardware.endswith(".yaml")
        path = Path(args.hardware) if is_path else hardware_files.FOLDER / f"{args.hardware}.yaml"
        if not is_path and not args.hardware.replace("_", "").isalnum():
            raise ConfigError(f"--hardware ({args.hardware}) must be letters, digits and _, or a path ending in .yaml.")
        start = files.load(args.start or (str(path) if path.exists() else DEFAULT_START))
        steps = read(args.rows)
        of = ", ".join(each.name for each in args.rows)
        found = fit(start, steps, f"fitted to {len(steps)} steps of {of}")
    except ConfigError as error:
        print(f"fit error: {error}", file=sys.stderr)
        return WRONG_CONFIG
    tested = back_test(steps, found, f"{of}, which the figures were fitted to")
    text = files.as_yaml(Hardware(path.stem, found.kind, found.about, found.figures, (tested,)))
    kept = None
    if path.exists():
        kept = _kept(path)
        path.rename(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    for name, figure in found.figures.items():
        if figure.stated is not None and abs(figure.value / figure.stated - 1) >= 0.01:
            print(f"{name}: {figure.value:.4g} {FIGURES[name][0]}, stated {figure.stated:.4g}")
    print(f"{len(steps)} steps, mean absolute error {tested['mean_absolute_error_percent']}% on these themselves")
    print(f"written: {path}" + (f"; what was there is {kept}" if kept else ""))
    if args.json:
        print(json.dumps({"hardware": str(path), **tested, "values": {k: v.value for k, v in found.figures.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
