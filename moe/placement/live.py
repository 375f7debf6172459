"""Placement of one layer's experts while it runs: counts of all ranks, a plan of them, copies, and where assignments
go."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from memory.transfer import to_device
from moe import route
from moe.experts.weights import Slab
from moe.placement.block_limit import within
from moe.placement.copies import CallCopies, CopySlots, ExpertBlocks, HeldCopy
from moe.placement.quotas import CopyLimits, Costs, QuotaPlanner, at_home, held, interleave, outcome, shares
from moe.placement.whole_blocks import BlockLayout, assign, in_blocks, num_blocks
from moe.placement_map import Integers, PlacementMap
from moe.planning.load import Ran
from moe.route import Choice, Places
from moe.schedule.pass_sizes import PassSizes

# What a layer counts on each rank: calls; the busiest rank's assignments by the mean's where all are computed at home
# and where the plan has them, and the planner's time for both; calls over the limit; assignments of the busiest rank
# and of the busiest expert; copies whose weights came here, and gradients of copies that left; bytes that this rank
# sent for copies, and those that the planner charged for the copies here.
TALLY = (
    *("calls", "at_home", "placed", "time_at_home", "time_placed", "over", "busiest", "busiest_expert"),
    *("copies", "returned", "sent_bytes", "charged_bytes"),
)
OVER, BUSIEST, COPIES, RETURNED, SENT, CHARGED = map(
    TALLY.index, ("over", "busiest", "copies", "returned", "sent_bytes", "charged_bytes")
)


def ran(counted: Sequence[float], num_ranks: int) -> Ran | None:
    """What calls were like, from what all ranks counted together; None where none was planned."""
    tally, ranks = dict(zip(TALLY, counted, strict=False)), np.reshape(counted[len(TALLY) :], (-1, num_ranks))
    if not (calls := tally["calls"]):
        return None
    most_R = ranks[2:4].max(0) * num_ranks / calls  # a rank's own calls are its part of them
    away_R = most_R - ranks[4] * num_ranks / calls
    of_call = {name: tally[name] / calls for name in ("busiest", "busiest_expert", "copies", "returned")}
    given = of_call["busiest"], of_call["busiest_expert"], float(most_R.max()), float(away_R.max())
    return Ran(*given, of_call["copies"], of_call["returned"])


@dataclass(frozen=True)
class CallPlan:
    """How many assignments of each expert each rank has, and how many each rank computes; or blocks of them."""

    counts_RDE: Integers  # in each chunk, where there are blocks; else of all chunks together
    quotas_ER: Integers
    times: tuple[int, int]  # of the busiest rank as the planner estimates, all at home and planned
    charged_R: Integers  # [2, R]: weights and gradients of copies that travel for it, by the rank of the copy
    blocks: BlockLayout | None = None

    def loads_R(self) -> Integers:
        """Assignments that each rank computes."""
        return self.quotas_ER.sum(0) if self.blocks is None else self.blocks.loads_R(self.quotas_ER.shape[1])


class LayerPlacement:
    """The placement of one layer on this rank. All ranks of the group make the same calls in the same order, and so
    know of all copies where they are."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        planner: QuotaPlanner,
        costs: Costs,
        limits: CopyLimits,
        block_rows: int | None = None,
        max_load: float | None = None,
    ) -> None:
        """block_rows: plans are in whole blocks of so many assignments of a source rank, see `Slab.block_rows`.
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
        self._owing: set[HeldCopy] = set()  # copies with gradients of this step, which have not gone home
        self._backwards = self._num_backwards = 0  # over, and in all, of these passes
        # Of these passes: see `TALLY`; each rank's assignments by the mean's, at home and placed, over all calls; and
        # rows that it sent and received, and those that stayed: of other ranks none.
        self.tally = np.zeros(len(TALLY))
        self.ranks = np.zeros((5, group.size()))
        self._is_counted = True  # whether the call that is under way comes for the first time
        self.worst = 0.0  # the busiest rank's of the calls over the limit, by the mean's
        self.begin_passes(1)

    @property
    def counted(self) -> Integers:
        """What these passes came to, in one row: see `ran`."""
        return np.concatenate([self.tally, self.ranks.reshape(-1)])

    def held(self, rank: int) -> list[int | None]:
        """The experts that a rank has copies of, by slot."""
        return list(self._held[rank])

    def begin_passes(self, num_backwards: int = 1) -> None:
        """Weights have changed: copies are stale. No call's backward pass is to come any more, and then so many; none:
        the layer is evaluated."""
        self._held = [[None] * self.limits.slots for _ in self._held]
        self._pinned.clear()
        self._planned.clear()
        self._owing.clear()
        self._backwards, self._num_backwards = 0, num_backwards
        if self.slots is not None:
            self.slots.begin_passes()
        self.tally[:], self.ranks[:], self.worst = 0, 0, 0.0

    def place(
        self,
        choice: Choice,
        routing_map_TE: torch.Tensor,
        home: Slab,
        keep: bool,
        again: bool = False,
        cut: Sequence[int] = (),
    ) -> tuple[Places, CallCopies]:
        """Where the assignments of a call go, and the copies that take part. `keep`: a backward pass will need them.
        `again`: without `keep`, this call will come again with it; the plan is kept for it, and so are the copies.
        `cut`: the first tokens of its chunks, and the number of tokens. Collective."""
        counts_RDE = self._gather(routing_map_TE, [0, len(routing_map_TE)] if self.block_rows is None else cut)
        if keep and self._planned:
            plan, is_first = self._planned.popleft(), False
            assert (plan.counts_RDE == counts_RDE).all(), "a call that is computed again has other assignments"
        else:
            plan, is_first = self._plan(counts_RDE), True
            if again:
                self._planned.append(plan)
            self._count(plan)
            self.tally[CHARGED] += np.dot(plan.charged_R[:, self.rank], (home.expert_bytes, home.grad_bytes))
        used_by_rank = self._used(plan.quotas_ER)
        pins = Counter((expert, rank) for rank, used in enumerate(used_by_rank) for expert in used)
        copies = self._copies(used_by_rank, home, plan, learns=keep and any(each.requires_grad for each in home.given))
        self._is_counted = is_first
        if is_first and (keep or again):
            self._pinned += pins
        if keep:
            copies.on_backward = partial(self._backward, pins)
        return self._places(choice, plan, used_by_rank), copies

    def ran(self, sizes: PassSizes) -> None:
        """Count the rows of a call that was planned here."""
        if self._is_counted:
            stayed = sum(sizes.sends.rows[self.rank])
            self.ranks[2:, self.rank] += sum(sizes.sends.total_rows()), sum(sizes.received_rows), stayed

    def _backward(self, pins: Counter[tuple[int, int]]) -> list[HeldCopy]:
        """A call's backward pass has used these; the copies whose gradients go home in it."""
        self._pinned.subtract(pins)
        self._backwards += 1
        if self._backwards < self._num_backwards:
            return []
        complete = sorted(self._owing)
        self._owing.clear()
        return self._returning(complete)

    def _returning(self, copies: list[HeldCopy]) -> list[HeldCopy]:
        self.tally[RETURNED] += sum(copy.rank == self.rank for copy in copies)
        return copies

    def _plan(self, counts_RDE: Integers) -> CallPlan:
        fresh = [(expert, rank) for rank, held in enumerate(self._held) for expert in held if expert is not None]
        placement = PlacementMap(self.map.num_experts, self.map.num_ranks, self.map.homes, tuple(fresh))
        counts_RE = counts_RDE.sum(1)
        pinned = frozenset(copy for copy, calls in self._pinned.items() if calls > 0)
        limits = replace(self.limits, most=self.most(int(counts_RE.sum())), pinned=pinned)
        trains = self._num_backwards > 0
        costs = self.costs.of_call(trains, self.block_rows)
        quotas_ER = self.planner(counts_RE, placement, costs, limits)
        self._leave_pinned(quotas_ER)
        before, after = (outcome(each, placement, costs, limits) for each in (at_home(counts_RE, placement), quotas_ER))
        times = before.seconds, after.seconds
        if self.block_rows is None:
            return CallPlan(counts_RDE, quotas_ER, times, np.stack([after.new_R, after.new_R * trains]))
        blocks_E = num_blocks(counts_RDE, self.block_rows).sum((0, 1))
        blocks = assign(counts_RDE, in_blocks(quotas_ER, blocks_E), self.block_rows, self.limits.ranks_per_node)
        if limits.most is not None:
            reachable = bool(quotas_ER.sum(0).max() <= limits.most)
            blocks = within(blocks, placement, costs, limits, reachable)
        quotas_ER = blocks.quotas_ER(*quotas_ER.shape)
        is_copy = np.arange(quotas_ER.shape[1]) != placement.home_ranks[:, None]
        new_R = ((quotas_ER > 0) & ~held(placement)).sum(0)
        grads_R = np.where(is_copy, quotas_ER, 0).sum(0) * trains
        return CallPlan(counts_RDE, quotas_ER, times, np.stack([new_R, grads_R]), blocks)

    def most(self, assignments: int) -> int | None:
        """What a rank may compute of a call's assignments on all ranks."""
        return None if self.max_load is None else math.ceil(self.max_load * assignments / self.map.num_ranks - 1e-6)

    def _count(self, plan: CallPlan) -> None:
        mean = max(plan.counts_RDE.sum() / self.map.num_ranks, 1.0)
        home_R = at_home(plan.counts_RDE.sum(1), self.map).sum(0)
        placed_R = plan.loads_R()
        self.ranks[:2] += np.stack([home_R, placed_R]) / mean
        self.tally[:5] += 1, home_R.max() / mean, placed_R.max() / mean, *plan.times
        of_expert = plan.quotas_ER.max() if plan.blocks is None else plan.counts_RDE.sum((0, 1)).max()
        self.tally[BUSIEST : BUSIEST + 2] += placed_R.max(), of_expert
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

    def _copies(self, used_by_rank: list[list[int]], home: Slab, plan: CallPlan, learns: bool) -> CallCopies:
        """The copies of a call; `learns`: they get gradients in its backward pass."""
        if self.slots is None:
            self.slots = CopySlots(self.group, self.limits.slots, home)
        fetched, leaving = [], []
        for rank, used in enumerate(used_by_rank):
            held = self._held[rank]
            for expert in used:
                if expert in held:
                    continue
                slot = self._free_slot(rank, used)
                before, held[slot] = held[slot], expert
                if before is not None and (old := self._copy(before, rank, slot)) in self._owing:
                    self._owing.remove(old)
                    leaving.append(old)
                fetched.append(self._copy(expert, rank, slot))
        self.tally[COPIES] += sum(copy.rank == self.rank for copy in fetched)
        own = [self._held[self.rank].index(expert) for expert in used_by_rank[self.rank]]
        if learns and plan.blocks is None:
            for rank, used in enumerate(used_by_rank):
                self._owing |= {self._copy(expert, rank, self._held[rank].index(expert)) for expert in used}
        elif learns and plan.blocks is not None:
            self.tally[RETURNED] += sum(plan.quotas_ER[expert, self.rank] for expert in used_by_rank[self.rank])
        blocks = [] if plan.blocks is None else self._expert_blocks(plan.blocks, used_by_rank)
        copies = CallCopies(self.slots, own, fetched, self._returning(leaving), blocks)
        copies.on_sent = self._sent
        return copies

    def _sent(self, num_bytes: int) -> None:
        self.tally[SENT] += num_bytes

    def _copy(self, expert: int, rank: int, slot: int) -> HeldCopy:
        return HeldCopy(int(self.map.home_ranks[expert]), int(self.map.home_slots[expert]), rank, slot)

    def _expert_blocks(self, blocks: BlockLayout, used_by_rank: list[list[int]]) -> list[ExpertBlocks]:
        homes, held, result = self.map.home_ranks, self._held[self.rank], []
        for expert in sorted({expert for used in used_by_rank for expert in used}):
            if homes[expert] == self.rank:
                number = int(self.map.home_slots[expert])
            elif expert in used_by_rank[self.rank]:
                number = self.map.num_slots + held.index(expert)
            else:
                continue
            result.append(ExpertBlocks(number, int(homes[expert]), blocks.turns(expert)))
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
            slots_ER[used, rank] = [num_home + self._held[rank].index(expert) for expert in used]
        num_slots = num_home + self.limits.slots
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
        return Places(ranks_P, codes_P.sub(ranks_P, alpha=num_slots), self.map.num_ranks, num_slots, num_home)
