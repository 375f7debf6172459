"""Every case on the pretended device in both modes, and every mutant: `python -m tests.cuda.matrix` prints the table.

Late, whatever may be late is done when somebody waits for it; early, at once. The exit status is 1 where a row is
wrong: numbers that are not the CPU's, a fault, a wait that the table does not have, a mutant that nobody notices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from tests import distributed
from tests.cuda import cases, runs, sync_points

_Write = Callable[[Sequence[object], bool], None]
COLUMNS = (
    "case",
    "mode",
    "losses off by",
    "norms off by",
    "waits",
    "of workers",
    "faults",
    "KB to device",
    "KB to host",
    "peak MB",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.matrix", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print tables of Markdown")
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=list(cases.CASES), help="these alone, no mutants")
    options = parser.parse_args(arguments)
    write = _markdown if options.markdown else _plain
    names = options.cases or list(cases.CASES)
    print("Waits and bytes: of rank 0's second step. Peak: the largest rank's, of the whole run.\n")
    write(COLUMNS, True)
    wrong: list[str] = []
    for name in names:
        of_cpu = cases.run(name, "cpu")
        for early in (False, True):
            wrong += _case(name, early, of_cpu, write)
    num_rows = 2 * len(names)
    if not options.cases:
        num_rows += len(sync_points.MUTANTS)
        print()
        write(("left out", "through", "case", "noticed by"), True)
        for what in sync_points.MUTANTS:
            wrong += _mutant(what, write)
    print(f"\n{num_rows} rows, {len(wrong)} wrong." + "".join(f"\n* {line}" for line in wrong))
    return 1 if wrong else 0


def _case(name: str, early: bool, of_cpu: list[runs.Outcome], write: _Write) -> list[str]:
    mode = "early" if early else "late"
    try:
        outcomes = cases.run(name, "cuda", early=early)
    except (distributed.RankError, distributed.RankHang) as error:
        write((name, mode, "refused"), False)
        return [f"{name}, {mode}: {str(error).strip().splitlines()[-1]}"]
    first, found = outcomes[0], cases.faults(outcomes)
    off = cases.deviations(outcomes, of_cpu)
    peak = max(outcome.peak_bytes for outcome in outcomes)
    worker_waits = sum(outcome.worker_waits.total() for outcome in outcomes)
    row = [name, mode, *(f"{each:.1e}" for each in off), first.waits.total(), worker_waits, len(found)]
    write([*row, f"{first.to_device / 1e3:.1f}", f"{first.to_host / 1e3:.1f}", f"{peak / 1e6:.1f}"], False)
    limits = cases.CASES[name].tolerances
    far = [
        f"{what} {each:.1e} from the CPU's, more than {limit:.0e}"
        for what, each, limit in zip(("losses", "gradient norms"), off, limits, strict=True)
        if not each <= limit
    ]
    return [f"{name}, {mode}: {line}" for line in far + found + cases.wrong_waits(name, outcomes)]


def _mutant(what: str, write: _Write) -> list[str]:
    mutant, case = sync_points.MUTANTS[what]
    try:
        by = cases.noticed(case, mutant)
    except ValueError as error:
        by, problem = "", str(error)
    else:
        problem = "not noticed"
    by = by.replace("|", "/")
    write((f"{what} ({mutant.what})", mutant.call_site, case, by[:120] or "nothing"), False)
    return [] if by else [f"{what}: {problem}"]


def _markdown(row: Sequence[object], header: bool) -> None:
    print(f"| {' | '.join(map(str, row))} |", flush=True)
    if header:
        print("|---" * len(row) + "|", flush=True)


def _plain(row: Sequence[object], header: bool) -> None:
    print(str(row[0]).ljust(42), "  ".join(str(each).rjust(12) for each in row[1:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
