"""Validation of a configuration for a number of processes. Every error message proposes a fix that works. Also computes
the number of processes that a configuration needs."""

from __future__ import annotations

import copy
import math

from base.errors import ConfigError
from configs import derived
from configs.keys import get, put
from configs.rules import first_problem
from configs.rules.problem import WORLD_SIZE, Fix, Problem
from configs.schema import KEYS, Config
from configs.searched import smallest
from configs.show import show
from configs.values import as_typed

MAX_PLANNED_COPIES = 64  # most replicas of the model that are tried for a plan without a number of ranks
MAX_FIXES = 40  # most fixes that are tried for a problem, nearest first


def validate(config: Config, world_size: int, section: str = "") -> None:
    """Check that a configuration can run on `world_size` processes.

    Raises ConfigError for the first rule that is broken. The message names the field, its value, the rule, and a value
    that works. section: if not empty, the only section whose keys the advice may set.
    """
    problem = first_problem(config, world_size)
    if problem is not None:
        value = world_size if problem.key == WORLD_SIZE else get(config, problem.key)
        advice = _advice(config, world_size, problem, section)
        raise ConfigError(f"{problem.key} ({show(value)}) {problem.rule}. {advice}".strip())


def validate_for_search(config: Config, given: frozenset[str], started: int) -> None:
    """Check a configuration, before a search for its layout, for problems that no layout can solve. Raises ConfigError.

    given: the keys of the command line, which the search does not change. started: the number of processes. Whether any
    layout fits the number of ranks is left to the search.
    """
    if config.plan and config.plan_world_size is None and started == 1:
        raise ConfigError(
            "plan_world_size (null) must be set to the number of ranks to search for, because only one process is "
            "started. Try plan_world_size=8."
        )
    changed = smallest(config, given)
    validate(changed, _fewest(changed))


def validate_for_use(config: Config, world_size: int) -> None:
    """Check the layout of an opened model by the rules of training, with a batch size and a sequence length that fit.
    Raises ConfigError, whose advice changes only the layout."""
    asked = copy.deepcopy(config)
    layout = asked.parallel
    layout.sequence = layout.tensor > 1
    asked.model.sequence_length = 8 * layout.tensor * asked.model.sequence_length
    # A batch size that is also divisible in the layouts that the advice may propose.
    asked.training.micro_batch_size, asked.training.global_batch_size = 1, math.lcm(*range(1, 9)) * world_size
    asked.training.global_batch_size *= layout.pipeline
    validate(asked, world_size, "parallel.")


def usable_world_size(config: Config, world_size: int) -> int:
    """Return the number of started processes that a run uses: all, or with `training.elastic` the largest number that
    is legal."""
    if config.training.elastic:
        for size in range(world_size, 0, -1):
            if first_problem(config, size) is None:
                return size
    return world_size


def planned_world_size(config: Config, started: int) -> int:
    """Return the number of processes to plan for: `plan_world_size` if it is set, else the number of started processes,
    or without a launcher the fewest that the configuration allows."""
    if config.plan_world_size is not None:
        return max(1, config.plan_world_size)  # a rule rejects smaller values
    if started > 1:
        return started
    fewest = _fewest(config)
    sizes = range(fewest, fewest * MAX_PLANNED_COPIES + 1, fewest)
    return next((size for size in sizes if first_problem(config, size) is None), fewest)


def _fewest(config: Config) -> int:
    """Return the number of ranks that one replica of the model needs."""
    return math.lcm(max(1, derived.model_parallel_size(config)), max(1, derived.expert_model_parallel_size(config)))


def _advice(config: Config, world_size: int, problem: Problem, section: str) -> str:
    """Return advice, "Try ...", on how to solve a problem: a change of the configuration, a different number of
    processes, or both as alternatives; an empty string if no fix is known. section: if not empty, the only section
    whose keys may change."""
    fixes = _settable(problem, section)
    if section:
        defaults = {name: key.default for name, key in KEYS.items() if name.startswith(section)}
        fixes.append({name: value for name, value in defaults.items() if get(config, name) != value})
    sides = [[fix for fix in fixes if (WORLD_SIZE in fix) == launch] for launch in (False, True)]
    found = [_working(config, world_size, side, section) for side in sides]
    texts = [_show_fix(fix) for fix in found if fix is not None]
    if not texts and fixes:  # there are several problems: propose a fix of the first
        after = [(fix, first_problem(*_apply(config, world_size, fix))) for fix in fixes]
        solved = [fix for fix, other in after if other is None or other.key != problem.key]
        texts = [_show_fix((solved or fixes)[0])]
    return f"Try {' or '.join(texts)}." if texts else ""


def _settable(problem: Problem, section: str) -> list[Fix]:
    return [fix for fix in problem.fixes if all(key == WORLD_SIZE or key.startswith(section) for key in fix)]


def _apply(config: Config, world_size: int, fix: Fix) -> tuple[Config, int]:
    changed = copy.deepcopy(config)
    for key, value in fix.items():
        if key == WORLD_SIZE:
            world_size = value
            continue
        put(changed, key, value)
    return changed, world_size


def _working(config: Config, world_size: int, fixes: list[Fix], section: str, more: int = 1) -> Fix | None:
    """Return the first of `fixes` after which no rule is broken, else the first that works together with at most `more`
    fixes of the next problems; None if there is none. section: if not empty, the only section whose keys these further
    fixes may change."""
    left: list[tuple[Fix, Problem]] = []
    for fix in fixes[:MAX_FIXES]:
        problem = first_problem(*_apply(config, world_size, fix))
        if problem is None:
            return fix
        left.append((fix, problem))
    for fix, problem in left if more else []:
        rest = _working(
            *_apply(config, world_size, fix),
            [f for f in _settable(problem, section) if WORLD_SIZE not in f and not f.keys() & fix],
            section,
            more - 1,
        )
        if rest is not None:
            return fix | rest
    return None


def _show_fix(fix: Fix) -> str:
    keys = " ".join(
        as_typed(key, value) if isinstance(value, dict) else f"{key}={show(value)}"
        for key, value in fix.items()
        if key != WORLD_SIZE
    )
    if WORLD_SIZE not in fix:
        return keys
    return f"{fix[WORLD_SIZE]} processes (torchrun --nproc-per-node)" + (f" with {keys}" if keys else "")
