"""Facts about a run for a scheduler's script that starts it: whether its config is possible, and its folder.

    python -m launch.job --world-size N [--array-task T] -- KEY=VALUE...

prints the folder of the run, then one line for each override to add; a wrong configuration ends in one line and exit
status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from base.errors import ConfigError
from base.exit_handler import WRONG_CONFIG
from configs.compose import compose, given_keys
from configs.schema import Config
from configs.searched import searches_layout
from configs.validate import usable_world_size, validate, validate_for_search

ARRAY_TASK = "SLURM_ARRAY_TASK_ID"  # what a user's own overrides can refer to: name='a_${oc.env:SLURM_ARRAY_TASK_ID}'


class ScheduledRun(NamedTuple):
    """A checked config, and the overrides that the scheduler's script must add to start its run."""

    config: Config
    overrides: list[str]  # to add to the user's


def compose_for(overrides: Sequence[str], world_size: int) -> Config:
    """Return the config of a command line, checked for `world_size` ranks. Raises ConfigError."""
    config = compose(list(overrides))
    if searches_layout(config):
        validate_for_search(config, given_keys(list(overrides)), world_size)
    else:
        validate(config, usable_world_size(config, world_size))
    return config


def make_scheduled_run(overrides: Sequence[str], world_size: int, array_task: int | None = None) -> ScheduledRun:
    """Return the checked config of a scheduler's job. Each task of a job array gets its own run name, NAME_T, unless
    the overrides already make the runs differ. Raises ConfigError if the configuration is impossible."""
    if array_task is None:
        return ScheduledRun(compose_for(overrides, world_size), [])
    for keys in ((), ("name",), ("name", "run_dir")):  # run_dir follows the name unless it was set
        job, next_job = (_make_task(overrides, world_size, task, keys) for task in (array_task, array_task + 1))
        if job.config.run_dir != next_job.config.run_dir:
            break
    return job


def _make_task(overrides: Sequence[str], world_size: int, array_task: int, keys: Sequence[str]) -> ScheduledRun:
    """Return the checked config of one task of a job array, with the task's number appended to the values of `keys`."""
    before = os.environ.get(ARRAY_TASK)
    os.environ[ARRAY_TASK] = str(array_task)
    try:
        config = compose_for(overrides, world_size)
        added = [f"{key}={_quote(f'{getattr(config, key)}_{array_task}')}" for key in keys]
        return ScheduledRun(compose_for([*overrides, *added], world_size) if added else config, added)
    finally:
        del os.environ[ARRAY_TASK]
        if before is not None:
            os.environ[ARRAY_TASK] = before


def _quote(text: str) -> str:
    """Return a text in quotes, so that Hydra reads it as the value of an override."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def main(arguments: Sequence[str]) -> int:
    """Print the run's folder and the overrides that the scheduler's script must add, and return the exit status."""
    parser = argparse.ArgumentParser(prog="launch.job", description=__doc__, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--array-task", type=int)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    try:
        job = make_scheduled_run(options.overrides, options.world_size, options.array_task)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return WRONG_CONFIG
    print(job.config.run_dir, *job.overrides, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
