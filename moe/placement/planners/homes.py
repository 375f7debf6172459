"""Where experts shall be at home: the slow half of placement, decided from the loads of many steps.

A move exchanges two experts that have the same slot on two ranks: then all that a home owns lies at the same place
before and after it, whatever the optimizer shards. First the nodes' loads come into balance, as copies stay inside a
node; then the ranks' of each node, which saves copies. Shapes: R ranks, S slots of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe.placement_map import Integers, PlacementMap

# A move takes at least this much of the mean off the busiest node, or rank, and more than the noise of counts. A rank's
# imbalance costs copies alone, so that more of it is left.
WORTH_OF_NODES, WORTH_OF_RANKS = 0.005, 0.1
NOISE = 3.0  # standard deviations


def plan_homes(loads_E: Integers, placement: PlacementMap, ranks_per_node: int) -> PlacementMap:
    """The map after the moves that pay; loads_E: assignments of each expert over all steps since the last one. The same
    on all ranks that ask alike, and the same map where nothing pays."""
    ranks, slots = placement.num_ranks, placement.num_slots
    expert_RS = np.empty((ranks, slots), dtype=np.int64)
    expert_RS[placement.home_ranks, placement.home_slots] = np.arange(placement.num_experts)
    before_RS = expert_RS.copy()
    nodes = [np.arange(first, first + ranks_per_node) for first in range(0, ranks, ranks_per_node)]
    mean = loads_E.sum() / max(ranks, 1)
    _balance(expert_RS, loads_E, nodes, _worth(WORTH_OF_NODES, mean * ranks_per_node))
    for node in nodes:
        _balance(expert_RS, loads_E, [node[i : i + 1] for i in range(len(node))], _worth(WORTH_OF_RANKS, mean))
    if (expert_RS == before_RS).all():
        return placement
    home_ranks = np.empty(placement.num_experts, dtype=np.int64)
    home_ranks[expert_RS] = np.arange(ranks)[:, None]
    return placement.moved_to(home_ranks.tolist())


def _balance(expert_RS: Integers, loads_E: Integers, groups: Sequence[Integers], worth: float) -> None:
    """Exchange experts of the busiest group of ranks with others' as long as one exchange takes `worth` off it."""
    of_group_R = np.full(len(expert_RS), -1)
    for number, group in enumerate(groups):
        of_group_R[group] = number
    members = np.concatenate(list(groups))
    for _ in range(expert_RS.size):  # each exchange lowers the busiest group or the number of those that are as busy
        load_RS = loads_E[expert_RS]
        load_G = np.array([load_RS[group].sum() for group in groups])
        busiest = int(load_G.argmax())
        own, others = groups[busiest], members[of_group_R[members] != busiest]
        if not len(others):
            return
        less = load_RS[own][:, None, :] - load_RS[others][None]  # that the busiest group has less, [own, others, S]
        after = np.maximum(load_G[busiest] - less, load_G[of_group_R[others]][None, :, None] + less)
        mine, theirs, slot = np.unravel_index(after.argmin(), after.shape)
        if load_G[busiest] - after[mine, theirs, slot] < max(worth, 1):
            return
        one, other = (own[mine], slot), (others[theirs], slot)
        expert_RS[one], expert_RS[other] = expert_RS[other], expert_RS[one]


def _worth(share: float, mean: float) -> float:
    return max(share * mean, NOISE * mean**0.5)


def swapped(before: PlacementMap, after: PlacementMap) -> int:
    """How many experts have another home."""
    return int((before.home_ranks != after.home_ranks).sum())
