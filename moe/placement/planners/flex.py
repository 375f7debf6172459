"""FlexMoE's planner: copies change one by one while the balance is bad and the step gets faster (Nie et al., SIGMOD
2023, arXiv 2304.03946).

An expert's assignments are split evenly over its instances. The copies of before stay. Where the busiest rank has more
than 1.2 times the mean, the best of these changes is made, again and again, as long as the predicted time falls:

* expand: the largest piece of the busiest rank gets a copy in a free slot,
* shrink: or in the slot of the copy with the smallest piece,
* migrate: a copy of the busiest rank moves to another rank, or changes places with one of its copies.

The paper expands the largest piece of all, which need not be on the busiest rank; ours is better for it. Of the ranks
of a kind (in the home's node, or anywhere) only the one with the least to do is tried: no other is better.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe.placement.planners.instances import may_hold, split_evenly
from moe.placement.quotas import CopyLimits, Costs, held, outcome
from moe.placement_map import Integers, PlacementMap

TRIGGER = 12  # tenths of the mean that the busiest rank must have


def flex(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Integers:
    """quotas_ER of one call."""
    totals_E, may_ER = counts_RE.sum(0), may_hold(placement, costs, limits)
    best = split_evenly(totals_E, where_ER := held(placement))
    result = outcome(best, placement, costs, limits)
    while 10 * int(result.loads_R.max()) * placement.num_ranks > TRIGGER * int(totals_E.sum()):
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
    where_ER: np.ndarray, quotas_ER: Integers, placement: PlacementMap, limits: CopyLimits, may_ER: np.ndarray
) -> Iterator[np.ndarray]:
    """Where the experts would be, after each of the changes in question."""
    homes_E, loads_R = placement.home_ranks, quotas_ER.sum(0)
    copies_ER = where_ER.copy()
    copies_ER[np.arange(placement.num_experts), homes_E] = False
    free_R = copies_ER.sum(0) < limits.slots
    busiest = int(loads_R.argmax())

    def least_busy(expert: int, among_R: np.ndarray) -> Iterator[int]:
        """In the home's node, and anywhere."""
        among_R = among_R & may_ER[expert] & ~where_ER[expert]
        near_R = np.arange(placement.num_ranks) // limits.ranks_per_node == homes_E[expert] // limits.ranks_per_node
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
    pieces_ER = np.where(copies_ER & (quotas_ER < quotas_ER[hot, busiest]), quotas_ER, quotas_ER.max() + 1)
    cold, rank = (int(index) for index in np.unravel_index(pieces_ER.argmin(), pieces_ER.shape))
    if copies_ER[cold, rank] and cold != hot and may_ER[hot, rank] and not where_ER[hot, rank]:
        yield changed((cold, rank), (hot, rank))
    for expert in np.flatnonzero(copies_ER[:, busiest]).tolist():
        for rank in least_busy(expert, free_R):
            yield changed((expert, busiest), (expert, rank))
        for rank in least_busy(expert, ~free_R):
            for other in np.flatnonzero(copies_ER[:, rank] & may_ER[:, busiest] & ~where_ER[:, busiest]).tolist():
                yield changed((expert, busiest), (expert, rank), (other, rank), (other, busiest))
