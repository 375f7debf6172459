"""Submit a training to Slurm, after checking that its configuration is possible there.

    python -m launch.submit [SBATCH OPTION]... [--ranks-per-node N] [--max-restarts N] [--dry-run] -- [KEY=VALUE]...

The configuration is first composed for nodes times ranks, so that an impossible one is refused now and not when the job
starts. Then the sbatch line is printed, and run unless --dry-run is given. Other options are passed to sbatch; options
that are not given have the values in launch/slurm.sbatch.

    python -m launch.submit --nodes 4 -- experiment=gpt_moe_small parallel.expert=8 training.micro_batch_size=2
    python -m launch.submit --array 0-3 --gpus-per-node 1 -- 'training.seed=${oc.env:SLURM_ARRAY_TASK_ID}'
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from base.errors import ConfigError
from base.exit_handler import WRONG_CONFIG
from launch.job import ARRAY_TASK, make_scheduled_run

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "launch/slurm.sbatch"


class Request(NamedTuple):
    """A checked request: the sbatch command line, and the numbers of ranks and the run folders of its job."""

    line: list[str]
    world_sizes: list[int]  # one, or one for each number of nodes that a range allows
    run_dirs: list[str]  # one, or those of the first and the last task of an array


def prepare(arguments: Sequence[str]) -> Request:
    """Return the checked request of a command line without --dry-run. Raises ConfigError if the configuration is not
    possible on the requested nodes."""
    before, overrides = _split(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in (
        ("--nodes", "-N"),
        ("--gpus-per-node",),
        ("--array", "-a"),
        ("--ranks-per-node",),
        ("--max-restarts",),
    ):
        parser.add_argument(*names)
    try:
        options, others = parser.parse_known_args(before)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. Try python -m launch.submit --help") from error

    known = {
        name: value for name in ("nodes", "gpus_per_node", "array") if (value := getattr(options, name)) is not None
    }
    script = (ROOT / SCRIPT).read_text(encoding="utf-8")
    defaults: dict[str, str] = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", script, re.MULTILINE))
    low, _, high = known.get("nodes", defaults["nodes"]).partition("-")  # `4`, or `2-4`
    fewest = _number("--nodes", low, 1)
    nodes = range(fewest, _number("--nodes", high or low, fewest) + 1)
    if options.ranks_per_node is not None:
        ranks = _number("--ranks-per-node", options.ranks_per_node, 1)
    else:
        gpus = known.get("gpus_per_node", defaults["gpus-per-node"])
        ranks = max(1, _number("--gpus-per-node", gpus.rpartition(":")[2], 0))  # as in h200:8
    tasks: list[int | None] = [*_array_tasks(known["array"])] if "array" in known else [None]

    world_sizes = [count * ranks for count in nodes]
    if not any(ARRAY_TASK in text for text in overrides):
        tasks = tasks[:1] + tasks[1:][-1:]  # the others differ from these in their name alone
    for world_size in world_sizes:
        jobs = [make_scheduled_run(overrides, world_size, task) for task in tasks]
    script_options = []
    if options.ranks_per_node is not None:
        script_options += ["--ranks-per-node", str(ranks)]
    if options.max_restarts is not None:
        script_options += ["--max-restarts", str(_number("--max-restarts", options.max_restarts, 0))]
    sbatch_options = [*(f"--{name.replace('_', '-')}={value}" for name, value in known.items()), *others]
    line = ["sbatch", *sbatch_options, SCRIPT, *script_options, "--", *overrides]
    return Request(line, world_sizes, [job.config.run_dir for job in jobs])


def main(arguments: Sequence[str]) -> int:
    """Check, print and submit the request; return the exit status."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "-h" in before or "--help" in before:
        print(__doc__)
        return 0
    dry_run = "--dry-run" in before
    try:
        request = prepare([*(option for option in before if option != "--dry-run"), *arguments[len(before) :]])
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return WRONG_CONFIG
    ranks = " to ".join(map(str, sorted({request.world_sizes[0], request.world_sizes[-1]})))
    runs = dict.fromkeys((request.run_dirs[0], request.run_dirs[-1]))
    print(f"submit: {ranks} {'rank' if ranks == '1' else 'ranks'}; run {' to '.join(runs)}", flush=True)
    print(shlex.join(request.line), flush=True)
    if dry_run:
        return 0
    if shutil.which("sbatch") is None:
        remedy = "Run this on a login node of the cluster."
        print(f"submit: sbatch is not on PATH here: nothing was submitted. {remedy}", file=sys.stderr)
        return 1
    return subprocess.run(request.line, cwd=ROOT).returncode


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`."""
    if "--" in arguments:
        index = list(arguments).index("--")
        return list(arguments[:index]), list(arguments[index + 1 :])
    if arguments and not arguments[-1].startswith("-") and "=" in arguments[-1]:
        raise ConfigError(f"{arguments[-1]} must come after `--`, like all config overrides. Try -- {arguments[-1]}")
    return list(arguments), []


def _number(option: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(f"{option} ({text}) must be a whole number of at least {least}. Try {option} {max(1, least)}")
    return int(text)


def _array_tasks(text: str) -> list[int]:
    """Return the task numbers of sbatch's --array: `3`, `0-7`, `0-15:4`, `1,3,5-7`, each also followed by a limit such
    as `%2`."""
    tasks: set[int] = set()
    for item in text.partition("%")[0].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", item)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ConfigError(
                f"--array ({text}) must be numbers and ranges such as 0-7, 0-15:4 or 1,3,5-7. Try --array 0-7"
            )
        tasks.update(range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1)))
    return sorted(tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
