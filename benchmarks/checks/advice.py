"""Follow the advice of error messages: what a message proposes must be legal, and the run must also take a step with
it.

    python -m benchmarks.checks.advice [--models MODEL...] [--only WORD] [--json]

The mistakes that tests/configs/test_validate.py lists, and wrong values of every key, are composed in this process.
Each distinct configuration that their advice leads to is started, in a process of its own for each rank, until the
first step is in metrics.jsonl or all has ended. Advice for more ranks than 8, for a GPU, and for `plan=` is
counted, and not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from base.errors import ConfigError
from configs.compose import compose
from configs.schema import KEYS
from configs.validate import validate
from tests.configs import advice, wrong_values
from tests.configs.test_validate import BROKEN

MAX_RANKS = 8
PATIENCE = 300  # seconds for a first step
MODELS = ("gpt_moe_tiny",)
# Keys and groups whose alternatives are not runs of this machine.
ELSEWHERE = ("plan", "plan_world_size", "hardware")


class Try(NamedTuple):
    """An alternative that a message proposes, with the overrides of its run."""

    overrides: tuple[str, ...]
    ranks: int
    message: str


def found(models: list[str], run_dir: str) -> Iterator[Try]:
    """Return the alternatives in the messages of known mistakes and wrong values, one for each resulting configuration
    that is not a preset's own."""
    seen: set[str] = set()
    for overrides, ranks, _, _ in BROKEN:
        base = [] if any(text.startswith("experiment=") for text in overrides) else ["experiment=gpt_tiny"]
        yield from _alternatives([*base, f"run_dir={run_dir}", *overrides], ranks, seen)
    for model in models:
        seen.add(repr(compose([f"model={model}", f"run_dir={run_dir}"])))
        for key in KEYS.values():
            for wrong in wrong_values.wrong_values(key):
                yield from _alternatives(
                    [f"model={model}", f"run_dir={run_dir}", f"{wrong.key}={wrong.written}"], 1, seen
                )


def _alternatives(overrides: list[str], ranks: int, seen: set[str]) -> Iterator[Try]:
    try:
        validate(compose(overrides), ranks)
        return
    except ConfigError as error:
        message = str(error)
    for alternative in advice.split(message)[1]:
        fixes = [fix for fix in alternative if not fix.startswith("WORLD_SIZE=")]
        wanted = [int(fix.partition("=")[2]) for fix in alternative if fix.startswith("WORLD_SIZE=")]
        replaced = {advice.key_of(fix) for fix in fixes}
        each = Try(
            (*(text for text in overrides if advice.key_of(text) not in replaced), *fixes),
            wanted[0] if wanted else ranks,
            message,
        )
        try:
            same = f"{each.ranks} {compose(list(each.overrides))!r}"
        except ConfigError as error:
            same = str(error)
        if same not in seen and same.partition(" ")[2] not in seen:
            seen.add(same)
            yield each


def runs_here(each: Try) -> bool:
    """Whether this machine can run the alternative."""
    return each.ranks <= MAX_RANKS and not any(
        advice.key_of(text) in ELSEWHERE
        or text.endswith("=cuda")
        or (text.startswith("experiment=") and not text.endswith("_tiny"))
        for text in each.overrides
    )


def run_on(each: Try, folder: Path) -> str:
    """Start a run; return "" once it has taken a step or ended without an error, else its last line."""
    corpus = folder / "corpus.txt"
    shutil.rmtree(folder / "run", ignore_errors=True)
    own = {
        "data.corpus": str(corpus),
        "data.cache_dir": str(folder / "cache"),
        "run_dir": str(folder / "run"),
        "data.num_workers": "1",
        "logging": "quiet",
    }
    given = {advice.key_of(text) for text in each.overrides}
    argv = [
        *(text for text in each.overrides if advice.key_of(text) not in ("run_dir", "name", "data.cache_dir")),
        *(f"{key}={value}" for key, value in own.items() if key not in given or key in ("run_dir", "data.cache_dir")),
    ]
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    children = [_fork(argv, rank, each.ranks, port, folder) for rank in range(each.ranks)]
    end, left, failed = time.monotonic() + PATIENCE, set(children), False
    metrics = folder / "run" / "metrics.jsonl"
    try:
        while left and not failed and time.monotonic() < end:
            if metrics.exists() and metrics.stat().st_size:
                return ""
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.remove(pid)
                    failed = failed or status != 0
            time.sleep(0.05)
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not failed:
        return f"no step in {PATIENCE} s" if left else ""
    lines = [line for rank in range(each.ranks) for line in (folder / f"out{rank}").read_text().splitlines()]
    return next((line for line in lines if "error: " in line), lines[-1] if lines else "ended without a word")


def _fork(argv: list[str], rank: int, ranks: int, port: int, folder: Path) -> int:
    """Fork a process that is one rank of `python train.py`, with the modules imported here; return its id."""
    pid = os.fork()
    return pid or _train(argv, rank, ranks, port, folder)


def _train(argv: list[str], rank: int, ranks: int, port: int, folder: Path) -> NoReturn:
    status = 1
    try:
        out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if ranks > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ |= {name: str(value) for name, value in variables.items()}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        sys.argv = ["train.py", *argv]
        import train
        from configs.compose import run

        run(train.main)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:  # a fault of the run's, to be read in its output
        print(f"error: {type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _corpus(path: Path) -> None:
    words = "some words of text to learn from, again and again, with as many others as a sample takes. ".split()
    path.write_text("\n\n\n".join(f"document {i}: " + " ".join(words * (10 + i % 7)) for i in range(300)))


def main(arguments: list[str] | None = None) -> int:
    """Run all alternatives; return the exit status: 1 if one of them fails."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.checks.advice", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--only", default="", help="alternatives whose overrides have this word")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    import megatron.core  # noqa: F401  for all processes that are forked
    import torch

    from training import trainer  # noqa: F401

    torch.set_num_threads(1)
    counts, faults = Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="advice-") as name:
        folder = Path(name)
        _corpus(folder / "corpus.txt")
        for each in found(list(options.models), str(folder / "run")):
            if options.only not in " ".join(each.overrides):
                continue
            if not runs_here(each):
                counts["not run here"] += 1
                continue
            said = run_on(each, folder)
            counts["led to an error" if said else "ran on"] += 1
            if said:
                faults.append(f"{each.ranks} {' '.join(each.overrides)}\n  of: {each.message}\n  led to: {said}")
                print(faults[-1], flush=True)
            if sum(counts.values()) % 20 == 0:
                print(dict(counts), flush=True)
    print(dict(counts))
    if options.json:
        print(json.dumps({"counts": counts, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
