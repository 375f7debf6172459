"""Which keys a search of layouts may change: plan=search, and a run with parallel.layout=auto."""

from __future__ import annotations

import copy

from configs.keys import put
from configs.schema import KEYS, Config

# In the order in which they are typed: the layout's, then those that save memory.
LAYOUT_KEYS = (
    "parallel.tensor",
    "parallel.sequence",
    "parallel.pipeline",
    "parallel.virtual_pipeline",
    "parallel.context",
    "parallel.context_heads",
    "parallel.expert",
    "parallel.expert_tensor",
    "training.micro_batch_size",
)
SAVING_KEYS = (
    "training.recompute",
    "training.activation_offload",
    "moe.pipeline_degree",
    "moe.backward_pipeline_degree",
    "moe.memory_strategy",
    "optimizer.state_device",
    "optimizer.engine",
    "moe.weights_device",
    "training.pass_order",
)
# That are searched only where they are auto: nobody's experts leave the device unasked.
ASKED_KEYS = ("moe.weights_device", "training.pass_order")
SEARCHED = (*LAYOUT_KEYS, *SAVING_KEYS)


def searches_layout(config: Config) -> bool:
    """Whether the values of those keys are where a search starts, and not what is asked for."""
    return config.plan == "search" or config.parallel.layout == "auto"


def smallest(config: Config, given: frozenset[str]) -> Config:
    """A copy with the smallest layout that the keys of the command line leave: what else is wrong with it, no layout
    puts right."""
    changed = copy.deepcopy(config)
    for key in SEARCHED:
        if key not in given and key != "moe.memory_strategy" and key not in ASKED_KEYS:
            put(changed, key, KEYS[key].fresh_default())
    if "training.micro_batch_size" not in given:
        changed.training.micro_batch_size = 1
    if "parallel.sequence" not in given:
        changed.parallel.sequence = changed.parallel.tensor > 1
    return changed
