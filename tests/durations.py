"""Seconds that each test takes, and what it starts: `pytest --durations-file=PATH` writes a line per test.

The columns are wall-clock seconds, CPU seconds (user and system, of pytest, of the ranks and of every program that has
ended), calls on ranks, programs started, and the test. CPU seconds say what a test costs on a machine that others use.
`python -m tests.durations PATH...` prints the totals and the longest tests of such files as Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests import distributed

COLUMNS = "wall_s\tcpu_s\tcalls_on_ranks\tprograms\ttest"
LONGEST = 30


class Used(NamedTuple):
    """What one test took, or all up to a moment."""

    wall: float = 0.0
    cpu: float = 0.0
    calls: int = 0
    programs: int = 0

    def plus(self, other: Used, sign: int = 1) -> Used:
        return Used(
            self.wall + sign * other.wall,
            self.cpu + sign * other.cpu,
            self.calls + sign * other.calls,
            self.programs + sign * other.programs,
        )


class Recorder:
    """The plugin that writes the file. A fixture of several tests counts for the first that asks for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.programs = 0
        sys.addaudithook(self._hear)
        path.write_text(COLUMNS + "\n")

    def _hear(self, event: str, _: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self.programs += 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self._now()
        result = yield
        used = self._now().plus(before, -1)
        with self.path.open("a") as file:
            file.write(f"{used.wall:.2f}\t{used.cpu:.2f}\t{used.calls}\t{used.programs}\t{item.nodeid}\n")
        return result

    def _now(self) -> Used:
        return Used(time.monotonic(), _cpu_seconds(), distributed.calls(), self.programs)


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for backend in distributed.backends():  # living children are in none of the two
        for pid in distributed.pids(backend):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                seconds += times.user + times.system
    return seconds


def read(path: Path) -> dict[str, Used]:
    """The tests of a file by their names."""
    used = {}
    for line in path.read_text().splitlines()[1:]:
        wall, cpu, calls, programs, test = line.split("\t", 4)
        used[test] = Used(float(wall), float(cpu), int(calls), int(programs))
    return used


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="files that pytest --durations-file=PATH wrote")
    tests: dict[str, Used] = {}
    totals: dict[str, Used] = defaultdict(Used)
    modules: dict[str, Used] = defaultdict(Used)
    for path in parser.parse_args().files:
        used_by_test = read(path)
        tests |= used_by_test
        on_ranks = sum(used.calls > 0 for used in used_by_test.values())
        name = f"all {len(used_by_test)} tests of {path.stem}, {on_ranks} on ranks"
        for test, used in used_by_test.items():
            totals[name] = totals[name].plus(used)
            modules[test.split("::")[0]] = modules[test.split("::")[0]].plus(used)
    _print("part", totals)
    _print("test", tests)
    _print("file", modules)


def _print(what: str, used_by_name: Mapping[str, Used]) -> None:
    print(f"| CPU s | wall s | calls on ranks | programs | {what} |\n|---|---|---|---|---|")
    for name in sorted(used_by_name, key=lambda name: -used_by_name[name].cpu)[:LONGEST]:
        used = used_by_name[name]
        print(f"| {used.cpu:.1f} | {used.wall:.1f} | {used.calls} | {used.programs} | {name.removeprefix('tests/')} |")
    print()


if __name__ == "__main__":
    main()
