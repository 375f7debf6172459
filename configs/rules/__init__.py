"""Rules that the types of the keys cannot express: ranges, names, divisibility, combinations of keys.

Each rule yields a `Problem` if it is broken: the key, the rule, and candidate fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from configs.rules import idle, layout, model, offload, training, values
from configs.rules.problem import Problem
from configs.schema import Config

# They are checked in this order.
RULES: list[Callable[[Config, int], Iterator[Problem]]] = [
    values.values,
    values.loose_values,
    model.model,
    model.rotary_scaling,
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
    offload.optimizer_state,
    offload.activations,
    offload.expert_weights,
    idle.idle,
]


def first_problem(config: Config, world_size: int) -> Problem | None:
    """Return the first problem of a configuration, or None if it breaks no rule. The rules are checked in a fixed
    order; a rule may assume that all earlier rules hold."""
    for rules in RULES:
        for problem in rules(config, world_size):
            return problem
    return None
