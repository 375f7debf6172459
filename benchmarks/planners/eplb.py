"""DeepSeek's EPLB: every slot is filled (github.com/deepseek-ai/EPLB).

The expert with the largest instances gets one more, until there are as many as slots. Then the instances are packed,
the largest first, each to the rank with the least.

Here homes stay, and only what is beyond them is packed; what finds no slot is left out. An expert's tokens are split
evenly over its instances. EPLB knows the loads of the past alone; here it plans for those of the call itself, which is
better than it can have.
"""

from __future__ import annotations

import numpy as np

from moe.placement.planners.published import by_size, may_hold, split_evenly
from moe.placement.quotas import Costs, ReplicaLimits, held
from moe.placement_map import Integers, PlacementMap


def eplb(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """quotas_ER of one call."""
    totals_E, may_ER = counts_RE.sum(0), may_hold(placement, costs, limits)
    number_E = np.ones(placement.num_experts, dtype=np.int64)
    for _ in range(limits.replica_slots * placement.num_ranks):
        sizes_E = np.where(number_E <= may_ER.sum(1), totals_E / number_E, -1)
        number_E[sizes_E.argmax()] += sizes_E.max() >= 0
    sizes_E = totals_E / number_E
    where_ER = held(PlacementMap(placement.num_experts, placement.num_ranks, placement.primaries))
    busy_R = np.bincount(placement.primary_ranks, sizes_E, placement.num_ranks)
    free_R = np.full(placement.num_ranks, limits.replica_slots)
    for expert in by_size(sizes_E):
        for _ in range(number_E[expert] - 1):
            open_R = (free_R > 0) & may_ER[expert] & ~where_ER[expert]
            if not open_R.any():
                break
            rank = int(np.where(open_R, busy_R, np.inf).argmin())
            where_ER[expert, rank] = True
            busy_R[rank] += sizes_E[expert]
            free_R[rank] -= 1
    return split_evenly(totals_E, where_ER)
