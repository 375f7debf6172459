"""From what was explored to an answer: the best, and with each other choice the fastest that is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from configs.keys import get
from configs.schema import Config
from configs.searched import SEARCHED
from configs.values import as_typed
from simulator.memory import rank_memory
from simulator.search.answer import LayoutMemory, SearchedLayout, TooLargeChoice
from simulator.search.explore import Candidate, LayoutExplorer
from simulator.search.nearby import found_with, other_choices
from simulator.search.words import size, why_slower

Ranked = list[tuple[Candidate, tuple[str, ...]]]


def ranked(explorer: LayoutExplorer, best: Candidate) -> tuple[Ranked, list[TooLargeChoice]]:
    """The best and the runners-up, the fastest first, with the choices that each is the best found of; and the choices
    with which nothing fits."""
    too_large: list[TooLargeChoice] = []
    found: dict[Any, tuple[Candidate, tuple[str, ...]]] = {(best.cell, best.saving): (best, ())}
    for choice in other_choices(explorer.space, explorer.space.layout(best.cell, best.saving)):
        candidate = found_with(explorer, best, choice)
        if isinstance(candidate, TooLargeChoice):
            too_large.append(candidate)
        elif candidate is not None:
            key = candidate.cell, candidate.saving
            choices = found[key][1] if key in found else ()
            found[key] = candidate, (*choices, choice.typed)
    return sorted(found.values(), key=lambda each: each[0].rank), too_large


def searched_layout(
    explorer: LayoutExplorer, candidate: Candidate, start: Config, best: Candidate, choices: Sequence[str]
) -> SearchedLayout:
    """A candidate as it is shown. The best's memory is as a run counts it, of every rank."""
    config = explorer.space.layout(candidate.cell, candidate.saving)
    tokens = config.training.global_batch_size * config.model.sequence_length
    memory, why = candidate.memory, "" if candidate is best else _why(explorer, candidate, best)
    if candidate is best:
        sizer = explorer.sizer
        counted = rank_memory(config, sizer.vocab_size, sizer.world_size, sizer.kind, rooms=sizer.rooms)
        memory = LayoutMemory(
            max(rank.total for rank in counted), max(rank.host for rank in counted), max(rank.disk for rank in counted)
        )
    seconds = candidate.prediction.seconds
    return SearchedLayout(
        config, changes(start, config), candidate.prediction, memory, tokens / seconds, why, tuple(choices)
    )


def _why(explorer: LayoutExplorer, candidate: Candidate, best: Candidate) -> str:
    """Why a layout loses; what it saves because it must, with what would be missing without."""
    why = why_slower(candidate.prediction, best.prediction)
    plain = explorer.space.legal_savings(candidate.cell)[0]
    if candidate.saving.steps != plain.steps:
        short = explorer.sizer.memory(candidate.cell, plain).device - explorer.limits.device
        if short > 0:
            saved = _names(plain.values(), candidate.saving.values())
            why += f"; without {saved} it would need {size(short)} more than {explorer.limits.device_name}"
    return why


def _names(plain: Mapping[str, Any], saving: Mapping[str, Any]) -> str:
    return " ".join(as_typed(key, value) for key, value in saving.items() if plain[key] != value)


def changes(start: Config, config: Config) -> list[str]:
    """What to type for the keys of the search whose values differ."""
    return [as_typed(key, get(config, key)) for key in SEARCHED if get(config, key) != get(start, key)]
