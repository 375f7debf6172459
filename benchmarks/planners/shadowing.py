"""FasterMoE's planner: hot experts are sent to all ranks, and each computes its own tokens (He et al., PPoPP 2022).

Experts are tried by size, until the predicted time falls no more: the busiest rank's work, and a broadcast for each
shadowed expert, in which a rank receives the weights once.
"""

from __future__ import annotations

import numpy as np

from moe.placement.planners.published import by_size, may_hold
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries
from moe.placement_map import Integers, PlacementMap


def shadowing(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """quotas_ER of one call. A rank without tokens of a shadowed expert has no piece of it."""
    quotas_ER, may_ER = at_primaries(counts_RE, placement), may_hold(placement, costs, limits)
    one_node = limits.ranks_per_node >= placement.num_ranks
    broadcast = costs.replica_in_node if one_node else costs.replica_between or 0
    best = _seconds(quotas_ER, costs)
    for shadows, expert in enumerate(by_size(quotas_ER.sum(1)), 1):
        trial_ER = quotas_ER.copy()
        trial_ER[expert] = counts_RE[:, expert]
        copies_ER = (trial_ER > 0) & (np.arange(placement.num_ranks) != placement.primary_ranks[:, None])
        fits = (copies_ER.sum(0) <= limits.replica_slots).all() and may_ER[copies_ER].all()
        seconds = _seconds(trial_ER, costs) + shadows * broadcast
        if not fits or seconds >= best:
            break
        quotas_ER, best = trial_ER, seconds
    return quotas_ER


def _seconds(quotas_ER: Integers, costs: Costs) -> int:
    return int((quotas_ER.sum(0) + costs.expert_overhead * (quotas_ER > 0).sum(0)).max())
