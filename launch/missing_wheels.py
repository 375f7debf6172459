"""`python launch/missing_wheels.py DIR`: print the wheels in a folder whose packages this Python lacks, one per line. A
package that is installed in another version is not replaced, because an image's packages fit each other. Needs only the
standard library, since it runs before anything is installed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def main() -> int:
    """Print the wheels in a folder whose packages this Python lacks, sorted by name."""
    for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
        try:
            metadata.version(wheel.name.partition("-")[0])
        except metadata.PackageNotFoundError:
            print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
