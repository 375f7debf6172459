"""Runners-up of a search: the fastest layouts found with one key of the best layout changed, and the keys that must
change with it.

Each choice has its own short best-first search, so its result is not proven to be the best with that choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from configs import derived
from configs.keys import get
from configs.schema import Config
from configs.searched import SEARCHED
from configs.values import as_typed
from simulator.search.answer import TooLargeChoice
from simulator.search.explore import Candidate, LayoutExplorer
from simulator.search.impossible import closest_in
from simulator.search.space import RECOMPUTE, LayoutSpace, divisors_of, with_keys

MOST_NODES = 160  # examined for one choice, in each of two spaces
MOST_CELLS = 6  # layouts whose memory is counted if none of these nodes fits
MOST_VALUES = {"parallel.tensor": 4, "parallel.pipeline": 4, "parallel.expert": 3, "parallel.context": 2}
MOST_TENSOR = 8  # tensor ranks that are tried, unless the best layout has more
# Keys that may change with any choice, with single choices, and if nothing else fits.
ALWAYS = (
    *("parallel.virtual_pipeline", "training.micro_batch_size", "training.recompute", "training.activation_offload"),
    "optimizer.state_device",
)
WITH = {
    "parallel.tensor": ("parallel.sequence", "parallel.context_heads"),
    "parallel.context": ("parallel.context_heads",),
    "parallel.expert": ("parallel.expert_tensor",),
}
AT_LAST = (
    *("parallel.tensor", "parallel.sequence", "parallel.pipeline", "parallel.expert", "parallel.expert_tensor"),
    *("parallel.context_heads", "moe.memory_strategy"),
)


@dataclass(frozen=True)
class OtherChoice:
    """A layout key with a value that differs from the best layout's."""

    key: str
    value: Any

    @property
    def typed(self) -> str:
        """The override as it is typed on the command line."""
        return as_typed(self.key, self.value)


def other_choices(space: LayoutSpace, best: Config) -> Iterator[OtherChoice]:
    """Yield other values of layout keys that the user did not give; of sizes, only those next to the best layout's."""
    for key, values in _values(space, best).items():
        own = get(best, key)
        if key in space.fixed:
            continue
        others = [value for value in values if value != own]
        if key in MOST_VALUES:
            others.sort(key=lambda value: (abs(math.log(value / own)), value))
            others = sorted(others[: MOST_VALUES[key]])
        yield from (OtherChoice(key, value) for value in others)


def _values(space: LayoutSpace, best: Config) -> dict[str, list[Any]]:
    world, model = space.world_size, best.model
    groups = derived.num_query_groups(best)
    tensor = [d for d in divisors_of(model.num_attention_heads) if groups % d == 0 and world % d == 0]
    most = max(best.parallel.tensor, min(space.ranks_per_node, MOST_TENSOR))
    replicas = world // (best.parallel.tensor * best.parallel.pipeline)
    return {
        "parallel.tensor": [d for d in tensor if d <= most],
        "parallel.pipeline": [d for d in divisors_of(model.num_layers) if world % d == 0],
        "parallel.expert": [d for d in divisors_of(best.moe.num_experts or 1) if world % d == 0],
        "parallel.context": list(divisors_of(replicas)),
        "parallel.sequence": [False, True] if best.parallel.tensor > 1 and not space.is_moe else [],
        "training.recompute": list(RECOMPUTE),
        "optimizer.state_device": ["device", "host"],
    }


def found_with(explorer: LayoutExplorer, best: Candidate, choice: OtherChoice) -> Candidate | TooLargeChoice | None:
    """Return the fastest candidate found with a given choice, such as another size of parallelism.

    If none fits, return how many bytes are missing; if the rules allow none, return None.
    """
    own = explorer.space.layout(best.cell, best.saving)
    free = {*ALWAYS, *WITH.get(choice.key, ())}
    if own.optimizer.engine != "auto":
        free.add("optimizer.engine")
    for more in ((), AT_LAST):
        fixed = explorer.space.fixed | {choice.key} | {key for key in SEARCHED if key not in free | set(more)}
        job = replace(explorer.space.job, config=with_keys(own, {choice.key: choice.value}))
        space = LayoutSpace(job, fixed, explorer.space.ranks_per_node, explorer.space.given)
        near = LayoutExplorer(
            space, explorer.sizer, explorer.limits, explorer.predict, explorer.least, explorer.floor, explorer.near
        )
        near.run(MOST_NODES)
        if near.best is not None:
            return near.best
    nearest = closest_in(space, explorer.sizer, explorer.limits, MOST_CELLS)
    if nearest is None:
        return None
    if nearest.over > 0:
        return TooLargeChoice(choice.typed, nearest.over, nearest.target)
    return Candidate(nearest.cell, nearest.saving, explorer.time(nearest.cell, nearest.saving), nearest.memory)
