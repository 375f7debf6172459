"""What to do about a problem: the first of its candidate fixes with which the whole configuration is legal.

So what a message suggests works.
"""

from __future__ import annotations

import copy

from configs.keys import get, put
from configs.rules import first_problem
from configs.rules.problem import WORLD_SIZE, Fix, Problem
from configs.schema import KEYS, Config
from configs.show import show
from configs.values import as_typed

MAX_FIXES = 40  # tried for one problem, nearest first


def advice(config: Config, world_size: int, problem: Problem, section: str = "") -> str:
    """The first fix on the configuration's side and the first on the launch's side that leave nothing wrong.

    section: the only one whose keys can be set, where the rest is given and goes with the section's defaults.
    """
    fixes = _settable(problem, section)
    if section:
        defaults = {name: key.default for name, key in KEYS.items() if name.startswith(section)}
        fixes.append({name: value for name, value in defaults.items() if get(config, name) != value})
    sides = [[fix for fix in fixes if (WORLD_SIZE in fix) == launch] for launch in (False, True)]
    found = [_working(config, world_size, side, section) for side in sides]
    texts = [_show_fix(fix) for fix in found if fix is not None]
    if not texts and fixes:  # too much else is wrong: propose what settles this one
        settled = [fix for fix in fixes if _key_after(config, world_size, fix) != problem.key]
        texts = [_show_fix((settled or fixes)[0])]
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
    """The first fix that works alone, else the first that works with one fix of what it leaves wrong."""
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


def _key_after(config: Config, world_size: int, fix: Fix) -> str | None:
    problem = first_problem(*_apply(config, world_size, fix))
    return problem.key if problem else None


def _show_fix(fix: Fix) -> str:
    keys = " ".join(
        as_typed(key, value) if isinstance(value, dict) else f"{key}={show(value)}"
        for key, value in fix.items()
        if key != WORLD_SIZE
    )
    if WORLD_SIZE not in fix:
        return keys
    return f"{fix[WORLD_SIZE]} processes (torchrun --nproc-per-node)" + (f" with {keys}" if keys else "")
