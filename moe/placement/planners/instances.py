"""A plan as it grows: what the published planners of expert placement have in common.

None of them knows a bound on what a rank may compute (`limits.most`), and they do not look at it."""

from __future__ import annotations

import numpy as np

from moe.placement.quotas import CopyLimits, Costs, at_home
from moe.placement_map import Integers, PlacementMap

# A copy takes a 64th of a rank's mean at least: the 1,024 tokens of UltraEP and of LLEP at 8,192 tokens a rank, top 8.
SMALLEST_PIECE = 64


class Instances:
    """Quotas that begin at home and move to copies, within the slots of each rank."""

    def __init__(
        self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits, slots: int | None = None
    ) -> None:
        self.quotas_ER = at_home(counts_RE, placement)
        self.homes_E = placement.home_ranks
        self.free_R = np.full(placement.num_ranks, limits.slots if slots is None else slots)
        self._may_ER = may_hold(placement, costs, limits)

    def open_R(self, expert: int) -> np.ndarray:
        """bool [R]: ranks with a free slot that may get a copy of the expert and have none."""
        return (self.free_R > 0) & self._may_ER[expert] & (self.quotas_ER[expert] == 0)

    def at_home(self, expert: int) -> int:
        """Assignments of the expert that are still computed at its home."""
        return int(self.quotas_ER[expert, self.homes_E[expert]])

    def give(self, expert: int, rank: int, number: int) -> None:
        """That many assignments go from the home to a copy, which takes a slot with its first."""
        self.free_R[rank] -= self.quotas_ER[expert, rank] == 0
        self.quotas_ER[expert, self.homes_E[expert]] -= number
        self.quotas_ER[expert, rank] += number


def may_hold(placement: PlacementMap, costs: Costs, limits: CopyLimits) -> np.ndarray:
    """bool [E, R]: where copies are allowed, which is never at home."""
    ranks, homes = np.arange(placement.num_ranks), placement.home_ranks[:, None]
    allowed = homes != ranks
    if costs.copy_between is None:
        allowed &= homes // limits.ranks_per_node == ranks // limits.ranks_per_node
    return allowed


def split_evenly(totals_E: Integers, where_ER: np.ndarray) -> Integers:
    """quotas_ER: each expert's assignments in equal parts over the ranks that have it, lower ranks one more."""
    share, rest = np.divmod(totals_E, where_ER.sum(1))
    return np.where(where_ER, share[:, None] + (where_ER.cumsum(1) <= rest[:, None]), 0)


def by_size(sizes: Integers) -> list[int]:
    """Indices, the largest first; of equals the lower."""
    return [int(index) for index in np.argsort(-sizes, kind="stable")]
