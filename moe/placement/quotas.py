"""Quotas: the assignments of each expert that each rank computes in one call of an MoE layer, and their costs.

A planner is a pure function `plan(counts, placement, costs, limits) -> quotas`. All numbers are integers, so all ranks
compute the same plan. Shapes: R ranks of the expert parallel group, E experts; counts_RE has the assignments of each
rank's tokens, quotas_ER the assignments that each rank computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from moe.chunk_plan import stored_fields
from moe.placement_map import Integers, PlacementMap

GOLDEN = (5**0.5 - 1) / 2
# Fields of `Costs` that checkpoints store under another name.
STORED_COSTS = {"expert_overhead": "piece", "replica_in_node": "copy_in_node", "replica_between": "copy_between"}


@dataclass(frozen=True)
class Costs:
    """Costs of a placement, in units of the time that an expert takes for one more assignment."""

    expert_overhead: int = 0  # per expert with any assignments on a rank
    replica_in_node: int = 0  # sending, or receiving, an expert's weights; `of_call` adds the gradient
    replica_between: int | None = 0  # weights between nodes; None: no replicas between nodes
    grad_in_node: int = 0  # sending, or receiving, an expert's gradient
    grad_between: int = 0
    # Assignments per block if gradients are returned block by block; 0: a replica returns its gradient once per step.
    block_rows: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """Return the costs in a dict that `as_dict` made."""
        fields = {stored: name for name, stored in STORED_COSTS.items()}
        return cls(**{fields.get(stored, stored): value for stored, value in values.items()})

    def as_dict(self) -> dict[str, int | None]:
        """Return the costs with the field names that checkpoints store."""
        return stored_fields(self, STORED_COSTS)

    def of_call(self, trains: bool, block_rows: int | None = None) -> Costs:
        """Return these costs in the form that planners expect for a call.

        Without `trains`, gradients cost nothing. With `block_rows`, a gradient is charged per block. Otherwise a
        replica's gradient is returned once, and its cost is added to the cost of the weights.
        """
        if not trains:
            return replace(self, grad_in_node=0, grad_between=0)
        if block_rows is not None:  # blocks' gradients have the weights' dtype
            between = self.replica_between or 0
            return replace(self, grad_in_node=self.replica_in_node, grad_between=between, block_rows=block_rows)
        far = None if self.replica_between is None else self.replica_between + self.grad_between
        near = self.replica_in_node + self.grad_in_node
        return replace(self, replica_in_node=near, replica_between=far).of_call(trains=False)


@dataclass(frozen=True)
class ReplicaLimits:
    """Limits on a placement plan: replica slots, ranks per node, and the most assignments of a rank."""

    replica_slots: int  # replicas of the layer's experts that a rank may hold
    ranks_per_node: int  # consecutive ranks
    most: int | None = None  # most assignments of a rank
    # (expert, rank) of replicas that keep their slots, used or not, because backward passes need them
    pinned: frozenset[tuple[int, int]] = frozenset()


class QuotaPlanner(Protocol):
    """Interface of placement planners, which decide how many of an expert's assignments each rank computes."""

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
        """Return quotas_ER: each expert's assignments, divided among its primary and its replicas within `limits`."""


@dataclass(frozen=True)
class Outcome:
    """The loads, new replicas and estimated time of a call with given quotas."""

    loads_R: Integers  # assignments that each rank computes
    new_R: Integers  # replicas whose weights must be sent to each rank
    new_replicas: int  # their sum
    new_between: int  # new replicas on a different node than their primary
    seconds: int  # estimated time of the busiest rank, in the unit of Costs

    @property
    def imbalance(self) -> float:
        """The busiest rank's assignments, divided by the mean over ranks."""
        return float(self.loads_R.max() / max(self.loads_R.mean(), 1e-9))


def at_primaries(counts_RE: Integers, placement: PlacementMap) -> Integers:
    """Return quotas [E, R] without replicas: primaries compute all assignments."""
    return np.where(placement.is_primary_ER, counts_RE.sum(0)[:, None], 0)


def held(placement: PlacementMap) -> np.ndarray:
    """Return bool [E, R]: whether a rank has an expert's weights, as primary or replica, before the call sends any."""
    held_ER = placement.is_primary_ER.copy()
    for expert, rank in placement.replicas:
        held_ER[expert, rank] = True
    return held_ER


def check(
    quotas_ER: Integers, counts_RE: Integers, placement: PlacementMap, limits: ReplicaLimits, with_pinned: bool = False
) -> None:
    """Raise AssertionError if quotas lose assignments or need more replica slots than a rank has.

    `with_pinned`: slots of pinned replicas count, too. Planners may ignore pinned slots: if a replica then gets no
    slot, the primary computes its assignments.
    """
    assert (quotas_ER >= 0).all() and (quotas_ER.sum(1) == counts_RE.sum(0)).all()
    is_replica = (quotas_ER > 0) & ~placement.is_primary_ER
    for expert, rank in limits.pinned if with_pinned else ():
        is_replica[expert, rank] = True
    assert (is_replica.sum(0) <= limits.replica_slots).all(), is_replica.sum(0)


def outcome(quotas_ER: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Outcome:
    """Return the loads, new replicas and time of a call with given quotas; `costs`: the result of `Costs.of_call`."""
    used = quotas_ER > 0
    experts, ranks = np.nonzero(used & ~placement.is_primary_ER)
    primaries, num_ranks = placement.primary_ranks[experts], placement.num_ranks
    between = primaries // limits.ranks_per_node != ranks // limits.ranks_per_node
    is_new = ~held(placement)[experts, ranks]
    # time that each replica costs both its own rank and its primary's rank
    seconds = np.where(between, costs.replica_between or 0, costs.replica_in_node) * is_new
    if costs.block_rows:
        num_blocks = -(-quotas_ER[experts, ranks] // costs.block_rows)
        seconds = seconds + np.where(between, costs.grad_between, costs.grad_in_node) * num_blocks
    loads_R = quotas_ER.sum(0)
    work_R = loads_R + costs.expert_overhead * used.sum(0)
    copying_R = np.bincount(ranks, seconds, num_ranks) + np.bincount(primaries, seconds, num_ranks)
    new_R, busiest = np.bincount(ranks[is_new], minlength=num_ranks), (work_R + copying_R.astype(np.int64)).max()
    return Outcome(loads_R, new_R, int(is_new.sum()), int((is_new & between).sum()), int(busiest))


def shares(counts_RE: Integers, quotas_ER: Integers, ranks_per_node: int, rank: int) -> Integers:
    """Return [E, R]: the number of `rank`'s assignments of each expert that each rank computes.

    Each quota is filled with the computing rank's own assignments first, then with those of its node, then with all
    others. In the last two rounds, assignments are matched with quotas in rank order.
    """
    num_experts, num_ranks = quotas_ER.shape
    assert num_ranks % ranks_per_node == 0
    demand_ER, left_ER = counts_RE.T.copy(), quotas_ER.copy()
    stays_ER = np.minimum(demand_ER, left_ER)
    demand_ER -= stays_ER
    left_ER -= stays_ER
    mine_ER = np.zeros_like(quotas_ER)
    mine_ER[:, rank] = stays_ER[:, rank]
    for size in dict.fromkeys((ranks_per_node, num_ranks)):
        groups = num_experts, num_ranks // size, size  # of ranks, all at once
        demand, quota, mine = (each.reshape(groups) for each in (demand_ER, left_ER, mine_ER))
        demand_end, quota_end = demand.cumsum(2), quota.cumsum(2)
        demand_begin, quota_begin = demand_end - demand, quota_end - quota
        own, position = rank // size, rank % size
        low = np.maximum(quota_begin[:, own], demand_begin[:, own, position, None])
        high = np.minimum(quota_end[:, own], demand_end[:, own, position, None])
        mine[:, own] += np.maximum(high - low, 0)
        met = np.minimum(demand_end[:, :, -1:], quota_end[:, :, -1:])
        demand -= np.clip(met - demand_begin, 0, demand)
        quota -= np.clip(met - quota_begin, 0, quota)
    return mine_ER


def interleave(codes: Integers, shares_ER: Integers) -> None:
    """Interleave the destinations of each expert's assignments (or blocks) evenly over its tokens, in place.

    Every chunk of consecutive tokens then has about the same share of each destination. Assignment i of n gets the
    destination at position i times a stride of about 0.618 n, modulo n. `codes`: destinations, sorted by expert.
    """
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
