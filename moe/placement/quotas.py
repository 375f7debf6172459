"""How many assignments of each expert each rank computes in one call of an MoE layer: what planners are told, what they
answer, and what that costs.

A planner is a pure function `plan(counts, placement, costs, limits) -> quotas`. All numbers are integers, so that all
ranks plan alike. Shapes: R ranks of the expert parallel group, E experts; counts_RE by the rank whose tokens they are,
quotas_ER by the rank that computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from moe.placement_map import Integers, PlacementMap

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Costs:
    """In the time that an expert takes for one more assignment."""

    piece: int = 0  # an expert with any assignments at all, on each rank that computes it
    copy_in_node: int = 0  # sending, or receiving, an expert's weights; and in a call what comes of them later
    copy_between: int | None = 0  # the same between nodes; None: there are to be no such copies
    grad_in_node: int = 0  # sending, or receiving, an expert's gradient
    grad_between: int = 0
    # Assignments of a copy whose gradients travel by themselves, in each call; 0: a copy's travel once, with its end.
    block_rows: int = 0

    def of_call(self, trains: bool, block_rows: int | None = None) -> Costs:
        """What a planner is told for one call: a copy's gradient is charged with its weights, as it will travel once;
        block by block it is charged with each use; where nothing is learned, never."""
        if not trains:
            return replace(self, grad_in_node=0, grad_between=0)
        if block_rows is not None:  # blocks' gradients are in the weights' kind
            between = self.copy_between or 0
            return replace(self, grad_in_node=self.copy_in_node, grad_between=between, block_rows=block_rows)
        far = None if self.copy_between is None else self.copy_between + self.grad_between
        return replace(self, copy_in_node=self.copy_in_node + self.grad_in_node, copy_between=far).of_call(False)

    def of_copy(self, is_between: np.ndarray, is_new: np.ndarray, counts: Integers) -> Integers:
        """What copies that compute so many assignments cost their homes' ranks, and their own as much."""
        weights = np.where(is_between, self.copy_between or 0, self.copy_in_node) * is_new
        if not self.block_rows:
            return weights
        return weights + np.where(is_between, self.grad_between, self.grad_in_node) * -(-counts // self.block_rows)


@dataclass(frozen=True)
class CopyLimits:
    """What a plan may use."""

    slots: int  # copies of the layer's experts that a rank may hold
    ranks_per_node: int  # ranks that follow one another
    most: int | None = None  # assignments that a rank may compute
    # (expert, rank) of copies that keep their slots, used or not: backward passes need them
    pinned: frozenset[tuple[int, int]] = frozenset()


class QuotaPlanner(Protocol):
    """One policy."""

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Integers:
        """quotas_ER: of each expert as many as there are assignments, on its home and on `limits.slots` copies a rank
        at most."""


@dataclass(frozen=True)
class Outcome:
    """What a call's quotas come to."""

    loads_R: Integers  # assignments that each rank computes
    new_R: Integers  # weights that must travel to each rank
    new_copies: int  # all of them
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


def check(
    quotas_ER: Integers, counts_RE: Integers, placement: PlacementMap, limits: CopyLimits, with_pinned: bool = False
) -> None:
    """Raises AssertionError where a planner's answer is none. `with_pinned`: it knows that pinned copies keep their
    slots; of another's answer the layer sends home what finds none."""
    assert (quotas_ER >= 0).all() and (quotas_ER.sum(1) == counts_RE.sum(0)).all()
    is_copy = quotas_ER > 0
    is_copy[np.arange(placement.num_experts), placement.home_ranks] = False
    for expert, rank in limits.pinned if with_pinned else ():
        is_copy[expert, rank] = True
    assert (is_copy.sum(0) <= limits.slots).all(), is_copy.sum(0)


def outcome(quotas_ER: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Outcome:
    """What a planner's answer comes to; the costs are those of a call."""
    used = quotas_ER > 0
    experts, ranks = np.nonzero(used & (np.arange(placement.num_ranks) != placement.home_ranks[:, None]))
    homes, num_ranks = placement.home_ranks[experts], placement.num_ranks
    between = homes // limits.ranks_per_node != ranks // limits.ranks_per_node
    is_new = ~held(placement)[experts, ranks]
    seconds = costs.of_copy(between, is_new, quotas_ER[experts, ranks])
    loads_R = quotas_ER.sum(0)
    work_R = loads_R + costs.piece * used.sum(0)
    copying_R = np.bincount(ranks, seconds, num_ranks) + np.bincount(homes, seconds, num_ranks)
    return Outcome(
        loads_R,
        np.bincount(ranks[is_new], minlength=num_ranks),
        int(is_new.sum()),
        int((is_new & between).sum()),
        int((work_R + copying_R.astype(np.int64)).max()),
    )


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
