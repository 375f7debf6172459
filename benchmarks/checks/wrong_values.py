"""Wrong values of every key of the schema: one last line that names key, value and rule, with advice that works, and
status 2.

    python -m benchmarks.checks.wrong_values [--models MODEL...] [--starts 12] [--seed 1] [--json]

First every wrong value of every key in this process, on five models: another type, null, a list, a mapping, an unset
variable, a reference to no key and to itself, other choices, numbers out of range, not whole, not finite and far too
large. The advice of each line is taken, and has to be legal. Then real starts of a sample under `launch/torchrun.sh
--ranks-per-node 2`, first of keys that no start has had and of every kind: the last line on stderr, the exit status,
and the time until the launcher has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from benchmarks.kit.tables import table
from configs.schema import KEYS
from tests.configs import advice, wrong_values
from tests.configs.wrong_values import WrongValue

REPOSITORY = Path(__file__).parents[2]
MODELS = ("quickstart", "gpt_tiny", "gpt_moe_tiny", "bert_moe_tiny", "gpt2_124m")


def in_process(model: str) -> tuple[Counter[str], list[str]]:
    """The number of values of each kind that were handled well, and a line for each other."""
    presets, right, faults = wrong_values.presets_of(model), Counter[str](), []
    legal: dict[tuple[str, ...], str] = {}

    def refusal(fixes: tuple[str, ...]) -> str:
        if fixes not in legal:
            try:
                wrong_values.take(presets, fixes)
                legal[fixes] = ""
            except ConfigError as error:
                legal[fixes] = f"advice is refused: {error}"
        return legal[fixes]

    for key in KEYS.values():
        for wrong in wrong_values.wrong_values(key):
            try:
                wrong_values.take(presets, [f"{wrong.key}={wrong.written}"])
                fault, message = "is taken", ""
            except ConfigError as error:
                message = str(error)
                fault = wrong_values.fault(wrong, message)
                fault = fault or next(filter(None, (refusal(tuple(fixes)) for fixes in advice.split(message)[1])), "")
            if fault:
                faults.append(f"{model}: {wrong.key}={wrong.written}: {fault}: {message}")
            else:
                right[wrong.kind] += 1
    return right, faults


def start(wrong: WrongValue) -> dict[str, Any]:
    """Start a run on two ranks; return its exit status and output."""
    command = [
        "bash",
        "launch/torchrun.sh",
        "--ranks-per-node",
        "2",
        "--",
        "model=gpt_tiny",
        f"{wrong.key}={wrong.written}",
    ]
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    seconds = time.monotonic() - begin
    last = done.stderr.strip().splitlines()[-1]
    message = last.partition("config error: ")[2]
    fault = wrong_values.fault(wrong, message) if message else "the last line is not the rank's"
    return {
        "key": wrong.key,
        "value": wrong.written,
        "kind": wrong.kind,
        "status": done.returncode,
        "seconds": seconds,
        "last": last,
        "fault": fault if fault or done.returncode == 2 else f"status {done.returncode}",
    }


def sample(count: int, seed: int) -> list[WrongValue]:
    """Return values for a sample of keys, the five main kinds in turn."""
    random_keys = random.Random(seed)
    by_kind = {
        kind: [w for key in KEYS.values() for w in wrong_values.wrong_values(key) if w.kind == kind]
        for kind in wrong_values.KINDS
    }
    chosen: list[WrongValue] = []
    while len(chosen) < count:
        left = [
            wrong
            for wrong in by_kind[wrong_values.KINDS[len(chosen) % len(wrong_values.KINDS)]]
            if wrong.key not in {other.key for other in chosen}
        ]
        chosen.append(random_keys.choice(left))
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Run both parts; return the exit status: 1 if any value was handled wrongly."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.checks.wrong_values", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    right, faults = Counter[str](), []
    for model in options.models:
        begin = time.process_time()
        more, wrong = in_process(model)
        right += more
        faults += wrong
        print(
            f"{model}: {more.total()} of {more.total() + len(wrong)} values right, {time.process_time() - begin:.1f} s "
            "of CPU",
            flush=True,
        )
    print(table(["kind", "right"], [[kind, str(count)] for kind, count in right.items()], True))
    starts = []
    for wrong_value in sample(options.starts, options.seed):
        starts.append(start(wrong_value))
        print(f"{starts[-1]['seconds']:.1f} s, status {starts[-1]['status']}: {starts[-1]['last']}", flush=True)
    faults += [f"{each['key']}={each['value']}: {each['fault']}" for each in starts if each["fault"]]
    print("\n".join(faults) or "all as it should be")
    if options.json:
        print(json.dumps({"keys": len(KEYS), "right": right, "faults": faults, "starts": starts}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
