"""The keys that a search for the fastest layout may change, with plan=search or parallel.layout=auto."""

from __future__ import annotations

import copy

from configs.keys import put
from configs.schema import KEYS, Config

# In the order of the printed command: first keys of the layout, then keys that save memory.
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
# Searched only if their value is auto: a search offloads experts only on request.
ASKED_KEYS = ("moe.weights_device", "training.pass_order")
SEARCHED = (*LAYOUT_KEYS, *SAVING_KEYS)


def searches_layout(config: Config) -> bool:
    """Return whether a search chooses the layout and may change searched keys that presets set."""
    return config.plan == "search" or config.parallel.layout == "auto"


def smallest(config: Config, given: frozenset[str]) -> Config:
    """Return a copy of the configuration with the smallest layout that the `given` keys allow. If a rule is still
    broken, no layout can satisfy it."""
    changed = copy.deepcopy(config)
    for key in SEARCHED:
        if key not in given and key != "moe.memory_strategy" and key not in ASKED_KEYS:
            put(changed, key, KEYS[key].fresh_default())
    if "training.micro_batch_size" not in given:
        changed.training.micro_batch_size = 1
    if "parallel.sequence" not in given:
        changed.parallel.sequence = changed.parallel.tensor > 1
    return changed
