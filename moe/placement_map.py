"""The map from logical experts to ranks: the only module that knows where the weights of each expert are."""

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
    """The map from each expert to its primary (rank of the expert parallel group, slot on it) and to its replicas.

    A primary owns the parameter, its gradient and its optimizer state; a replica is a cache of the weights. All ranks
    have the same number of primaries.
    """

    num_experts: int
    num_ranks: int = 1
    # The primary of each expert, rank * num_expert_slots + slot; None: experts are in order, as in the static map.
    primaries: tuple[int, ...] | None = None
    replicas: tuple[tuple[int, int], ...] = ()  # (expert, rank) of replicas with the weights of this step

    @property
    def num_expert_slots(self) -> int:
        """The number of primaries on a rank, the same for all ranks."""
        return self.num_experts // self.num_ranks

    @cached_property
    def primary_ranks(self) -> Integers:
        """The rank of each expert's primary: int64 [E]."""
        return self._indices // self.num_expert_slots

    @cached_property
    def primary_slots(self) -> Integers:
        """The slot of each expert's primary on its rank: int64 [E]."""
        return self._indices % self.num_expert_slots

    @cached_property
    def is_primary_ER(self) -> NDArray[np.bool_]:
        """Whether each rank has each expert's primary: bool [E, R]."""
        return np.arange(self.num_ranks) == self.primary_ranks[:, None]

    @property
    def _indices(self) -> Integers:
        return np.arange(self.num_experts) if self.primaries is None else np.asarray(self.primaries)

    def locate(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rank, slot) of each expert's primary. All three tensors are int64 with the same shape."""
        if self.primaries is not None:
            experts = experts.new_tensor(self.primaries).index_select(0, experts.reshape(-1)).view_as(experts)
        ranks = experts // self.num_expert_slots
        return ranks, experts.sub(ranks, alpha=self.num_expert_slots)

    def moved_to(self, primary_ranks: Sequence[int]) -> PlacementMap:
        """Return a map with each expert's primary on the given rank; every expert keeps its slot number.

        Raises ValueError if two experts would have the same slot of a rank.
        """
        primaries = np.asarray(primary_ranks, dtype=np.int64) * self.num_expert_slots + self.primary_slots
        if sorted(primaries.tolist()) != list(range(self.num_experts)):
            raise ValueError(
                f"primary_ranks ({list(primary_ranks)}) gives two experts the same slot of a rank. Give each of the "
                f"{self.num_ranks} ranks one expert for each of its {self.num_expert_slots} slots."
            )
        in_order = (primaries == np.arange(self.num_experts)).all()
        return PlacementMap(self.num_experts, self.num_ranks, None if in_order else tuple(primaries.tolist()))

    def experts_of(self, rank: int) -> list[int]:
        """Return the experts whose primaries are on a rank, in the order of their slots."""
        in_order = np.argsort(self._indices)
        return [int(expert) for expert in in_order[rank * self.num_expert_slots : (rank + 1) * self.num_expert_slots]]
