"""Whether a configuration is legal for a number of processes, and how many processes it takes."""

from __future__ import annotations

import copy
import math

from configs import derived
from configs.advice import advice
from configs.keys import get
from configs.rules import first_problem
from configs.rules.problem import WORLD_SIZE
from configs.schema import Config, ConfigError
from configs.searched import smallest
from configs.show import show

MAX_PLANNED_COPIES = 64  # of the model, tried for a plan that is told no number of ranks


def validate(config: Config, world_size: int) -> None:
    """Check a configuration for a run on `world_size` processes.

    Raises:
        ConfigError: naming the first field that breaks a rule, its value, the rule, and a value that works.
    """
    _refuse_first_problem(config, world_size)


def validate_for_search(config: Config, given: frozenset[str], started: int) -> None:
    """Check a configuration whose layout is searched for (configs/searched.py): what no layout can put right.

    `given`: the keys of the command line, which stay. Whether a layout of so many ranks is left, the search says.
    Raises ConfigError.
    """
    if config.plan and config.plan_world_size is None and started == 1:
        raise ConfigError(
            "plan_world_size (null) must be the number of ranks to search for where no ranks are started. Try "
            "plan_world_size=8."
        )
    changed = smallest(config, given)
    _refuse_first_problem(changed, _fewest(changed))


def validate_for_use(config: Config, world_size: int) -> None:
    """Check the layout of a trained model that is opened (configs/architecture.for_use), by the rules of training; what
    only training asks of a layout is granted. Raises ConfigError, whose advice is of the layout alone: the model is
    what it is."""
    asked = copy.deepcopy(config)
    layout = asked.parallel
    layout.sequence = layout.tensor > 1
    asked.model.sequence_length = 8 * layout.tensor * asked.model.sequence_length
    # a batch that also the layouts of the advice divide
    asked.training.micro_batch_size, asked.training.global_batch_size = 1, math.lcm(*range(1, 9)) * world_size
    asked.training.global_batch_size *= layout.pipeline
    _refuse_first_problem(asked, world_size, "parallel.")


def _refuse_first_problem(config: Config, world_size: int, section: str = "") -> None:
    problem = first_problem(config, world_size)
    if problem is not None:
        value = world_size if problem.key == WORLD_SIZE else get(config, problem.key)
        raise ConfigError(
            f"{problem.key} ({show(value)}) {problem.rule}. {advice(config, world_size, problem, section)}".strip()
        )


def usable_world_size(config: Config, world_size: int) -> int:
    """How many of the started processes take part: all, or with `training.elastic` the most that the configuration
    allows."""
    if config.training.elastic:
        for size in range(world_size, 0, -1):
            if first_problem(config, size) is None:
                return size
    return world_size


def planned_world_size(config: Config, started: int) -> int:
    """How many processes a plan is for: `plan_world_size`, those started, or without a launcher the fewest that the
    config allows."""
    if config.plan_world_size is not None:
        return max(1, config.plan_world_size)  # what is less, a rule refuses
    if started > 1:
        return started
    fewest = _fewest(config)
    sizes = range(fewest, fewest * MAX_PLANNED_COPIES + 1, fewest)
    return next((size for size in sizes if first_problem(config, size) is None), fewest)


def _fewest(config: Config) -> int:
    """Ranks that hold one copy of the model."""
    return math.lcm(max(1, derived.model_parallel_size(config)), max(1, derived.expert_model_parallel_size(config)))
