"""`python launch/system_torch.py CONSTRAINTS`: the pins for an installation around the torch that this Python has.

They are those of the file, with this torch's version, and without its own dependencies, which came with it. Standard
library alone, since it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

NEWEST_EXCLUDED, OLDEST = (2, 14), (2, 11)  # as pyproject.toml has it
OF_ITS_OWN = ("nvidia-", "cuda-", "triton")  # of another CUDA than the file's torch has


def normalized(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(lines: list[str], torch_version: str, torch_requires: list[str]) -> list[str]:
    """The lines of a file of constraints without the packages that torch brings, and torch at that version."""
    of_torch = {normalized(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in torch_requires} | {"torch"}
    kept = [
        line
        for line in lines
        if "==" in line and not line.startswith(OF_ITS_OWN) and normalized(line.partition("==")[0]) not in of_torch
    ]
    return [*kept, f"torch=={torch_version}"]


def main() -> int:
    """Prints the constraints; 1 with one line if this torch is not one that Mixtrain runs on."""
    version = metadata.version("torch")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
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
