"""Migration of experts: which experts change their primary rank between two steps, and the exchange of their tensors.

Migrations change placement slowly, according to the loads of many steps. A migration exchanges two experts in the same
expert slot of two ranks, so every expert keeps its slot number. Each tensor of the slot has a counterpart of equal
shape on the other rank (same shard, same offset), however the optimizer shards its state; the two are exchanged. First
the loads of nodes are balanced, because replicas stay inside a node; then those of the ranks of each node, which saves
replicas. Shapes: R ranks, S expert slots of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moe.placement_map import Integers, PlacementMap

# A migration must lower the load of the busiest node, or rank, by at least this share of the mean, and by more than the
# noise of counts. Ranks have a higher threshold, because their imbalance only costs replicas.
WORTH_OF_NODES, WORTH_OF_RANKS = 0.005, 0.1
NOISE = 3.0  # standard deviations


def plan_migrations(loads_E: Integers, placement: PlacementMap, ranks_per_node: int) -> PlacementMap:
    """Return the placement map after all worthwhile migrations; `placement` itself if there are none.

    `loads_E`: each expert's assignments since the last migrations. Equal inputs give all ranks the same map.
    """
    ranks = placement.num_ranks
    expert_RS = np.array([placement.experts_of(rank) for rank in range(ranks)])
    before_RS = expert_RS.copy()
    nodes = [np.arange(first, first + ranks_per_node) for first in range(0, ranks, ranks_per_node)]
    mean = loads_E.sum() / max(ranks, 1)
    node_mean = mean * ranks_per_node
    _balance(expert_RS, loads_E, nodes, max(WORTH_OF_NODES * node_mean, NOISE * node_mean**0.5))
    for node in nodes:
        each_rank = [node[i : i + 1] for i in range(len(node))]
        _balance(expert_RS, loads_E, each_rank, max(WORTH_OF_RANKS * mean, NOISE * mean**0.5))
    if (expert_RS == before_RS).all():
        return placement
    primary_ranks = np.empty(placement.num_experts, dtype=np.int64)
    primary_ranks[expert_RS] = np.arange(ranks)[:, None]
    return placement.moved_to(primary_ranks.tolist())


def _balance(expert_RS: Integers, loads_E: Integers, groups: Sequence[Integers], worth: float) -> None:
    """Swap experts of the busiest group of ranks with experts of other groups, in place in `expert_RS`.

    A swap is made as long as it lowers the greater load of its two groups by at least `worth`.
    """
    of_group_R = np.full(len(expert_RS), -1)
    for number, group in enumerate(groups):
        of_group_R[group] = number
    members = np.concatenate(list(groups))
    for _ in range(expert_RS.size):  # each swap lowers the greatest load, or the number of groups with it
        load_RS = loads_E[expert_RS]
        load_G = np.array([load_RS[group].sum() for group in groups])
        busiest = int(load_G.argmax())
        own, others = groups[busiest], members[of_group_R[members] != busiest]
        if not len(others):
            return
        less = load_RS[own][:, None, :] - load_RS[others][None]  # load that leaves the busiest group, [own, others, S]
        after = np.maximum(load_G[busiest] - less, load_G[of_group_R[others]][None, :, None] + less)
        mine, theirs, expert_slot = np.unravel_index(after.argmin(), after.shape)
        if load_G[busiest] - after[mine, theirs, expert_slot] < max(worth, 1):
            return
        one, other = (own[mine], expert_slot), (others[theirs], expert_slot)
        expert_RS[one], expert_RS[other] = expert_RS[other], expert_RS[one]


def num_migrated(before: PlacementMap, after: PlacementMap) -> int:
    """Return the number of experts whose primary rank differs between two placement maps."""
    return int((before.primary_ranks != after.primary_ranks).sum())


@dataclass(frozen=True)
class Migration:
    """The migration of an expert slot of this rank: rank `to` gets its tensors, and rank `source` sends new ones."""

    expert_slot: int
    to: int
    source: int


def rank_migrations(before: PlacementMap, after: PlacementMap, rank: int) -> list[Migration]:
    """Return the migrations of a rank's expert slots between two placement maps; experts keep their slot numbers."""
    assert (before.primary_slots == after.primary_slots).all()
    here, coming = before.experts_of(rank), after.experts_of(rank)
    return [
        Migration(expert_slot, int(after.primary_ranks[old]), int(before.primary_ranks[new]))
        for expert_slot, (old, new) in enumerate(zip(here, coming, strict=True))
        if old != new
    ]


def exchange_tensors(
    group: dist.ProcessGroup, device: torch.device, migrated: Sequence[tuple[torch.Tensor, Migration]]
) -> None:
    """Exchange tensors with the ranks that their migrations name, in place. Collective over the group.

    Tensors must be contiguous, on any device, and in the same order on all ranks. Messages are sent from `device`.
    """
    operations: list[dist.P2POp] = []
    arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor, move in migrated:
        leaving = tensor.to(device)
        arrivals.append((tensor, torch.empty_like(leaving)))
        operations.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=move.to))
        operations.append(dist.P2POp(dist.irecv, arrivals[-1][1], group=group, group_peer=move.source))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for tensor, arrived in arrivals:
        tensor.copy_(arrived)
