"""Placement of one layer's experts while it runs: counts of all ranks, a plan of them, copies, and where assignments
go."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from memory.transfer import to_device
from moe import route
from moe.experts.weights import Weights
from moe.placement.copies import CallCopies, CopySlots
from moe.placement.map import Integers, PlacementMap
from moe.placement.quotas import Costs, Limits, Planner, at_home, shares
from moe.route import Choice, Places

# What a layer counts on each rank: calls, the busiest rank's assignments by the mean's where all are computed at home
# and where the plan has them, and copies whose weights came here.
TALLY = ("calls", "at_home", "placed", "copies")
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class CallPlan:
    """How many assignments of each expert each rank has, and how many each rank computes."""

    counts_RE: Integers
    quotas_ER: Integers


class LayerPlacement:
    """Of one layer on this rank. All ranks of the group make the same calls in the same order, and so know of all
    copies where they are."""

    def __init__(
        self, group: dist.ProcessGroup, num_experts: int, planner: Planner, costs: Costs, limits: Limits
    ) -> None:
        self.group, self.rank, self.planner, self.costs, self.limits = group, group.rank(), planner, costs, limits
        self.map = PlacementMap(num_experts, group.size())
        self.slots: CopySlots | None = None
        self._held: list[list[int | None]] = [[None] * limits.slots for _ in range(group.size())]  # experts by slot
        self._pinned: Counter[tuple[int, int]] = Counter()  # (expert, rank) that backward passes will need
        self._planned: deque[CallPlan] = deque()  # of forward passes that will be computed again
        self.tally = np.zeros(len(TALLY))  # of these passes: see `TALLY`

    def begin_step(self) -> None:
        """Weights have changed: copies are stale. No call's backward pass is to come any more."""
        self._held = [[None] * self.limits.slots for _ in self._held]
        self._pinned.clear()
        self._planned.clear()
        self.tally[:] = 0

    def place(
        self, choice: Choice, routing_map_TE: torch.Tensor, weights: Weights, keep: bool, again: bool = False
    ) -> tuple[Places, CallCopies]:
        """Where the assignments of a call go, and the copies that take part. `keep`: a backward pass will need them.
        `again`: without `keep`, this call will come again with it; the plan is kept for it. Collective."""
        counts_RE = self._gather(routing_map_TE)
        if keep and self._planned:
            plan = self._planned.popleft()
            assert (plan.counts_RE == counts_RE).all(), "a call that is computed again has other assignments"
        else:
            fresh = [(expert, rank) for rank, held in enumerate(self._held) for expert in held if expert is not None]
            placement = PlacementMap(self.map.num_experts, self.map.num_ranks, self.map.homes, tuple(fresh))
            quotas_ER = self.planner(counts_RE, placement, self.costs, self.limits)
            self._leave_pinned(quotas_ER)
            plan = CallPlan(counts_RE, quotas_ER)
            if again:
                self._planned.append(plan)
            self._count(plan)
        used_by_rank = self._used(plan.quotas_ER)
        copies = self._copies(used_by_rank, weights, keep)
        return self._places(choice, plan, used_by_rank), copies

    def _count(self, plan: CallPlan) -> None:
        mean = max(plan.counts_RE.sum() / self.map.num_ranks, 1.0)
        loads = (at_home(plan.counts_RE, self.map), plan.quotas_ER)
        self.tally[:3] += 1, *(quotas_ER.sum(0).max() / mean for quotas_ER in loads)

    def _gather(self, routing_map_TE: torch.Tensor) -> Integers:
        """counts_RE of all ranks: the host waits."""
        own_E = routing_map_TE.sum(0, dtype=torch.int32)
        everywhere = own_E.new_empty(self.map.num_ranks * len(own_E))
        dist.all_gather_into_tensor(everywhere, own_E, group=self.group)
        return everywhere.cpu().numpy().astype(np.int64).reshape(self.map.num_ranks, -1)

    def _used(self, quotas_ER: Integers) -> list[list[int]]:
        """By rank the experts that it computes as copies, ascending."""
        homes = self.map.home_ranks
        return [[int(e) for e in np.flatnonzero(quotas_ER[:, r]) if homes[e] != r] for r in range(self.map.num_ranks)]

    def _leave_pinned(self, quotas_ER: Integers) -> None:
        """Send home what would go to new copies for which no slot is left: some hold what backward passes will need."""
        for rank, used in enumerate(self._used(quotas_ER)):
            held = self._held[rank]
            new = sorted((e for e in used if e not in held), key=lambda e: -quotas_ER[e, rank])
            taken = sum(e is not None and (e in used or self._pinned[e, rank] > 0) for e in held)
            for expert in new[len(held) - taken :]:
                quotas_ER[expert, self.map.home_ranks[expert]] += quotas_ER[expert, rank]
                quotas_ER[expert, rank] = 0

    def _copies(self, used_by_rank: list[list[int]], weights: Weights, keep: bool) -> CallCopies:
        if self.slots is None:
            self.slots = CopySlots(self.group, self.limits.slots, weights)
        places, homes = self.map.home_slots.tolist(), self.map.home_ranks
        sends, receives = [], []
        for rank, used in enumerate(used_by_rank):
            held = self._held[rank]
            for expert in used:
                if expert in held:
                    continue
                slot = self._free_slot(rank, used)
                held[slot] = expert
                if homes[expert] == self.rank:
                    sends.append((places[expert], rank))
                if rank == self.rank:
                    receives.append((slot, int(homes[expert])))
        self.tally[3] += len(receives)
        arriving = self.slots.fetch(weights, sends, receives)
        own = used_by_rank[self.rank]
        here = [self._held[self.rank].index(expert) for expert in own]
        away = [
            (places[expert], rank)
            for rank, used in enumerate(used_by_rank)
            for expert in used
            if homes[expert] == self.rank
        ]
        copies = CallCopies(self.slots, here, [int(homes[expert]) for expert in own], away, arriving)
        if keep:
            pins = Counter((expert, rank) for rank, used in enumerate(used_by_rank) for expert in used)
            self._pinned += pins
            copies.on_return = lambda: self._pinned.subtract(pins)
        return copies

    def _free_slot(self, rank: int, used: list[int]) -> int:
        held = self._held[rank]
        for slot, expert in enumerate(held):
            if expert is None or (expert not in used and self._pinned[expert, rank] <= 0):
                return slot
        raise AssertionError(f"rank {rank} has no slot left: {held}, used {used}")

    def _places(self, choice: Choice, plan: CallPlan, used_by_rank: list[list[int]]) -> Places:
        num_home = self.map.num_slots
        slots_ER = np.zeros_like(plan.quotas_ER)
        slots_ER[np.arange(self.map.num_experts), self.map.home_ranks] = self.map.home_slots
        for rank, used in enumerate(used_by_rank):
            slots_ER[used, rank] = num_home + np.arange(len(used))
        num_slots = num_home + max(map(len, used_by_rank))
        shares_ER = shares(plan.counts_RE, plan.quotas_ER, self.limits.ranks_per_node, self.rank)
        experts, ranks = np.nonzero(shares_ER)
        of_places = ranks * num_slots + slots_ER[experts, ranks]
        codes = np.repeat(of_places, shares_ER[experts, ranks])
        _interleave(codes, shares_ER)
        order = route.stable_argsort(choice.experts, self.map.num_experts)
        codes_P = torch.empty_like(choice.experts)
        codes_P[order] = to_device(torch.from_numpy(codes), codes_P.device)
        ranks_P = codes_P // num_slots
        return Places(ranks_P, codes_P.sub(ranks_P, alpha=num_slots), self.map.num_ranks, num_slots)


def _interleave(codes: Integers, shares_ER: Integers) -> None:
    """Spread the places of an expert's assignments over its tokens, so that each chunk of consecutive tokens has its
    share of each: assignment i takes the place that stood at i times a stride of the golden section."""
    counts = shares_ER.sum(1)
    starts = counts.cumsum() - counts
    several = np.flatnonzero((shares_ER > 0).sum(1) > 1)
    counts, starts = counts[several], starts[several]
    strides = np.maximum(np.rint(GOLDEN * counts).astype(np.int64), 1)
    while (shared := np.gcd(strides, counts) > 1).any():
        strides[shared] += 1
    first = np.repeat(starts, counts)
    within = np.arange(len(first)) - np.repeat(counts.cumsum() - counts, counts)
    codes[first + within] = codes[first + within * np.repeat(strides, counts) % np.repeat(counts, counts)]
