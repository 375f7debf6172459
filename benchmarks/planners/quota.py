"""UltraEP's planner: the lowest threshold under which every rank can give away what is over it (arXiv 2606.04101v3).

It has no memory. Under a threshold the busiest ranks give first, of each the largest experts, always to the rank with
the most room that has a slot for a copy. Three thresholds near the mean are tried, with a floor per copy that depends
on what is left; then the least one is searched with a fixed floor, below which only a last rest goes (UltraEP gives
such a threshold up). It balances assignments, whatever copies cost.
"""

from __future__ import annotations

import numpy as np

from moe.placement.planners.published import SMALLEST_QUOTA, Instances, by_size
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries
from moe.placement_map import Integers, PlacementMap

ABOVE = 100  # the first threshold is a hundredth above the mean


def quota(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Return quotas_ER of one call."""
    best = at_primaries(counts_RE, placement)
    loads_R = best.sum(0)
    most, mean = int(loads_R.max()), _ceil(int(loads_R.sum()), placement.num_ranks)
    first, step = mean + _ceil(mean, ABOVE), _ceil(most, ABOVE)
    for threshold in (first, first + step, first + 2 * step):
        plan = _under(threshold, None, Instances(counts_RE, placement, costs, limits), loads_R)
        if plan is not None:
            return plan
    low, high, floor = mean, most, max(1, mean // SMALLEST_QUOTA)
    while low < high:
        threshold = (low + high) // 2
        plan = _under(threshold, floor, Instances(counts_RE, placement, costs, limits), loads_R)
        if plan is None:
            low = threshold + 1
        else:
            best, high = plan, threshold
    return best


def _under(threshold: int, floor: int | None, plan: Instances, loads_R: Integers) -> Integers | None:
    """Return quotas_ER with no rank above the threshold; None if the ranks lack headroom. Without a floor, a replica
    takes at least what is left, divided by the ranks that could take it."""
    headroom_R = threshold - loads_R
    sizes_E = plan.quotas_ER.sum(1)
    for source in by_size(loads_R):
        need = -int(headroom_R[source])
        if need <= 0:
            break
        own = np.flatnonzero(plan.primaries_E == source)
        for expert in own[by_size(sizes_E[own])]:
            while need > 0 and (open_R := plan.open_R(expert) & (headroom_R > 0)).any():
                target = int(np.where(open_R, headroom_R, 0).argmax())
                number = min(need, int(headroom_R[target]), plan.on_primary(expert) - 1)
                if number < (_ceil(need, int(open_R.sum())) if floor is None else min(floor, need)):
                    break
                plan.give(expert, target, number)
                headroom_R[target] -= number
                need -= number
        if need > 0:
            return None
    return plan.quotas_ER


def _ceil(number: int, by: int) -> int:
    return -(-number // by)
