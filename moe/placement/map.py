"""Where each expert's weights are: the only place that goes from logical experts to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the planner, which has no tensors, is imported without torch
    import torch


@dataclass(frozen=True)
class PlacementMap:
    """Logical expert -> (rank of the expert parallel group, slot on that rank): in order, as many on each rank."""

    num_experts: int
    num_ranks: int = 1

    @property
    def num_slots(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    def locate(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ranks, slots) of logical experts, int64 of any shape."""
        ranks = experts // self.num_slots
        return ranks, experts.sub(ranks, alpha=self.num_slots)

    def experts_of(self, rank: int) -> range:
        """The logical experts of a rank, in the order of its slots."""
        return range(rank * self.num_slots, (rank + 1) * self.num_slots)
