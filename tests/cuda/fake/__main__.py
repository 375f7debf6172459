"""Every preset at its real widths and layouts through torch's FakeTensorMode, on a CUDA device without numbers:
python -m tests.cuda.fake [PRESET ...] [--quick] [--faults] [--json] [--markdown].

A line is one rank of a preset's world, that of a kind of pipeline stage. It takes two whole steps on a fake process
group, with one layer of each kind. A step that needs the value of a tensor of the device ends in an error but at the
places that may read one. Shown are the host's waits for the device in the second step, grouped products, and the bytes
that were in use at once beside the plan's (`plan=true`) for the same config; last what the activations alone would be.
--quick: presets as their experiments have them, without further layouts. --faults: does also what must be noticed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    """Start the process that has the device: its guard must be loaded before torch."""
    from tests.cuda.pretended import build

    code = f"import ctypes; ctypes.CDLL({str(build.guard())!r}, ctypes.RTLD_GLOBAL)"
    code = f"{code}; from tests.cuda.fake import __main__; __main__.sweep()"
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code, *sys.argv[1:]], cwd=ROOT).returncode


def sweep() -> None:
    """In that process."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.fake", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    for flag in ("--quick", "--faults", "--json", "--markdown"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()

    from tests.cuda.fake import replaced

    replaced.install()
    from tests.cuda.fake import faults, show
    from tests.cuda.fake.cases import cases
    from tests.cuda.fake.measure import measure

    result: dict[str, Any] = {"found": []}
    print(show.head(args.markdown), flush=True)
    for case in cases(args.presets):
        if args.quick and case.variant:
            continue
        for rank in case.ranks():
            found = measure(case, rank)
            result["found"].append(found.as_dict())
            print(show.line(found, args.markdown), flush=True)
    if args.faults:
        result |= {"refused": faults.refused(), "noticed": faults.noticed()}
        print(json.dumps(result["refused"], indent=4))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
