"""What to say where no layout fits: how much is missing, and the nearest change with which one does.

Changes are tried from small to large: another value of one key that the user gave, budgets, two such keys, more or
other ranks, a larger limit. A change is proposed only where a candidate was found that fits with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from configs.keys import get
from configs.schema import KEYS, Config, ConfigError
from configs.searched import LAYOUT_KEYS, SAVING_KEYS, SEARCHED
from configs.show import show
from configs.values import as_typed
from memory.budgets import MIB
from simulator.clock.hardware import Hardware
from simulator.search.answer import LayoutMemory, MemoryLimits
from simulator.search.limits import GIB, capacity, memory_limits
from simulator.search.memory import LayoutSizer
from simulator.search.space import (
    CHECKED,
    LayoutCell,
    LayoutSpace,
    Saving,
    with_keys,
)
from simulator.search.words import size

MOST_CELLS = 48  # layouts whose memory is counted for one change, those with the fewest parameters first
MOST_VALUES = 4  # of a key, the nearest first
MORE_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Asked:
    """What a search was asked for."""

    config: Config
    world_size: int
    vocab_size: int
    hardware: Hardware
    fixed: frozenset[str]

    @property
    def limits(self) -> MemoryLimits:
        """What a rank may take."""
        return memory_limits(self.config, self.world_size, self.hardware)

    def with_values(self, values: dict[str, Any]) -> Asked:
        """The same with other values of keys, which the user gives then."""
        return replace(self, config=with_keys(self.config, values), fixed=self.fixed | values.keys())


@dataclass(frozen=True)
class Closest:
    """The candidate that is least over its limits, by `over` bytes of a tier; 0: it fits."""

    cell: LayoutCell
    saving: Saving
    memory: LayoutMemory
    over: float
    tier: str


def closest(asked: Asked, only_fitting: bool = False) -> Closest | None:
    """The first candidate that fits, else the one that lacks least; None where the rules allow none. `only_fitting`:
    what cannot fit is not looked at."""
    limits = asked.limits
    space = LayoutSpace(
        asked.config, asked.world_size, asked.fixed, asked.hardware.kind, int(asked.hardware["ranks_per_node"])
    )
    return closest_of(space, LayoutSizer(space, asked.vocab_size, capacity(limits)), limits, MOST_CELLS, only_fitting)


def closest_of(
    space: LayoutSpace, sizer: LayoutSizer, limits: MemoryLimits, most_cells: int, only_fitting: bool = False
) -> Closest | None:
    """The same of a space, of which so many layouts are looked at."""
    cells: list[tuple[float, int, LayoutCell]] = []
    for group in space.groups():
        for chunks in {None, *space.chunks_of(group)[-2:]} & set(space.chunks_of(group)):
            if micros := space.micros_of(group, chunks):
                for heads in space.heads_of(group, chunks, micros[0])[:2]:
                    cell = LayoutCell(group, chunks, heads, micros[0])
                    if savings := space.legal_savings(cell):
                        leaves = any(saving.state_device != "device" for saving in savings)
                        streams = any(saving.streams for saving in savings)
                        cells.append((sizer.least_device_bytes(cell, leaves, streams), len(cells), cell))
    best: Closest | None = None
    for least, _, cell in sorted(cells, key=lambda each: each[:2])[:most_cells]:
        if least - limits.device > (0 if only_fitting else math.inf if best is None else best.over):
            break
        for saving in _thrifty(space, sizer, cell, limits.device if only_fitting else math.inf):
            memory = sizer.memory(cell, saving)
            over, tier = _over(memory, limits)
            if best is None or over < best.over:
                best = Closest(cell, saving, memory, over, tier)
            if over == 0:
                return best
    return best


def _thrifty(space: LayoutSpace, sizer: LayoutSizer, cell: LayoutCell, most: float) -> Iterator[Saving]:
    """What keeps most, then what takes least of the device, with every tier and engine; but what takes more of it than
    `most` beside state that may leave."""
    savings = space.legal_savings(cell)
    if most == math.inf or sizer.beside_state(cell, savings[0], savings[0].state_device != "device") <= most:
        yield savings[0]
    degrees = {saving.degree for saving in savings if isinstance(saving.degree, int)}
    ends = {min(degrees, default=0), max(degrees, default=0)}
    parts: dict[Any, list[Saving]] = {}
    for saving in savings:
        if not isinstance(saving.degree, int) or saving.degree in ends:
            kept = saving.recompute, saving.offload, saving.strategy, saving.degree, saving.backward_degree
            kept = (*kept, saving.weights_device, saving.pass_order)  # type: ignore[assignment]
            parts.setdefault(kept, []).append(saving)
    ordered = sorted(parts.values(), key=lambda part: sizer.beside_state(cell, part[0], True))
    for part in [*ordered[:1], *[part for part in ordered[1:] if part[0].offload == "none"][:1]]:
        if most == math.inf or sizer.beside_state(cell, part[0], True) <= most:
            yield from part


def _over(memory: LayoutMemory, limits: MemoryLimits) -> tuple[float, str]:
    """The most that a tier lacks, and which."""
    found = [(memory.device - limits.device, "device"), (memory.host - limits.host, "host")]
    found.append((memory.disk - limits.disk, "disk"))
    over, tier = max(found, key=lambda each: each[0])
    return max(over, 0.0), tier


def refusal(asked: Asked) -> ConfigError:
    """The error of a search that found nothing: one line."""
    nearest = closest(asked)
    what = _missing(asked, nearest)
    found = _change(asked, nearest)
    return ConfigError(f"{what}. {found or 'No change of a key that was given, nor more ranks, makes one fit'}.")


def _missing(asked: Asked, nearest: Closest | None) -> str:
    ranks = f"{asked.world_size} rank{'s' if asked.world_size > 1 else ''}"
    given = _given(asked)
    if nearest is None:
        return f"the rules allow no layout of {ranks}{given}: {_broken_rule(asked)}"
    limits = asked.limits
    of_tier = {
        "device": (nearest.memory.device, limits.device, limits.device_name),
        "host": (nearest.memory.host, limits.host, limits.host_name),
        "disk": (nearest.memory.disk, limits.disk, "memory.disk_budget"),
    }
    needed, limit, name = of_tier[nearest.tier]
    return (
        f"no layout of {ranks} fits{given}: the nearest needs {size(needed)} of the {nearest.tier}, "
        f"{size(nearest.over)} more than {name} ({size(limit)})"
    )


def _given(asked: Asked) -> str:
    keys = [as_typed(key, get(asked.config, key)) for key in SEARCHED if key in asked.fixed]
    return f" with {' '.join(keys)}" if keys else ""


def _broken_rule(asked: Asked) -> str:
    """The rule that the least layout breaks."""
    plain = {key: KEYS[key].fresh_default() for key in SEARCHED if key not in asked.fixed}
    plain["training.micro_batch_size"] = 1
    config = with_keys(asked.config, {key: value for key, value in plain.items() if key not in asked.fixed})
    for rules in CHECKED:
        for problem in rules(config, asked.world_size):
            value = asked.world_size if problem.key == "world_size" else get(config, problem.key)
            return f"{problem.key} ({show(value)}) {problem.rule}"
    size = asked.config.training.global_batch_size
    return f"training.global_batch_size ({size}) and the model divide over no {asked.world_size} ranks"


# ---------------------------------------------------------------------------------------------------------------------
# Changes
# ---------------------------------------------------------------------------------------------------------------------


def _change(asked: Asked, nearest: Closest | None) -> str | None:
    given = [key for key in (*SAVING_KEYS, "training.micro_batch_size", *LAYOUT_KEYS[:-1]) if key in asked.fixed]
    for key in given:
        for value in _other_values(asked, key):
            if found := _fitting(asked.with_values({key: value})):
                return _try([as_typed(key, value)], found)
    if found_budget := _budgets(asked):
        return found_budget
    for pair in [*combinations(given, 2), *([tuple(given)] if len(given) > 2 else [])]:
        free = replace(asked, fixed=asked.fixed - set(pair))
        if found := _fitting(free):
            return _try(_differences(free, found, pair), found)
    for ranks in _other_ranks(asked, nearest):
        if found := _fitting(replace(asked, world_size=ranks)):
            return f"Try {ranks} ranks ({size(found.memory.device)} each)"
    for ranks in _other_ranks(asked, nearest) if given else []:
        free = replace(asked, world_size=ranks, fixed=asked.fixed - set(given))
        if found := _fitting(free):
            keys = _differences(free, found, tuple(given))
            return f"Try {ranks} ranks with {' '.join(keys)} ({size(found.memory.device)} each)"
    return _larger_limit(asked, nearest)


def _fitting(asked: Asked) -> Closest | None:
    found = closest(asked, only_fitting=True)
    return found if found is not None and found.over == 0 else None


def _try(keys: list[str], found: Closest) -> str:
    host = f" and {size(found.memory.host)} of the host" if found.memory.host else ""
    return f"Try {' '.join(keys)} ({size(found.memory.device)} of the device{host})"


def _differences(asked: Asked, found: Closest, keys: tuple[str, ...]) -> list[str]:
    space = LayoutSpace(asked.config, asked.world_size, asked.fixed, asked.hardware.kind, 1)
    config = space.layout(found.cell, found.saving)
    return [as_typed(key, get(config, key)) for key in keys if get(config, key) != get(asked.config, key)]


def _other_values(asked: Asked, key: str) -> list[Any]:
    """Values of a key that was given, the nearest first."""
    own = get(asked.config, key)
    free = LayoutSpace(asked.config, asked.world_size, asked.fixed - {key}, asked.hardware.kind, 8)
    if key in SAVING_KEYS:
        index = SAVING_KEYS.index(key)
        every = [tuple(each.values().values())[index] for spread in (False, True) for each in free.savings(spread)]
        values = [value for value in dict.fromkeys(every) if value != own]
    else:
        cells = (cell for group in free.groups() for cell in _few(free, group, key))
        index = LAYOUT_KEYS.index(key)
        values = [value for value in dict.fromkeys(_layout(cell)[index] for cell in cells) if value != own]
    if all(isinstance(value, int) for value in (own, *values)):
        values.sort(key=lambda value: (abs(math.log(max(value, 1) / max(own, 1))), value))
    return values[:MOST_VALUES]


def _few(space: LayoutSpace, group: Any, key: str) -> Iterator[LayoutCell]:
    for chunks in space.chunks_of(group):
        for micro in space.micros_of(group, chunks):
            for heads in space.heads_of(group, chunks, micro) if key == "parallel.context_heads" else [None]:
                yield LayoutCell(group, chunks, heads, micro)


def _layout(cell: LayoutCell) -> tuple[Any, ...]:
    group = cell.group
    sizes = (group.tensor, group.sequence, group.pipeline, cell.chunks, group.context)
    return (*sizes, cell.heads, group.expert, group.expert_tensor, cell.micro)


def _budgets(asked: Asked) -> str | None:
    """A larger budget of the host, as large as the node has memory; or the disk."""
    config, hardware = asked.config, asked.hardware
    if config.memory.host_budget is not None:
        most = memory_limits(with_keys(config, {"memory.host_budget": None}), asked.world_size, hardware).host
        found = _fitting(asked.with_values({"memory.host_budget": float(int(most / MIB))}))
        if found is not None and found.memory.host > config.memory.host_budget * MIB:
            least = math.ceil(found.memory.host / MIB)
            again = _fitting(asked.with_values({"memory.host_budget": float(least)})) or found
            return _try([f"memory.host_budget={least if again is not found else int(most / MIB)}"], again)
    if config.memory.disk_dir is None and hardware["disk.memory"] > 0:
        if found := _fitting(asked.with_values({"memory.disk_dir": config.run_dir})):
            return _try([as_typed("memory.disk_dir", config.run_dir)], found)
    return None


def _other_ranks(asked: Asked, nearest: Closest | None) -> list[int]:
    more = [asked.world_size * factor for factor in MORE_RANKS]
    if nearest is not None:
        return more
    near = [n for step in range(1, 65) for n in (asked.world_size - step, asked.world_size + step) if n > 0]
    return [*near, *more]


def _larger_limit(asked: Asked, nearest: Closest | None) -> str | None:
    if nearest is None or asked.config.training.memory_limit_gib is None:
        return None
    free = with_keys(asked.config, {"training.memory_limit_gib": None})
    found = closest(replace(asked, config=free))
    if found is None or found.over > 0:
        return None
    limit = math.ceil(nearest.memory.device / GIB * 100 + 1) / 100
    tried = _fitting(asked.with_values({"training.memory_limit_gib": limit}))
    if tried is None:
        limit = math.ceil(found.memory.device / GIB * 100 + 1) / 100
        tried = found
    return _try([f"training.memory_limit_gib={limit}"], tried)
