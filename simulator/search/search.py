"""Search for the fastest layout that fits the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.job import Job
from configs.keys import get
from configs.schema import Config
from configs.searched import SEARCHED
from configs.values import as_typed
from simulator.clock.hardware import Hardware
from simulator.memory import rank_memory
from simulator.search.answer import LayoutAnswer, SearchedLayout, TooLargeChoice, why_slower
from simulator.search.explore import Candidate, LayoutExplorer
from simulator.search.floor import LayoutFloor
from simulator.search.impossible import Asked, no_layout_error
from simulator.search.nearby import found_with, other_choices
from simulator.search.sizer import LayoutMemory, LayoutSizer, MemoryLimits, memory_limits
from simulator.search.space import LayoutSpace
from simulator.search.timer import LayoutTimer, clock_timer
from simulator.sizes import format_bytes

NEAR = 1e-3  # share of the best layout's seconds by which layouts that are left out may be faster


def search_layout(
    job: Job, hardware: Hardware, fixed: frozenset[str], timer: LayoutTimer | None = None, near: float = NEAR
) -> LayoutAnswer:
    """Return the fastest layout of a job on some hardware, and the runners-up.

    Args:
        job: its device must be the hardware's. Values of the keys in `fixed` stay; other layout keys are ignored and
            need not fit the ranks.
        fixed: dotted names of the keys that the user gave.
        timer: predicts seconds; by default simulator/clock.
        near: layouts that are faster than the best by at most this share may be left out. With 0 the best is exact.

    Raises:
        ConfigError: if nothing fits, with the missing bytes and the nearest change with which a layout fits.
    """
    limits = memory_limits(job.config, job.world_size, hardware)
    explorer = layout_explorer(job, hardware, fixed, timer or clock_timer(), limits, near)
    explorer.run()
    if explorer.best is None:
        raise no_layout_error(Asked(job, hardware, fixed))
    counts = explorer.counts()
    found, too_large = _ranked(explorer, explorer.best)
    best = found[0][0]
    layouts = [_searched_layout(explorer, each, job.config, best, choices) for each, choices in found]
    return LayoutAnswer(
        layouts[0], layouts[1:], counts, limits, hardware.name, job.world_size, hardware.errors, tuple(too_large)
    )


def layout_explorer(
    job: Job, hardware: Hardware, fixed: frozenset[str], timer: LayoutTimer, limits: MemoryLimits, near: float = 0.0
) -> LayoutExplorer:
    """Return an explorer of all candidates that has not examined any yet."""
    space, row_seconds = LayoutSpace(job, fixed, int(hardware["ranks_per_node"])), timer.row_seconds
    of_row = None if row_seconds is None else lambda asked: row_seconds(replace(job, config=asked), hardware)
    return LayoutExplorer(
        space,
        LayoutSizer(space, limits.capacity),
        limits,
        lambda asked, state: timer.predict(replace(job, config=asked), hardware, state),
        lambda asked: timer.least(replace(job, config=asked), hardware),
        LayoutFloor(space, hardware, of_row),
        near,
    )


def _ranked(
    explorer: LayoutExplorer, best: Candidate
) -> tuple[list[tuple[Candidate, tuple[str, ...]]], list[TooLargeChoice]]:
    """Return the best candidate and the runners-up, fastest first, and the choices with which nothing fits.

    Each candidate comes with the choices for which it is the fastest one found.
    """
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


def _searched_layout(
    explorer: LayoutExplorer, candidate: Candidate, start: Config, best: Candidate, choices: Sequence[str]
) -> SearchedLayout:
    """Return a candidate as an entry of the answer; the best one's memory is counted rank by rank, as in a run."""
    config = explorer.space.layout(candidate.cell, candidate.saving)
    tokens = config.training.global_batch_size * config.model.sequence_length
    memory, why = candidate.memory, ""
    if candidate is best:
        counted = rank_memory(replace(explorer.space.job, config=config), capacity=explorer.sizer.capacity)
        memory = LayoutMemory(*map(max, zip(*((rank.total, rank.host, rank.disk) for rank in counted))))
    else:
        why = why_slower(candidate.prediction, best.prediction)
        plain = explorer.space.legal_savings(candidate.cell)[0]
        if candidate.saving.steps != plain.steps:
            short = explorer.sizer.memory(candidate.cell, plain).device - explorer.limits.device
            if short > 0:
                before, now = plain.values(), candidate.saving.values()
                saved = " ".join(as_typed(key, value) for key, value in now.items() if before[key] != value)
                why += f"; without {saved} it would need {format_bytes(short)} more than {explorer.limits.device_name}"
    speed = tokens / candidate.prediction.seconds
    return SearchedLayout(config, changes(start, config), candidate.prediction, memory, speed, why, tuple(choices))


def changes(start: Config, config: Config) -> list[str]:
    """Return the overrides that change the searched keys of `start` to the values in `config`."""
    return [as_typed(key, get(config, key)) for key in SEARCHED if get(config, key) != get(start, key)]
