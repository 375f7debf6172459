"""Homes that change places between two steps: what an expert's home owns goes to another rank.

Experts move between ranks and keep their slot, see homes.py: all that lies at a slot's place on one rank belongs there
on the other, so that a move is an exchange of equal tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe.placement_map import PlacementMap


@dataclass(frozen=True)
class SlotMove:
    """What lies in a slot of this rank goes to another rank, and what shall lie there comes from one."""

    slot: int
    to: int
    source: int


def slot_moves(before: PlacementMap, after: PlacementMap, rank: int) -> list[SlotMove]:
    """What a rank has to do; every expert keeps its slot."""
    assert (before.home_slots == after.home_slots).all()
    here, coming = before.experts_of(rank), after.experts_of(rank)
    return [
        SlotMove(slot, int(after.home_ranks[old]), int(before.home_ranks[new]))
        for slot, (old, new) in enumerate(zip(here, coming, strict=True))
        if old != new
    ]


Part = tuple[torch.Tensor, SlotMove]  # a contiguous tensor on any device that goes as a slot does


def trade(group: dist.ProcessGroup, device: torch.device, parts: Sequence[Part]) -> None:
    """Exchange tensors in place. All ranks that take part list theirs in the same order; `device`: where the group's
    tensors lie."""
    operations: list[dist.P2POp] = []
    arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor, move in parts:
        leaving = tensor.to(device)
        arrivals.append((tensor, torch.empty_like(leaving)))
        operations.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=move.to))
        operations.append(dist.P2POp(dist.irecv, arrivals[-1][1], group=group, group_peer=move.source))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for tensor, arrived in arrivals:
        tensor.copy_(arrived)
