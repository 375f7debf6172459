"""Published planners of expert placement, FlexMoE's and LLEP's, and helpers that planners of other papers share.

FlexMoE (Nie et al., SIGMOD 2023, arXiv 2304.03946) changes replicas one by one while the balance is bad and the step
gets faster. LLEP (Least-Loaded Expert Parallelism, arXiv 2601.17111) plans each call from scratch. Neither has a limit
of a rank's assignments, and `limits.most` is ignored here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, held, outcome
from moe.placement_map import Integers, PlacementMap

# A replica takes at least a 64th of a rank's mean: 1,024 tokens in UltraEP and LLEP, at 8,192 tokens per rank and top
# 8.
SMALLEST_QUOTA = 64


class Instances:
    """Quotas that start on the primaries, and are moved to replicas within the replica slots of each rank."""

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
        """Return bool [R]: the ranks with a free slot that may get a replica of the expert and have none yet."""
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
    """Return bool [E, R]: the ranks that may hold a replica of each expert, never the rank of its primary."""
    ranks, primaries = np.arange(placement.num_ranks), placement.primary_ranks[:, None]
    allowed = primaries != ranks
    if costs.replica_between is None:
        allowed &= primaries // limits.ranks_per_node == ranks // limits.ranks_per_node
    return allowed


def split_evenly(totals_E: Integers, where_ER: np.ndarray) -> Integers:
    """Return quotas [E, R]: each expert's assignments split evenly over its ranks; lower ranks get the remainder."""
    share, rest = np.divmod(totals_E, where_ER.sum(1))
    return np.where(where_ER, share[:, None] + (where_ER.cumsum(1) <= rest[:, None]), 0)


def by_size(sizes: Integers) -> list[int]:
    """Return indices sorted by falling size, then by index."""
    return [int(index) for index in np.argsort(-sizes, kind="stable")]


FLEX_TRIGGER = 12  # tenths of the mean load above which the busiest rank triggers changes


def flex(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Return the quotas [E, R] of one call, planned as in FlexMoE.

    An expert's assignments are split evenly over its instances, and earlier replicas stay. While the busiest rank has
    more than 1.2 times the mean and the predicted time falls, the best of these changes is made:

    * expand: the largest quota of the busiest rank gets a replica in a free slot,
    * shrink: or in the slot of the replica with the smallest quota,
    * migrate: a replica of the busiest rank moves to another rank, or is exchanged with one of its replicas.

    The paper expands the largest quota of all ranks; that of the busiest rank is better. Of the ranks of a kind (in the
    primary's node, or anywhere) only the least loaded one is tried: no other is better.
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
    """Yield, for each change to try, the ranks of all experts after it: bool [E, R]."""
    primaries_E, loads_R = placement.primary_ranks, quotas_ER.sum(0)
    replicas_ER = where_ER.copy()
    replicas_ER[np.arange(placement.num_experts), primaries_E] = False
    free_R = replicas_ER.sum(0) < limits.replica_slots
    busiest = int(loads_R.argmax())

    def least_busy(expert: int, among_R: np.ndarray) -> Iterator[int]:
        """Yield the least busy of the ranks `among_R` in the primary's node, then the least busy of them all."""
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


LLEP_TRIGGER = 13  # tenths of the mean load below which nothing is moved
LLEP_FULL = 11  # tenths of the mean load up to which a rank is filled


def least_loaded(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Return the quotas [E, R] of one call, planned as in LLEP.

    Experts are assigned by size, each to its primary as far as it fits, then to the least loaded rank. LLEP has no
    limit of slots; here a rank without a free slot takes nothing.
    """
    plan = Instances(counts_RE, placement, costs, limits)
    totals_E, loads_R = plan.quotas_ER.sum(1), plan.quotas_ER.sum(0)
    total, ranks = int(loads_R.sum()), placement.num_ranks
    if 10 * int(loads_R.max()) * ranks < LLEP_TRIGGER * total:
        return at_primaries(counts_RE, placement)
    full = -(-LLEP_FULL * total // (10 * ranks))
    floor = max(1, total // (ranks * SMALLEST_QUOTA))
    busy_R = loads_R.copy()  # assigned so far, and the primaries' assignments that follow
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
            if not fits_R.any():  # all of it to the least loaded rank, which may be the primary's
                open_R[primary] = True
                fits_R, number_R = open_R, np.full(ranks, rest)
            target = int(np.where(fits_R, busy_R, total + 1).argmin())
            number = int(number_R[target])
            if target != primary:
                plan.give(expert, target, number)
            busy_R[target] += number
            rest -= number
    return plan.quotas_ER
