"""From what was explored to an answer: the best, and the best of those that differ from it in their structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from configs.keys import get
from configs.schema import Config
from configs.values import as_typed
from simulator.memory import rank_memory
from simulator.search.answer import LayoutMemory, MemoryLimits, SearchedLayout
from simulator.search.explore import Candidate, LayoutExplorer
from simulator.search.space import SEARCHED, LayoutGroup
from simulator.search.words import size, why_slower

MOST_BOUNDS = 250  # closer bounds of each other structure, beside what the search itself has looked at

# What runners-up differ in from the best: of a layout's group, and of what is saved.
GROUPS: dict[str, Callable[[LayoutGroup], Any]] = {
    "tensor": lambda group: group.tensor,
    "pipeline": lambda group: group.pipeline,
    "experts": lambda group: (group.expert, group.expert_tensor),
    "context": lambda group: group.context,
}


def _saved(candidate: Candidate) -> Any:
    saving = candidate.saving
    return saving.recompute, saving.offload != "none", saving.state_device


def runners_up(explorer: LayoutExplorer, best: Candidate) -> list[Candidate]:
    """The fastest that was found of those with another size of each kind, or another way to save memory; each once,
    the fastest first."""
    chosen: list[Candidate] = []
    for of in GROUPS.values():
        own = of(best.cell.group)

        def differs(group: LayoutGroup, of: Callable[[LayoutGroup], Any] = of, own: Any = own) -> bool:
            return bool(of(group) != own)

        explorer.run(differs, MOST_BOUNDS)
        chosen += _first([each for each in explorer.found if differs(each.cell.group)])
    chosen += _first([each for each in explorer.found if _saved(each) != _saved(best)])
    once = {(each.cell, each.saving): each for each in chosen}
    return sorted(once.values(), key=lambda each: each.rank)


def _first(found: list[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda each: each.rank)[:1]


def searched_layout(explorer: LayoutExplorer, candidate: Candidate, start: Config) -> SearchedLayout:
    """A candidate as it is shown, with its memory as a run counts it."""
    space, sizer = explorer.space, explorer.sizer
    config = space.layout(candidate.cell, candidate.saving)
    tokens = config.training.global_batch_size * config.model.sequence_length
    counted = rank_memory(config, sizer.vocab_size, space.world_size, space.kind, rooms=sizer.rooms)
    memory = LayoutMemory(
        max(rank.total for rank in counted), max(rank.host for rank in counted), max(rank.disk for rank in counted)
    )
    return SearchedLayout(
        config,
        changes(start, config),
        candidate.prediction,
        memory,
        tokens / candidate.prediction.seconds,
    )


def with_reason(
    layout: SearchedLayout, candidate: Candidate, best: Candidate, explorer: LayoutExplorer, limits: MemoryLimits
) -> SearchedLayout:
    """The layout with why it loses; what it saves because it must, with what would be missing without."""
    why = why_slower(candidate.prediction, best.prediction)
    plain = explorer.space.legal_savings(candidate.cell)[0]
    if candidate.saving.steps != plain.steps:
        short = explorer.sizer.memory(candidate.cell, plain).device - limits.device
        if short > 0:
            saved = _names(plain.values(), candidate.saving.values())
            why += f"; without {saved} it would need {size(short)} more than {limits.device_name}"
    return replace(layout, why=why)


def _names(plain: Mapping[str, Any], saving: Mapping[str, Any]) -> str:
    return " ".join(as_typed(key, value) for key, value in saving.items() if plain[key] != value)


def changes(start: Config, config: Config) -> list[str]:
    """What to type for the keys of the search whose values differ."""
    return [as_typed(key, get(config, key)) for key in SEARCHED if get(config, key) != get(start, key)]
