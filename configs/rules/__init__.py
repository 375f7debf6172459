"""Every rule that types alone cannot hold: ranges, names, divisibility, what goes with what.

A rule yields a `Problem`: the field, its value, the rule, and candidate fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from configs.rules import idle, layout, memory, model, rotary, training, values
from configs.rules.problem import Problem
from configs.schema import Config

# In the order in which they are checked.
RULES: list[Callable[[Config, int], Iterator[Problem]]] = [
    values.values,
    values.loose_values,
    model.model,
    rotary.rotary,
    model.moe,
    layout.tensor,
    layout.context,
    layout.experts,
    layout.pipeline,
    layout.world,
    training.batch,
    training.documents,
    training.evaluation,
    training.optimizer,
    training.pass_order,
    memory.optimizer_state,
    memory.activations,
    memory.expert_weights,
    idle.idle,
]


def first_problem(config: Config, world_size: int) -> Problem | None:
    """The first broken rule; later rules may assume that earlier ones hold."""
    for rules in RULES:
        for problem in rules(config, world_size):
            return problem
    return None
