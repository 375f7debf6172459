"""MoonEP's planner: every rank computes exactly its mean (github.com/MoonshotAI/MoonEP).

The home with the most too many fills the rank with the most room, exactly, though it may then have too few itself. So
every rank takes copies from one other home at most, and num_experts / num_ranks slots are always enough. It takes them,
whatever `limits.replica_slots` says, and copies between nodes.
"""

from __future__ import annotations

import numpy as np

from moe.placement.planners.published import Instances
from moe.placement.quotas import Costs, ReplicaLimits
from moe.placement_map import Integers, PlacementMap


def moonep(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """quotas_ER of one call. Where the mean is no integer, the first ranks compute one more."""
    ranks = placement.num_ranks
    plan = Instances(counts_RE, placement, Costs(), limits, replica_slots=placement.num_expert_slots)
    loads_R = plan.quotas_ER.sum(0)
    share, rest = divmod(int(loads_R.sum()), ranks)
    over_R = loads_R - share - (np.arange(ranks) < rest)
    moved_RR = np.zeros((ranks, ranks), dtype=np.int64)
    while over_R.any():
        source, target = int(over_R.argmax()), int(over_R.argmin())
        moved_RR[source, target] -= over_R[target]
        over_R[source] += over_R[target]
        over_R[target] = 0
    for source in range(ranks):
        _share_out(source, moved_RR[source], plan)
    return plan.quotas_ER


def _share_out(source: int, moved_R: Integers, plan: Instances) -> None:
    """Of a home's experts, the one with the most left goes to the rank that is still to get the most, again and
    again."""
    own = np.flatnonzero(plan.primaries_E == source)
    left_E = plan.quotas_ER[own].sum(1)
    while moved_R.any():
        target, index = int(moved_R.argmax()), int(left_E.argmax())
        number = int(min(moved_R[target], left_E[index]))
        plan.give(int(own[index]), target, number)
        moved_R[target] -= number
        left_E[index] -= number
