"""`python -m training.report RUN_DIR [--output FILE]`: write RUN_DIR/report.html, a page that works without a
network."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from base import command
from training.report.page import render


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.report", description="One HTML page that shows a run, without a network."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that the run writes to")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write; default RUN_DIR/report.html")
    options = parser.parse_args(arguments)

    def body() -> None:
        path = render.write(options.run_dir, options.output)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")

    return command.run(body)


if __name__ == "__main__":
    sys.exit(main())
