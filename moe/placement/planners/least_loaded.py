"""LLEP's planner: experts by size, each to its home as far as it fits, then to the rank with the least to do
(Least-Loaded Expert Parallelism, arXiv 2601.17111).

It has no memory, and leaves calls that are balanced well enough alone. It knows no limit of slots; here a rank without
a free one takes nothing.
"""

from __future__ import annotations

import numpy as np

from moe.placement.planners.instances import SMALLEST_PIECE, Instances, by_size
from moe.placement.quotas import CopyLimits, Costs, at_home
from moe.placement_map import Integers, PlacementMap

TRIGGER = 13  # tenths of the mean that the busiest rank must have
FULL = 11  # tenths of the mean that a rank takes


def least_loaded(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Integers:
    """quotas_ER of one call."""
    plan = Instances(counts_RE, placement, costs, limits)
    totals_E, loads_R = plan.quotas_ER.sum(1), plan.quotas_ER.sum(0)
    total, ranks = int(loads_R.sum()), placement.num_ranks
    if 10 * int(loads_R.max()) * ranks < TRIGGER * total:
        return at_home(counts_RE, placement)
    full = -(-FULL * total // (10 * ranks))
    floor = max(1, total // (ranks * SMALLEST_PIECE))
    busy_R = loads_R.copy()  # what is given to a rank, and its own that is still to come
    for expert in by_size(totals_E):
        home, rest = int(plan.homes_E[expert]), int(totals_E[expert])
        busy_R[home] -= rest
        kept = min(rest, max(full - int(busy_R[home]), 0))
        busy_R[home] += kept
        rest -= kept
        while rest > 0:
            open_R = plan.open_R(expert)
            number_R = np.minimum(rest, full - busy_R)
            fits_R = open_R & (number_R > 0) & ((number_R >= floor) | (number_R == rest))
            if not fits_R.any():  # all of it to the rank with the least, be it the home
                open_R[home] = True
                fits_R, number_R = open_R, np.full(ranks, rest)
            target = int(np.where(fits_R, busy_R, total + 1).argmin())
            number = int(number_R[target])
            if target != home:
                plan.give(expert, target, number)
            busy_R[target] += number
            rest -= number
    return plan.quotas_ER
