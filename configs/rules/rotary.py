"""Rules of `model.rotary_scaling`: its own keys, and what they ask of others."""

from __future__ import annotations

import math
from collections.abc import Iterator

from configs import derived
from configs.rotary import faults
from configs.rules.problem import Fix, Problem, set_to
from configs.schema import Config

KEY = "model.rotary_scaling"


def rotary(config: Config, world_size: int) -> Iterator[Problem]:
    model, scaling = config.model, config.model.rotary_scaling
    off: Fix = {KEY: None}
    for fault in faults(scaling):
        fixes = [*([{KEY: fault.mended}] if fault.mended is not None else []), off]
        yield Problem(f"{KEY}.{fault.key}" if fault.key else KEY, fault.rule, fixes)
        return
    if scaling is None or model.position_embedding != "rope":
        return
    pairs = derived.rotary_dim(config) // 2
    for name in ("short_factor", "long_factor"):
        if name in scaling and len(scaling[name]) != pairs:
            rule = f"must have {pairs} numbers, one for each pair of channels that turns"
            yield Problem(f"{KEY}.{name}", rule, [off])
    if scaling["rope_type"] == "yarn" and math.log(model.rotary_base) == 0:
        rule = f"must not be 1 with {KEY} of rope_type yarn: all channels would turn alike"
        yield Problem("model.rotary_base", rule, [*set_to("model.rotary_base", [10000.0]), off])
