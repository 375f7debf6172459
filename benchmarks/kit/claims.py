"""The command of every claim, once at its smallest size: `python -m benchmarks.kit.claims [WORD]... [--quick]
[--list]`.

`benchmarks/results/claims.yaml` names under `smallest` a smaller command for each. It must end with status 0: a
benchmark that has decayed is found here, before somebody measures with it again. Figures are neither compared nor kept,
so rounds beside other work count too; one with a `bar` may end with 1 where it misses that.
What needs a card, a peer's package or a folder from elsewhere is listed with the reason, and so is what a claim's
machine cannot do without root.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from benchmarks.kit.cgroups import CgroupOutcome, run_in
from benchmarks.kit.rounds import ANY_LOAD
from benchmarks.kit.summary import RESULTS, ROOT

SECONDS = 1800.0  # that a command may take; most take less than 30
TAIL = 30  # lines of each stream shown of one that fails


@dataclass(frozen=True)
class Smallest:
    """A claim's command, and the smaller command that is run for it or the reason why none is run."""

    command: str
    smaller: str | None
    not_run: str | None
    is_quick: bool
    needs_root: bool
    has_bar: bool = False  # status 1 says that it was missed, which means nothing at this size


def smallest() -> list[Smallest]:
    """Read the smaller command of each claimed command, in the order of the claims. Raises KeyError naming a command
    without an entry, and ValueError naming an entry without a claim."""
    claims = yaml.safe_load((RESULTS / "claims.yaml").read_text(encoding="utf-8"))
    commands = list(dict.fromkeys(claim["command"] for group in claims["groups"] for claim in group["claims"]))
    entries: dict[str, Any] = claims["smallest"]
    if unknown := set(entries) - set(commands):
        raise ValueError(f"no claim has the command {sorted(unknown)[0]!r}")
    found = []
    for command in commands:
        entry = entries[command]
        entry = entry if isinstance(entry, dict) else {"run": entry}
        found.append(
            Smallest(
                command,
                entry.get("run"),
                entry.get("not run"),
                entry.get("quick", False),
                entry.get("root", False),
                entry.get("bar", False),
            )
        )
    return found


def run(command: str, seconds: float) -> CgroupOutcome:
    """Run a command in the repository's folder for at most `seconds`, and end all processes that it leaves."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    return run_in(words, timeout=seconds, cwd=ROOT, env={**os.environ, ANY_LOAD: "1"})


def run_all(chosen: Iterable[Smallest]) -> int:
    """Run the commands, print one line for each, and return the number that failed."""
    ran, failed, left = 0, [], 0
    for entry in chosen:
        why = entry.not_run or ("needs root" if entry.needs_root and os.geteuid() != 0 else None)
        if why is not None:
            left += 1
            print(f"not run: {entry.command}: {why}", flush=True)
            continue
        assert entry.smaller is not None, entry.command
        outcome = run(entry.smaller, SECONDS)
        ran += 1
        print(f"{outcome.verdict()} in {outcome.seconds:.1f} s: {entry.smaller}", flush=True)
        missed = entry.has_bar and outcome.status == 1 and "Traceback" not in outcome.stderr
        if outcome.status != 0 and not missed:
            failed.append(entry.smaller)
            printed = [*outcome.stdout.splitlines()[-TAIL:], *outcome.stderr.splitlines()[-TAIL:]]
            print("\n".join(f"    {line}" for line in printed), flush=True)
    print(f"claims: {ran - len(failed)} of {ran} commands ran, {left} not run")
    for command in failed:
        print(f"claims: FAILED: {command}")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kit.claims", description=str(__doc__).split("\n\n")[1])
    parser.add_argument("words", nargs="*", metavar="WORD", help="commands with one of these words alone")
    parser.add_argument("--quick", action="store_true", help="those alone that take less than 3 s")
    parser.add_argument("--list", action="store_true", help="print what would be run, and run nothing")
    arguments = parser.parse_args()
    chosen = [
        entry
        for entry in smallest()
        if (not arguments.words or any(word in entry.command for word in arguments.words))
        and (entry.is_quick or not arguments.quick)
    ]
    if arguments.list:
        for entry in chosen:
            print(f"not run: {entry.command}: {entry.not_run}" if entry.not_run else entry.smaller)
        return 0
    return int(run_all(chosen) > 0)


if __name__ == "__main__":
    sys.exit(main())
