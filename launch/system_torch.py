"""`python launch/system_torch.py CONSTRAINTS`: print version pins for an installation that keeps this Python's torch.
They are the pins in the file CONSTRAINTS, without torch's dependencies, which are installed already, and with this
torch's version. Needs only the standard library, since it runs before anything is installed."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

NEWEST_EXCLUDED, OLDEST = (2, 14), (2, 11)  # as in pyproject.toml
OF_ITS_OWN = ("nvidia-", "cuda-", "triton")  # of the CUDA version of the file's torch


def normalized(name: str) -> str:
    """Return a package's name in the form in which pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(lines: list[str], torch_version: str, torch_requires: list[str]) -> list[str]:
    """Return the lines of a constraints file without the packages that torch requires, plus torch at its own
    version."""
    of_torch = {normalized(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in torch_requires} | {"torch"}
    kept = [
        line
        for line in lines
        if "==" in line and not line.startswith(OF_ITS_OWN) and normalized(line.partition("==")[0]) not in of_torch
    ]
    return [*kept, f"torch=={torch_version}"]


def main() -> int:
    """Print constraints with which pip keeps the installed torch, and return 0. For a torch version that Mixtrain does
    not support, print one line and return 1."""
    version = metadata.version("torch")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < NEWEST_EXCLUDED:
        print(
            f"torch {version}: Mixtrain runs on 2.11 to 2.13. Leave --system-torch out to install 2.13.0",
            file=sys.stderr,
        )
        return 1
    requires = [text for text in metadata.requires("torch") or [] if "extra ==" not in text]
    print("\n".join(constraints(Path(sys.argv[1]).read_text().splitlines(), version, requires)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
