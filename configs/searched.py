"""Keys that a search of layouts may change, in plan=search and in a run with parallel.layout=auto."""

from __future__ import annotations

import copy

from configs.keys import put
from configs.schema import KEYS, Config

# In the order of the printed command: the layout's, then those that save memory.
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
# Searched only if they are auto: a search does not offload experts unasked.
ASKED_KEYS = ("moe.weights_device", "training.pass_order")
SEARCHED = (*LAYOUT_KEYS, *SAVING_KEYS)


def searches_layout(config: Config) -> bool:
    """Whether a search chooses the layout, so that presets' values of SEARCHED are only its start."""
    return config.plan == "search" or config.parallel.layout == "auto"


def smallest(config: Config, given: frozenset[str]) -> Config:
    """Return a copy with the smallest layout that the `given` keys allow: no layout can solve a problem that
    remains."""
    changed = copy.deepcopy(config)
    for key in SEARCHED:
        if key not in given and key != "moe.memory_strategy" and key not in ASKED_KEYS:
            put(changed, key, KEYS[key].fresh_default())
    if "training.micro_batch_size" not in given:
        changed.training.micro_batch_size = 1
    if "parallel.sequence" not in given:
        changed.parallel.sequence = changed.parallel.tensor > 1
    return changed
