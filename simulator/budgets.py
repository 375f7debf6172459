"""The budgets of host and disk that a plan needs: found with the function that a plan is checked with, so that what is
suggested is enough at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.ranks import launched
from configs.schema import Config, MemoryConfig
from memory.arrange import Rooms
from memory.budgets import MIB, Budget, open_budgets
from simulator.memory import RankMemory, rank_memory
from simulator.parameters import places
from simulator.tiers import TierPlan, least_host_bytes, left


@dataclass(frozen=True)
class Needed:
    """Budgets that would do, and why those that are there do not."""

    rooms: Rooms
    memory: list[RankMemory]  # with them
    keys: str  # as typed, a blank before each
    refusal: str


def of_node(config: Config, world_size: int) -> tuple[Budget, Budget]:
    """Of the host and of the disk, as a run opens them on its own node."""
    host, disk = Budget("memory.host_budget"), Budget("memory.disk_budget")
    if world_size == launched().world_size:
        open_budgets(_there(config), host, disk)
    else:
        host.open(config.memory.host_budget, math.inf)
        disk.open(config.memory.disk_budget, math.inf)
    return host, disk


def _there(config: Config) -> MemoryConfig:
    """With a folder of the disk that is there: the run's own is made when it starts."""
    folder = config.memory.disk_dir
    if folder is None or Path(folder).absolute() != Path(config.run_dir).absolute():
        return config.memory
    own = Path(folder).absolute()
    return replace(config.memory, disk_dir=str(next(path for path in (own, *own.parents) if path.exists())))


def over(memory: Sequence[RankMemory], rooms: Rooms) -> list[RankMemory]:
    """The ranks that keep more off their device than there is room for."""
    return [rank for rank in memory if rank.host > rooms.host or rank.disk > rooms.disk]


def needed(
    config: Config,
    vocab_size: int,
    world_size: int,
    device: str,
    memory: list[RankMemory],
    rooms: Rooms,
    most: float = math.inf,
) -> Needed | None:
    """The least budgets, in whole MiB, with which no rank of a plan is over, nor needs more than `most` bytes of its
    device where that can be; None where those that are there do."""
    refused = over(memory, rooms)
    if not refused:
        return None
    budgets = of_node(config, world_size)
    for budget, room in zip(budgets, (rooms.host, rooms.disk), strict=True):
        budget.limit = room  # what is free may have changed since the plan
    worst = max(refused, key=lambda rank: (rank.host, rank.disk))
    if config.memory.disk_dir is not None:
        rooms = replace(rooms, disk=max(rooms.disk, _whole(max(rank.disk for rank in memory))))

    def with_host(num_mib: int) -> tuple[Rooms, list[RankMemory], bool]:
        own = replace(rooms, host=max(rooms.host, float(num_mib * MIB)))
        found = rank_memory(config, vocab_size, world_size, device, rooms=own)
        fits = max(rank.total for rank in found) <= most
        return own, found, fits and not over(found, own)

    least = math.ceil(_at_least(config, vocab_size, world_size, memory, rooms) / MIB)
    tried = with_host(least)
    if not tried[2]:
        endless = rank_memory(config, vocab_size, world_size, device, rooms=replace(rooms, host=math.inf))
        # layer inputs get what the fullest rank's optimizer state leaves
        apart = [[rank.host_activations for rank in endless], [rank.host - rank.host_activations for rank in endless]]
        low, high = least, max(least, math.ceil(sum(map(max, apart)) / MIB))
        if (last := with_host(high))[2]:
            tried = last
        while high - low > 1 and last[2]:
            middle = (low + high) // 2
            found = with_host(middle)
            low, high, tried = (low, middle, found) if found[2] else (middle, high, tried)
    rooms, memory, _ = tried
    kept = ["optimizer state"] * (worst.tiers is not None) + ["activations"] * (worst.host_activations > 0)
    what = f"{' and '.join(kept)} of rank {worst.rank}"
    raised = [
        (budget, int(room))
        for budget, room in zip(budgets, (rooms.host, rooms.disk), strict=True)
        if room > budget.limit
    ]
    # the one that cannot be had first
    raised.sort(key=lambda each: each[0].could_be(each[0].least(each[1])))
    keys = [f" {budget.key}={budget.least(num_bytes)}" for budget, num_bytes in raised]
    budget, num_bytes = raised[0]
    return Needed(rooms, memory, "".join(keys), budget.refusal(num_bytes, what, "".join(keys[1:])))


def _whole(num_bytes: float) -> float:
    """In whole MiB, rounded up."""
    return float(math.ceil(num_bytes / MIB) * MIB)


def _at_least(config: Config, vocab_size: int, world_size: int, memory: Sequence[RankMemory], rooms: Rooms) -> float:
    """Bytes of the host that every rank gets by with: with state_device=auto what the other tiers hold need not be
    there."""
    if config.optimizer.state_device != "auto":
        return max(rank.host for rank in memory)
    tiers, found = TierPlan(config, vocab_size, world_size, rooms), dict[tuple[int, ...], float]()
    for rank, place in zip(memory, places(config, world_size), strict=True):
        beside = rank.total - rank.optimizer
        key = (place.stage, place.data, place.expert_data, beside)
        if key not in found:
            least = least_host_bytes(tiers.wanted(place), left(rooms, beside))
            found[key] = rank.host if least is None else rank.host_activations + least
    return max(found.values())
