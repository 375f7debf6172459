"""How many assignments of each expert each rank computes in one call of an MoE layer: what planners are told, what they
answer, and what that costs.

A planner is a pure function `plan(counts, placement, costs, limits) -> quotas`. All numbers are integers, so that all
ranks plan alike. Shapes: R ranks of the expert parallel group, E experts; counts_RE by the rank whose tokens they are,
quotas_ER by the rank that computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moe.placement.map import Integers, PlacementMap

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Costs:
    """In the time that an expert takes for one more assignment."""

    piece: int = 0  # an expert with any assignments at all, on each rank that computes it
    copy_in_node: int = 0  # sending an expert's weights and receiving its gradient, and the other way round
    copy_between: int | None = 0  # the same between nodes; None: there are to be no such copies
    row_between: int = 0  # thousandths: an assignment whose token comes from another node


@dataclass(frozen=True)
class Limits:
    """What a plan may use."""

    slots: int  # copies of the layer's experts that a rank may hold
    ranks_per_node: int  # ranks that follow one another
    most: int | None = None  # assignments that a rank may compute
    # (expert, rank) of copies that keep their slots, used or not: backward passes need them
    pinned: frozenset[tuple[int, int]] = frozenset()


class Planner(Protocol):
    """One policy."""

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: Limits) -> Integers:
        """quotas_ER: of each expert as many as there are assignments, on its home and on `limits.slots` copies a rank
        at most."""


@dataclass(frozen=True)
class Outcome:
    """What a call's quotas come to."""

    loads_R: Integers  # assignments that each rank computes
    new_copies: int  # weights that must travel
    new_between: int  # those of them between nodes
    seconds: int  # of the busiest rank, in the unit of Costs

    @property
    def imbalance(self) -> float:
        """Assignments of the busiest rank by those of the mean one."""
        return float(self.loads_R.max() / max(self.loads_R.mean(), 1e-9))


def at_home(counts_RE: Integers, placement: PlacementMap) -> Integers:
    """quotas_ER of the static map: every expert is computed at its home."""
    quotas_ER = np.zeros((placement.num_experts, placement.num_ranks), dtype=np.int64)
    quotas_ER[np.arange(placement.num_experts), placement.home_ranks] = counts_RE.sum(0)
    return quotas_ER


def held(placement: PlacementMap) -> np.ndarray:
    """bool [E, R]: where an expert's weights are without copying any."""
    held_ER = np.zeros((placement.num_experts, placement.num_ranks), dtype=bool)
    held_ER[np.arange(placement.num_experts), placement.home_ranks] = True
    for expert, rank in placement.copies:
        held_ER[expert, rank] = True
    return held_ER


def check(quotas_ER: Integers, counts_RE: Integers, placement: PlacementMap, limits: Limits) -> None:
    """Raises AssertionError where a planner's answer is none."""
    assert (quotas_ER >= 0).all() and (quotas_ER.sum(1) == counts_RE.sum(0)).all()
    is_copy = quotas_ER > 0
    is_copy[np.arange(placement.num_experts), placement.home_ranks] = False
    for expert, rank in limits.pinned:
        is_copy[expert, rank] = True
    assert (is_copy.sum(0) <= limits.slots).all(), is_copy.sum(0)


def outcome(quotas_ER: Integers, placement: PlacementMap, costs: Costs, limits: Limits) -> Outcome:
    """Of a planner's answer."""
    used = quotas_ER > 0
    experts, ranks = np.nonzero(used & ~held(placement))
    homes = placement.home_ranks[experts]
    between = homes // limits.ranks_per_node != ranks // limits.ranks_per_node
    seconds = np.where(between, costs.copy_between or 0, costs.copy_in_node)
    loads_R = quotas_ER.sum(0)
    work_R = loads_R + costs.piece * used.sum(0)
    copying_R = np.bincount(ranks, seconds, placement.num_ranks) + np.bincount(homes, seconds, placement.num_ranks)
    return Outcome(loads_R, len(experts), int(between.sum()), int((work_R + copying_R.astype(np.int64)).max()))


def shares(counts_RE: Integers, quotas_ER: Integers, ranks_per_node: int, rank: int) -> Integers:
    """[E, R]: how many of a rank's assignments of an expert go to which rank. A rank's own stay as far as the quota
    lasts, then those of its node, then what is left: both sides one rank after the other."""
    num_experts, num_ranks = quotas_ER.shape
    assert num_ranks % ranks_per_node == 0
    demand_ER, room_ER = counts_RE.T.copy(), quotas_ER.copy()
    stays_ER = np.minimum(demand_ER, room_ER)
    demand_ER -= stays_ER
    room_ER -= stays_ER
    mine_ER = np.zeros_like(quotas_ER)
    mine_ER[:, rank] = stays_ER[:, rank]
    for size in dict.fromkeys((ranks_per_node, num_ranks)):
        groups = num_experts, num_ranks // size, size  # of ranks, all at once
        demand, room, mine = (each.reshape(groups) for each in (demand_ER, room_ER, mine_ER))
        demand_end, room_end = demand.cumsum(2), room.cumsum(2)
        demand_begin, room_begin = demand_end - demand, room_end - room
        own, place = rank // size, rank % size
        low = np.maximum(room_begin[:, own], demand_begin[:, own, place, None])
        high = np.minimum(room_end[:, own], demand_end[:, own, place, None])
        mine[:, own] += np.maximum(high - low, 0)
        met = np.minimum(demand_end[:, :, -1:], room_end[:, :, -1:])
        demand -= np.clip(met - demand_begin, 0, demand)
        room -= np.clip(met - room_begin, 0, room)
    return mine_ER


def interleave(codes: Integers, shares_ER: Integers) -> None:
    """Spread the places of an expert's assignments, or blocks, over its tokens, so that each chunk of consecutive
    tokens has its share of each: assignment i takes the place that stood at i times a stride of the golden section."""
    counts = shares_ER.sum(1)
    starts = counts.cumsum() - counts
    several = np.flatnonzero((shares_ER > 0).sum(1) > 1)
    counts, starts = counts[several], starts[several]
    strides = np.maximum(np.rint(GOLDEN * counts).astype(np.int64), 1)
    while (shared := np.gcd(strides, counts) > 1).any():
        strides[shared] += 1
    first = np.repeat(starts, counts)
    within = np.arange(len(first)) - np.repeat(counts.cumsum() - counts, counts)
    codes[first + within] = codes[first + within * np.repeat(strides, counts) % np.repeat(counts, counts)]
