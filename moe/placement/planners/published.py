"""Published planners of expert placement, FlexMoE's and LLEP's, and helpers that planners of other papers share.

FlexMoE (Nie et al., SIGMOD 2023, arXiv 2304.03946) changes replicas one by one while the load is imbalanced and the
predicted time falls. LLEP (Least-Loaded Expert Parallelism, arXiv 2601.17111) plans each call from scratch. Neither has
a limit on a rank's assignments, so `limits.most` is ignored here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, held, outcome
from moe.placement_map import Integers, PlacementMap

# A replica takes at least 1/64 of a rank's mean assignments: UltraEP and LLEP use 1,024, with 8,192 tokens per rank and
# top 8.
SMALLEST_QUOTA = 64


class Instances:
    """A placement plan in progress: assignments start on the primaries and are moved to replicas in free slots."""

    def __init__(
        self,
        counts_RE: Integers,
        placement: PlacementMap,
        costs: Costs,
        limits: ReplicaLimits,
        replica_slots: int | None = None,
    ) -> None:
        self.quotas_ER = at_primaries(counts_RE, placement)
        self.primaries_E = placement.primary_ranks
        self.free_R = np.full(placement.num_ranks, limits.replica_slots if replica_slots is None else replica_slots)
        self._may_ER = may_hold(placement, costs, limits)

    def open_R(self, expert: int) -> np.ndarray:
        """Return bool [R]: whether a rank may get a new replica of the expert, and has a free slot for it."""
        return (self.free_R > 0) & self._may_ER[expert] & (self.quotas_ER[expert] == 0)

    def on_primary(self, expert: int) -> int:
        """Return the number of the expert's assignments that are still on its primary."""
        return int(self.quotas_ER[expert, self.primaries_E[expert]])

    def give(self, expert: int, rank: int, number: int) -> None:
        """Move `number` assignments from an expert's primary to its replica on `rank`; a new replica takes a slot."""
        self.free_R[rank] -= self.quotas_ER[expert, rank] == 0
        self.quotas_ER[expert, self.primaries_E[expert]] -= number
        self.quotas_ER[expert, rank] += number


def may_hold(placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> np.ndarray:
    """Return bool [E, R]: whether a rank may hold a replica of an expert; always False for its primary's rank."""
    ranks, primaries = np.arange(placement.num_ranks), placement.primary_ranks[:, None]
    allowed = primaries != ranks
    if costs.replica_between is None:
        allowed &= primaries // limits.ranks_per_node == ranks // limits.ranks_per_node
    return allowed


def split_evenly(totals_E: Integers, where_ER: np.ndarray) -> Integers:
    """Return quotas [E, R]: each expert's assignments, split evenly over its ranks; lower ranks get the remainder."""
    share, rest = np.divmod(totals_E, where_ER.sum(1))
    return np.where(where_ER, share[:, None] + (where_ER.cumsum(1) <= rest[:, None]), 0)


def by_size(sizes: Integers) -> list[int]:
    """Return the indices of `sizes`, sorted by decreasing size, then by index."""
    return [int(index) for index in np.argsort(-sizes, kind="stable")]


FLEX_TRIGGER = 12  # load of the busiest rank, in tenths of the mean, above which changes are tried


def flex(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Return the quotas [E, R] of one call according to FlexMoE's planner.

    An expert's assignments are split evenly over its primary and replicas; existing replicas stay. While the busiest
    rank has more than 1.2 times the mean load and a change lowers the predicted time, the best change is made:

    * expand: the largest expert of the busiest rank gets a replica in a free slot,
    * shrink: or in the slot of the replica with the smallest quota,
    * migrate: a replica of the busiest rank moves to a different rank, or is exchanged with a replica there.

    The paper expands the largest expert of all ranks; that of the busiest rank is better. Only the least loaded rank in
    the primary's node, and the least loaded rank of all, are tried, because no other rank is better.
    """
    totals_E, may_ER = counts_RE.sum(0), may_hold(placement, costs, limits)
    best = split_evenly(totals_E, where_ER := held(placement))
    result = outcome(best, placement, costs, limits)
    while 10 * int(result.loads_R.max()) * placement.num_ranks > FLEX_TRIGGER * int(totals_E.sum()):
        found = None
        for changed_ER in _changes(where_ER, best, placement, limits, may_ER):
            quotas_ER = split_evenly(totals_E, changed_ER)
            then = outcome(quotas_ER, placement, costs, limits)
            if then.seconds < (result if found is None else found[2]).seconds:
                found = changed_ER, quotas_ER, then
        if found is None:
            break
        where_ER, best, result = found
    return best


def _changes(
    where_ER: np.ndarray, quotas_ER: Integers, placement: PlacementMap, limits: ReplicaLimits, may_ER: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the result of each change to try as bool [E, R]: whether a rank has the expert, as primary or replica."""
    primaries_E, loads_R = placement.primary_ranks, quotas_ER.sum(0)
    replicas_ER = where_ER & ~placement.is_primary_ER
    free_R = replicas_ER.sum(0) < limits.replica_slots
    busiest = int(loads_R.argmax())

    def least_busy(expert: int, among_R: np.ndarray) -> Iterator[int]:
        """Yield the least loaded rank in the primary's node, then the least loaded of all ranks.

        Only ranks in `among_R` that may get a new replica of the expert are considered.
        """
        among_R = among_R & may_ER[expert] & ~where_ER[expert]
        near_R = np.arange(placement.num_ranks) // limits.ranks_per_node == primaries_E[expert] // limits.ranks_per_node
        for ranks in (np.flatnonzero(among_R & near_R), np.flatnonzero(among_R)):
            if len(ranks):
                yield int(ranks[loads_R[ranks].argmin()])

    def changed(*flips: tuple[int, int]) -> np.ndarray:
        result = where_ER.copy()
        for expert, rank in flips:
            result[expert, rank] ^= True
        return result

    hot = int(quotas_ER[:, busiest].argmax())
    for rank in least_busy(hot, free_R):
        yield changed((hot, rank))
    cold_ER = np.where(replicas_ER & (quotas_ER < quotas_ER[hot, busiest]), quotas_ER, quotas_ER.max() + 1)
    cold, rank = (int(index) for index in np.unravel_index(cold_ER.argmin(), cold_ER.shape))
    if replicas_ER[cold, rank] and cold != hot and may_ER[hot, rank] and not where_ER[hot, rank]:
        yield changed((cold, rank), (hot, rank))
    for expert in np.flatnonzero(replicas_ER[:, busiest]).tolist():
        for rank in least_busy(expert, free_R):
            yield changed((expert, busiest), (expert, rank))
        for rank in least_busy(expert, ~free_R):
            for other in np.flatnonzero(replicas_ER[:, rank] & may_ER[:, busiest] & ~where_ER[:, busiest]).tolist():
                yield changed((expert, busiest), (expert, rank), (other, rank), (other, busiest))


LLEP_TRIGGER = 13  # load of the busiest rank, in tenths of the mean, below which nothing is moved
LLEP_FULL = 11  # load up to which a rank is filled, in tenths of the mean


def least_loaded(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Return the quotas [E, R] of one call according to LLEP's planner.

    Experts are assigned in order of decreasing size: to the primary while it has headroom, then to the least loaded
    ranks. LLEP has no limit on replica slots; here a rank without a free slot gets no replica.
    """
    plan = Instances(counts_RE, placement, costs, limits)
    totals_E, loads_R = plan.quotas_ER.sum(1), plan.quotas_ER.sum(0)
    total, ranks = int(loads_R.sum()), placement.num_ranks
    if 10 * int(loads_R.max()) * ranks < LLEP_TRIGGER * total:
        return at_primaries(counts_RE, placement)
    full = -(-LLEP_FULL * total // (10 * ranks))
    floor = max(1, total // (ranks * SMALLEST_QUOTA))
    busy_R = loads_R.copy()  # assigned so far, and on primaries still to be assigned
    for expert in by_size(totals_E):
        primary, rest = int(plan.primaries_E[expert]), int(totals_E[expert])
        busy_R[primary] -= rest
        kept = min(rest, max(full - int(busy_R[primary]), 0))
        busy_R[primary] += kept
        rest -= kept
        while rest > 0:
            open_R = plan.open_R(expert)
            number_R = np.minimum(rest, full - busy_R)
            fits_R = open_R & (number_R > 0) & ((number_R >= floor) | (number_R == rest))
            if not fits_R.any():  # the whole rest is assigned to the least loaded rank, possibly the primary's
                open_R[primary] = True
                fits_R, number_R = open_R, np.full(ranks, rest)
            target = int(np.where(fits_R, busy_R, total + 1).argmin())
            number = int(number_R[target])
            if target != primary:
                plan.give(expert, target, number)
            busy_R[target] += number
            rest -= number
    return plan.quotas_ER
