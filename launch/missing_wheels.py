"""`python launch/missing_wheels.py DIR`: the wheels of a folder whose packages this Python lacks, one a line.

A package that is there in another version stays: an image's own fit each other. Standard library alone, since it runs
before anything is installed.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def is_missing(wheel: Path) -> bool:
    """Whether no version of a wheel's package is installed."""
    try:
        metadata.version(wheel.name.partition("-")[0])
    except metadata.PackageNotFoundError:
        return True
    return False


def main() -> int:
    """Print them, by name."""
    for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
        if is_missing(wheel):
            print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
