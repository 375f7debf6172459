"""Placement of one layer's experts while it runs: counts of all ranks, a plan of them, copies, and where assignments
go."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from memory.transfer import to_device
from moe import route
from moe.experts.weights import Weights
from moe.placement.block_limit import within
from moe.placement.copies import CallCopies, CopySlots, ExpertBlocks
from moe.placement.map import Integers, PlacementMap
from moe.placement.quotas import Costs, Limits, Planner, at_home, interleave, outcome, shares
from moe.placement.whole_blocks import Blocks, assign, in_blocks, num_blocks
from moe.route import Choice, Places

# What a layer counts on each rank: calls, the busiest rank's assignments by the mean's where all are computed at home
# and where the plan has them, the planner's time of the busiest rank for both, calls over the limit, and copies whose
# weights came here.
TALLY = ("calls", "at_home", "placed", "time_at_home", "time_placed", "over", "copies")
OVER = TALLY.index("over")


@dataclass(frozen=True)
class CallPlan:
    """How many assignments of each expert each rank has, and how many each rank computes; or blocks of them."""

    counts_RDE: Integers  # in each chunk, where there are blocks; else of all chunks together
    quotas_ER: Integers
    times: tuple[int, int]  # of the busiest rank as the planner reckons, all at home and planned
    blocks: Blocks | None = None


class LayerPlacement:
    """Of one layer on this rank. All ranks of the group make the same calls in the same order, and so know of all
    copies where they are."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        planner: Planner,
        costs: Costs,
        limits: Limits,
        block_rows: int | None = None,
        max_load: float | None = None,
    ) -> None:
        """block_rows: plans are in whole blocks of so many assignments of a source rank, see `Weights.block_rows`.
        max_load: the most assignments that a rank shall compute, by the mean rank's; calls without such a plan run
        with the one that is least over it, and are counted."""
        self.group, self.rank, self.planner, self.costs, self.limits = group, group.rank(), planner, costs, limits
        self.block_rows, self.max_load = block_rows, max_load
        self.active = True  # else all are computed at home; changed between steps, on all ranks alike
        self.map = PlacementMap(num_experts, group.size())
        self.slots: CopySlots | None = None
        self._held: list[list[int | None]] = [[None] * limits.slots for _ in range(group.size())]  # experts by slot
        self._pinned: Counter[tuple[int, int]] = Counter()  # (expert, rank) that backward passes will need
        self._planned: deque[CallPlan] = deque()  # of forward passes that will be computed again
        # Of these passes: see `TALLY`; and each rank's assignments by the mean's, at home and placed, over all calls.
        self.tally = np.zeros(len(TALLY))
        self.ranks = np.zeros((2, group.size()))
        self.worst = 0.0  # the busiest rank's of the calls over the limit, by the mean's

    def held(self, rank: int) -> list[int | None]:
        """The experts that a rank has copies of, by slot."""
        return list(self._held[rank])

    def begin_step(self) -> None:
        """Weights have changed: copies are stale. No call's backward pass is to come any more."""
        self._held = [[None] * self.limits.slots for _ in self._held]
        self._pinned.clear()
        self._planned.clear()
        self.tally[:], self.ranks[:], self.worst = 0, 0, 0.0

    def place(
        self,
        choice: Choice,
        routing_map_TE: torch.Tensor,
        weights: Weights,
        keep: bool,
        again: bool = False,
        cut: Sequence[int] = (),
    ) -> tuple[Places, CallCopies]:
        """Where the assignments of a call go, and the copies that take part. `keep`: a backward pass will need them.
        `again`: without `keep`, this call will come again with it; the plan is kept for it. `cut`: the first tokens of
        its chunks, and the number of tokens. Collective."""
        counts_RDE = self._gather(routing_map_TE, [0, len(routing_map_TE)] if self.block_rows is None else cut)
        if keep and self._planned:
            plan = self._planned.popleft()
            assert (plan.counts_RDE == counts_RDE).all(), "a call that is computed again has other assignments"
        else:
            plan = self._plan(counts_RDE)
            if again:
                self._planned.append(plan)
            self._count(plan)
        used_by_rank = self._used(plan.quotas_ER)
        copies = self._copies(used_by_rank, weights, keep, plan)
        return self._places(choice, plan, used_by_rank), copies

    def _plan(self, counts_RDE: Integers) -> CallPlan:
        fresh = [(expert, rank) for rank, held in enumerate(self._held) for expert in held if expert is not None]
        placement = PlacementMap(self.map.num_experts, self.map.num_ranks, self.map.homes, tuple(fresh))
        counts_RE = counts_RDE.sum(1)
        pinned = frozenset(copy for copy, calls in self._pinned.items() if calls > 0)
        limits = replace(self.limits, most=self.most(int(counts_RE.sum())), pinned=pinned)
        quotas_ER = self.planner(counts_RE, placement, self.costs, limits)
        self._leave_pinned(quotas_ER)
        before, after = (
            outcome(each, placement, self.costs, limits).seconds for each in (at_home(counts_RE, placement), quotas_ER)
        )
        if self.block_rows is None:
            return CallPlan(counts_RDE, quotas_ER, (before, after))
        blocks_E = num_blocks(counts_RDE, self.block_rows).sum((0, 1))
        blocks = assign(counts_RDE, in_blocks(quotas_ER, blocks_E), self.block_rows, self.limits.ranks_per_node)
        if limits.most is not None:
            reachable = bool(quotas_ER.sum(0).max() <= limits.most)
            blocks = within(blocks, placement, self.costs, limits, reachable)
        return CallPlan(counts_RDE, blocks.quotas_ER(*quotas_ER.shape), (before, after), blocks)

    def most(self, assignments: int) -> int | None:
        """What a rank may compute of a call's assignments on all ranks."""
        return None if self.max_load is None else math.ceil(self.max_load * assignments / self.map.num_ranks - 1e-6)

    def _count(self, plan: CallPlan) -> None:
        mean = max(plan.counts_RDE.sum() / self.map.num_ranks, 1.0)
        home_R = at_home(plan.counts_RDE.sum(1), self.map).sum(0)
        placed_R = plan.quotas_ER.sum(0) if plan.blocks is None else plan.blocks.loads_R(self.map.num_ranks)
        self.ranks += np.stack([home_R, placed_R]) / mean
        self.tally[:5] += 1, home_R.max() / mean, placed_R.max() / mean, *plan.times
        most = self.most(int(plan.counts_RDE.sum()))
        if most is not None and placed_R.max() > most:
            self.tally[OVER] += 1
            self.worst = max(self.worst, float(placed_R.max() / mean))

    def _gather(self, routing_map_TE: torch.Tensor, cut: Sequence[int]) -> Integers:
        """counts_RDE of all ranks, by chunks with these bounds: the host waits."""
        own_DE = torch.stack([routing_map_TE[first:end].sum(0, dtype=torch.int32) for first, end in pairwise(cut)])
        everywhere = own_DE.new_empty(self.map.num_ranks * len(own_DE), own_DE.size(1))
        dist.all_gather_into_tensor(everywhere, own_DE, group=self.group)
        return everywhere.cpu().numpy().astype(np.int64).reshape(self.map.num_ranks, *own_DE.shape)

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

    def _copies(self, used_by_rank: list[list[int]], weights: Weights, keep: bool, plan: CallPlan) -> CallCopies:
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
        self.tally[-1] += len(receives)
        arriving = self.slots.fetch(weights, sends, receives)
        own = used_by_rank[self.rank]
        here = [self._held[self.rank].index(expert) for expert in own]
        away = [
            (places[expert], rank)
            for rank, used in enumerate(used_by_rank)
            for expert in used
            if homes[expert] == self.rank
        ]
        blocks = [] if plan.blocks is None else self._expert_blocks(plan.blocks, used_by_rank)
        copies = CallCopies(self.slots, here, [int(homes[expert]) for expert in own], away, arriving, blocks)
        if keep:
            pins = Counter((expert, rank) for rank, used in enumerate(used_by_rank) for expert in used)
            self._pinned += pins
            copies.on_return = lambda: self._pinned.subtract(pins)
        return copies

    def _expert_blocks(self, blocks: Blocks, used_by_rank: list[list[int]]) -> list[ExpertBlocks]:
        own, homes, result = used_by_rank[self.rank], self.map.home_ranks, []
        for expert in sorted({expert for used in used_by_rank for expert in used}):
            if homes[expert] == self.rank:
                place = int(self.map.home_slots[expert])
            elif expert in own:
                place = self.map.num_slots + own.index(expert)
            else:
                continue
            result.append(ExpertBlocks(place, int(homes[expert]), blocks.turns(expert)))
        return result

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
        if plan.blocks is None:
            shares_ER = shares(plan.counts_RDE.sum(1), plan.quotas_ER, self.limits.ranks_per_node, self.rank)
            experts, ranks = np.nonzero(shares_ER)
            codes = np.repeat(ranks * num_slots + slots_ER[experts, ranks], shares_ER[experts, ranks])
            interleave(codes, shares_ER)
        else:
            experts, ranks, sizes = plan.blocks.of_source(self.rank)
            codes = np.repeat(ranks * num_slots + slots_ER[experts, ranks], sizes)
        order = route.stable_argsort(choice.experts, self.map.num_experts)
        codes_P = torch.empty_like(choice.experts)
        codes_P[order] = to_device(torch.from_numpy(codes), codes_P.device)
        ranks_P = codes_P // num_slots
        return Places(ranks_P, codes_P.sub(ranks_P, alpha=num_slots), self.map.num_ranks, num_slots)
