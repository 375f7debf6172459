"""Error of a search in which no layout fits: the missing bytes, and the smallest change with which a layout fits.

Changes are tried from small to large: another value of one key that the user gave, other budgets, several such keys,
more or fewer ranks, a larger memory limit. A change is proposed only if a candidate was found that fits with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from base.errors import ConfigError
from base.units import GIB, MIB
from configs.job import Job
from configs.keys import get
from configs.schema import KEYS
from configs.searched import LAYOUT_KEYS, SAVING_KEYS, SEARCHED
from configs.show import show
from configs.values import as_typed
from simulator.clock.hardware import Hardware
from simulator.search.sizer import LayoutMemory, LayoutSizer, MemoryLimits, memory_limits
from simulator.search.space import CHECKED, LayoutCell, LayoutSpace, Saving, with_keys
from simulator.sizes import format_bytes

MOST_CELLS = 48  # layouts whose memory is counted for one change; those with the fewest parameters first
MOST_VALUES = 4  # values of a key that are tried, the nearest first
MORE_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Asked:
    """Arguments of a layout search."""

    job: Job
    hardware: Hardware
    fixed: frozenset[str]

    @property
    def limits(self) -> MemoryLimits:
        """Bytes of device, host and disk that a rank may use."""
        return memory_limits(self.job.config, self.job.world_size, self.hardware)

    def with_values(self, values: dict[str, Any]) -> Asked:
        """Return the arguments with other values of keys, which then count as given by the user."""
        job = replace(self.job, config=with_keys(self.job.config, values))
        return replace(self, job=job, fixed=self.fixed | values.keys())


@dataclass(frozen=True)
class Closest:
    """The candidate that exceeds its limits least: by `over` bytes of `target` (device, host or disk); 0: it fits."""

    cell: LayoutCell
    saving: Saving
    memory: LayoutMemory
    over: float
    target: str


def closest(asked: Asked, only_fitting: bool = False) -> Closest | None:
    """Return the first candidate that fits, or else the closest one; None if the rules allow none.

    `only_fitting`: skip candidates that a lower bound proves too large.
    """
    limits = asked.limits
    space = LayoutSpace(asked.job, asked.fixed, int(asked.hardware["ranks_per_node"]))
    return closest_in(space, LayoutSizer(space, limits.capacity), limits, MOST_CELLS, only_fitting)


def closest_in(
    space: LayoutSpace, sizer: LayoutSizer, limits: MemoryLimits, most_cells: int, only_fitting: bool = False
) -> Closest | None:
    """Search a space for the first candidate that fits, or else the closest one; None if there is none.

    At most `most_cells` layouts are examined. `only_fitting`: skip candidates that a lower bound proves too large.
    """
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
            missing = {each: getattr(memory, each) - getattr(limits, each) for each in ("device", "host", "disk")}
            target = max(missing, key=missing.__getitem__)
            over = max(missing[target], 0.0)
            if best is None or over < best.over:
                best = Closest(cell, saving, memory, over, target)
            if over == 0:
                return best
    return best


def _thrifty(space: LayoutSpace, sizer: LayoutSizer, cell: LayoutCell, most: float) -> Iterator[Saving]:
    """Yield the memory saving that keeps most on the device, then those that need the least device memory.

    Savings that need more than `most` bytes of the device even without optimizer state are left out.
    """
    savings = space.legal_savings(cell)
    if most == math.inf or sizer.device_bytes(cell, savings[0], savings[0].state_device != "device") <= most:
        yield savings[0]
    degrees = {saving.degree for saving in savings if isinstance(saving.degree, int)}
    ends = {min(degrees, default=0), max(degrees, default=0)}
    groups: dict[Any, list[Saving]] = {}
    for saving in savings:
        if not isinstance(saving.degree, int) or saving.degree in ends:
            kept = saving.recompute, saving.offload, saving.strategy, saving.degree, saving.backward_degree
            groups.setdefault((*kept, saving.weights_device, saving.pass_order), []).append(saving)
    ordered = sorted(groups.values(), key=lambda group: sizer.device_bytes(cell, group[0], True))
    for group in [*ordered[:1], *[group for group in ordered[1:] if group[0].offload == "none"][:1]]:
        if most == math.inf or sizer.device_bytes(cell, group[0], True) <= most:
            yield from group


def no_layout_error(asked: Asked) -> ConfigError:
    """Return the one-line error about a search in which no layout fits."""
    nearest = closest(asked)
    found = _change(asked, nearest) or (
        "Use a smaller model (model.num_layers, model.hidden_size): no other value of a given key and no other number "
        "of ranks that was tried is enough"
    )
    return ConfigError(f"{_missing(asked, nearest)}. {found}.")


def _missing(asked: Asked, nearest: Closest | None) -> str:
    ranks = f"{asked.job.world_size} rank{'s' if asked.job.world_size > 1 else ''}"
    keys = " ".join(as_typed(key, get(asked.job.config, key)) for key in SEARCHED if key in asked.fixed)
    given = f" with {keys}" if keys else ""
    if nearest is None:
        return f"the rules allow no layout on {ranks}{given}: {_broken_rule(asked)}"
    limits = asked.limits
    needed, limit = getattr(nearest.memory, nearest.target), getattr(limits, nearest.target)
    names = {"device": limits.device_name, "host": limits.host_name, "disk": "memory.disk_budget"}
    return (
        f"no layout on {ranks} fits{given}: the closest one needs {format_bytes(needed)} of the {nearest.target}, "
        f"{format_bytes(nearest.over)} more than {names[nearest.target]} ({format_bytes(limit)})"
    )


def _broken_rule(asked: Asked) -> str:
    """Return the first rule that even the smallest layout breaks."""
    plain = {key: KEYS[key].fresh_default() for key in SEARCHED if key not in asked.fixed}
    plain["training.micro_batch_size"] = 1
    config = with_keys(asked.job.config, {key: value for key, value in plain.items() if key not in asked.fixed})
    for rules in CHECKED:
        for problem in rules(config, asked.job.world_size):
            value = asked.job.world_size if problem.key == "world_size" else get(config, problem.key)
            return f"{problem.key} ({show(value)}) {problem.rule}"
    batch = asked.job.config.training.global_batch_size
    return f"training.global_batch_size ({batch}) and the model cannot be divided over {asked.job.world_size} ranks"


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
        if found := _fitting(replace(asked, job=replace(asked.job, world_size=ranks))):
            return f"Try {ranks} ranks ({format_bytes(found.memory.device)} each)"
    for ranks in _other_ranks(asked, nearest) if given else []:
        free = replace(asked, job=replace(asked.job, world_size=ranks), fixed=asked.fixed - set(given))
        if found := _fitting(free):
            keys = _differences(free, found, tuple(given))
            return f"Try {ranks} ranks with {' '.join(keys)} ({format_bytes(found.memory.device)} each)"
    return _larger_limit(asked, nearest)


def _fitting(asked: Asked) -> Closest | None:
    found = closest(asked, only_fitting=True)
    return found if found is not None and found.over == 0 else None


def _try(keys: list[str], found: Closest) -> str:
    host = f" and {format_bytes(found.memory.host)} of the host" if found.memory.host else ""
    return f"Try {' '.join(keys)} ({format_bytes(found.memory.device)} of the device{host})"


def _differences(asked: Asked, found: Closest, keys: tuple[str, ...]) -> list[str]:
    before, now = asked.job.config, LayoutSpace(asked.job, asked.fixed, 1).layout(found.cell, found.saving)
    return [as_typed(key, get(now, key)) for key in keys if get(now, key) != get(before, key)]


def _other_values(asked: Asked, key: str) -> list[Any]:
    """Return other values of a key that the user gave, the nearest first."""
    own = get(asked.job.config, key)
    free = LayoutSpace(asked.job, asked.fixed - {key}, 8)
    if key in SAVING_KEYS:
        every = [each.values()[key] for spread in (False, True) for each in free.savings(spread)]
        values = [value for value in dict.fromkeys(every) if value != own]
    else:
        of_heads = key == "parallel.context_heads"  # exchanged heads vary only if they are the key
        cells = (
            LayoutCell(group, chunks, heads, micro)
            for group in free.groups()
            for chunks in free.chunks_of(group)
            for micro in free.micros_of(group, chunks)
            for heads in (free.heads_of(group, chunks, micro) if of_heads else [None])
        )
        values = [value for value in dict.fromkeys(cell.values()[key] for cell in cells) if value != own]
    if all(isinstance(value, int) for value in (own, *values)):
        values.sort(key=lambda value: (abs(math.log(max(value, 1) / max(own, 1))), value))
    return values[:MOST_VALUES]


def _budgets(asked: Asked) -> str | None:
    """Return the advice to raise the host budget or to set a disk folder; None if nothing fits then."""
    config, hardware = asked.job.config, asked.hardware
    if config.memory.host_budget is not None:
        most = memory_limits(with_keys(config, {"memory.host_budget": None}), asked.job.world_size, hardware).host
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
    given = asked.job.world_size
    near = [n for step in range(1, 65) for n in (given - step, given + step) if n > 0] if nearest is None else []
    return [*near, *(given * factor for factor in MORE_RANKS)]


def _larger_limit(asked: Asked, nearest: Closest | None) -> str | None:
    if nearest is None or asked.job.config.training.memory_limit_gib is None:
        return None
    free = with_keys(asked.job.config, {"training.memory_limit_gib": None})
    found = closest(replace(asked, job=replace(asked.job, config=free)))
    if found is None or found.over > 0:
        return None
    limit = math.ceil(nearest.memory.device / GIB * 100 + 1) / 100
    tried = _fitting(asked.with_values({"training.memory_limit_gib": limit}))
    if tried is None:
        limit, tried = math.ceil(found.memory.device / GIB * 100 + 1) / 100, found
    return _try([f"training.memory_limit_gib={limit}"], tried)
