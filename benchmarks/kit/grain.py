"""Size of the product's source: files, functions and lines of its Python, per package.

    python -m benchmarks.kit.grain [COMMIT] [--markdown]

Counts the working tree, or a commit, without tests, benchmarks and `__init__.py` files of fewer than 5 lines.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.kit import tables

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("tests", "benchmarks")  # folders that are no product
LEAST_INIT_LINES = 5
COLUMNS = ("files", "functions", "lines")


def sources(commit: str | None) -> dict[str, str]:
    """Return the text of each Python file of the product, by its path. Raises CalledProcessError for no such commit."""
    listing = ["git", "ls-tree", "-r", "--name-only", commit] if commit else ["git", "ls-files"]
    names = _git(listing).splitlines()
    chosen = [name for name in names if name.endswith(".py") and name.split("/")[0] not in LEFT_OUT]
    if commit:
        return {name: _git(["git", "show", f"{commit}:{name}"]) for name in chosen}
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in chosen if (ROOT / name).is_file()}


def count(files: dict[str, str]) -> dict[str, Counter[str]]:
    """Return the counts of COLUMNS for each package (a file at the top is a package of its own)."""
    found: dict[str, Counter[str]] = {}
    for name, text in files.items():
        num_lines = len(text.splitlines())
        if Path(name).name == "__init__.py" and num_lines < LEAST_INIT_LINES:
            continue
        num_functions = sum(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(text)))
        counts = zip(COLUMNS, (1, num_functions, num_lines), strict=True)
        found.setdefault(name.split("/")[0], Counter()).update(dict(counts))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table of counts; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kit.grain", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("commit", nargs="?", help="a commit instead of the working tree")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    counts = count(sources(options.commit))
    counts["all"] = sum(counts.values(), Counter())
    cells = [[name, *(f"{found[column]:,}" for column in COLUMNS)] for name, found in counts.items()]
    print(tables.table(["package", *COLUMNS], cells, options.markdown))
    return 0


def _git(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
