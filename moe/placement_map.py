"""Where each expert's weights are: the only place that goes from logical experts to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the planner, which has no tensors, is imported without torch
    import torch

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PlacementMap:
    """Logical expert -> home (rank of the expert parallel group, slot on that rank), and the ranks that hold a copy.

    A home owns the parameter, its gradient and its state; a copy is a cache of the weights. Each rank is home to as
    many experts as every other.
    """

    num_experts: int
    num_ranks: int = 1
    # Of each expert its home, rank * slots + slot; None: in order, which is the static map.
    homes: tuple[int, ...] | None = None
    copies: tuple[tuple[int, int], ...] = ()  # (expert, rank) of copies with the weights of this step

    @property
    def num_slots(self) -> int:
        """Experts that a rank is home to."""
        return self.num_experts // self.num_ranks

    @cached_property
    def home_ranks(self) -> Integers:
        """[E]: the rank that each expert is at home on."""
        return self._places // self.num_slots

    @cached_property
    def home_slots(self) -> Integers:
        """[E]: the slot that it has there."""
        return self._places % self.num_slots

    @property
    def _places(self) -> Integers:
        return np.arange(self.num_experts) if self.homes is None else np.asarray(self.homes)

    def locate(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ranks, slots) of logical experts' homes, int64 of any shape."""
        if self.homes is not None:
            experts = experts.new_tensor(self.homes).index_select(0, experts.reshape(-1)).view_as(experts)
        ranks = experts // self.num_slots
        return ranks, experts.sub(ranks, alpha=self.num_slots)

    def moved_to(self, home_ranks: Sequence[int]) -> PlacementMap:
        """The map with these homes; every expert keeps its slot. Raises ValueError where that is none."""
        homes = np.asarray(home_ranks, dtype=np.int64) * self.num_slots + self.home_slots
        if sorted(homes.tolist()) != list(range(self.num_experts)):
            raise ValueError(f"no {self.num_experts} experts in {self.num_slots} slots of a rank: {list(home_ranks)}")
        in_order = (homes == np.arange(self.num_experts)).all()
        return PlacementMap(self.num_experts, self.num_ranks, None if in_order else tuple(homes.tolist()))

    def experts_of(self, rank: int) -> list[int]:
        """The logical experts that are at home on a rank, by slot."""
        by_place = np.argsort(self._places)
        return [int(expert) for expert in by_place[rank * self.num_slots : (rank + 1) * self.num_slots]]
