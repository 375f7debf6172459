"""The placement of one layer's experts at run time: counts of all ranks, a plan, replicas, and destinations."""

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
from moe.placement.quotas import Costs, QuotaPlanner, ReplicaLimits, at_primaries, held, interleave, outcome, shares
from moe.placement.replicas import CallReplicas, ExpertBlocks, HeldReplica, ReplicaBuffers
from moe.placement.whole_blocks import BlockLayout, assign, in_blocks, num_blocks, within_limit
from moe.placement_map import Integers, PlacementMap
from moe.planning.load import Ran
from moe.route import Choice, Destinations
from moe.schedule.pass_sizes import PassSizes

# Statistics of a layer on one rank, as sums over calls: number of calls; the busiest rank's assignments divided by the
# mean (if primaries compute all, and with the plan); the planner's time for both; calls above the limit; assignments of
# the busiest rank; assignments of the busiest expert; replicas whose weights this rank fetched; replica gradients that
# it returned; bytes that it sent for replicas; bytes that the planner charged for its replicas.
TALLY = (
    *("calls", "at_home", "placed", "time_at_home", "time_placed", "over", "busiest", "busiest_expert"),
    *("copies", "returned", "sent_bytes", "charged_bytes"),
)
OVER, BUSIEST, REPLICAS, RETURNED, SENT, CHARGED = map(
    TALLY.index, ("over", "busiest", "copies", "returned", "sent_bytes", "charged_bytes")
)


def ran(counted: Sequence[float], num_ranks: int) -> Ran | None:
    """Return a layer's mean load per call, or None if it had no calls.

    `counted`: the layer's statistics (`LayerPlacement.counted`), summed over ranks.
    """
    tally, ranks = dict(zip(TALLY, counted, strict=False)), np.reshape(counted[len(TALLY) :], (-1, num_ranks))
    if not (calls := tally["calls"]):
        return None
    most_R = ranks[2:4].max(0) * num_ranks / calls  # `calls` is a sum over ranks
    away_R = most_R - ranks[4] * num_ranks / calls
    names = "busiest", "busiest_expert", "copies", "returned"
    busiest, of_expert, fetched, returned = (tally[name] / calls for name in names)
    return Ran(busiest, of_expert, float(most_R.max()), float(away_R.max()), fetched, returned)


@dataclass(frozen=True)
class CallPlan:
    """The placement plan of one call: the numbers of assignments (or blocks) per expert and computing rank."""

    counts_RDE: Integers  # assignments by source rank, chunk and expert; without blocks all chunks count as one
    quotas_ER: Integers  # assignments (or blocks) of each expert that each rank computes
    times: tuple[int, int]  # estimated time of the busiest rank in the unit of Costs: without replicas, with the plan
    charged_R: Integers  # [2, R]: replica weights, and gradients, that the planner expects to send, by replica's rank
    blocks: BlockLayout | None = None

    def loads_R(self) -> Integers:
        """Return the number of assignments that each rank computes: [R]."""
        return self.quotas_ER.sum(0) if self.blocks is None else self.blocks.loads_R(self.quotas_ER.shape[1])


class LayerPlacement:
    """The placement of one layer's experts: plans each call's assignments, and tracks the replicas of all ranks.

    All ranks of the group make the same calls in the same order, so each rank knows all replicas.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        planner: QuotaPlanner,
        costs: Costs,
        limits: ReplicaLimits,
        block_rows: int | None = None,
        max_load: float | None = None,
    ) -> None:
        """`block_rows`: assignments per block if whole blocks are planned (see `Slab.block_rows`), else None.

        `max_load`: limit on a rank's assignments, divided by the mean over ranks. If no plan keeps the limit, the plan
        that exceeds it least is used, and the call is counted.
        """
        self.group, self.rank, self.planner, self.costs, self.limits = group, group.rank(), planner, costs, limits
        self.block_rows, self.max_load = block_rows, max_load
        self.active = True  # False: primaries compute all; changes between steps, on all ranks at once
        self.map = PlacementMap(num_experts, group.size())
        self.replica_buffers: ReplicaBuffers | None = None
        # expert in each replica slot, by rank
        self._held: list[list[int | None]] = [[None] * limits.replica_slots for _ in range(group.size())]
        self._pinned: Counter[tuple[int, int]] = Counter()  # calls whose backward pass needs (expert, rank)
        self._planned: deque[CallPlan] = deque()  # plans of forward passes that will be recomputed
        self._owing: set[HeldReplica] = set()  # replicas with gradients of this step that are not yet returned
        self._backwards, self._num_backwards = 0, 1  # finished and expected backward passes
        # Statistics since `begin_passes`. `tally`: see TALLY. `ranks`: sums over calls of each rank's assignments
        # divided by the mean, without replicas and with the plan; for this rank also token rows sent, received, kept.
        self.tally = np.zeros(len(TALLY))
        self.ranks = np.zeros((5, group.size()))
        self._is_counted = True  # whether the current call is not a recomputation
        self.worst = 0.0  # greatest load of a rank divided by the mean, among calls above the limit

    @property
    def counted(self) -> Integers:
        """All statistics since `begin_passes` as one flat array, the input of the function `ran`."""
        return np.concatenate([self.tally, self.ranks.reshape(-1)])

    def held(self, rank: int) -> list[int | None]:
        """Return the expert in each replica slot of a rank; None for an empty slot."""
        return list(self._held[rank])

    def begin_passes(self, num_backwards: int = 1) -> None:
        """Drop all replicas, because the weights have changed, and reset the statistics.

        `num_backwards`: the number of backward passes that follow, 0 for an evaluation.
        """
        self._held = [[None] * self.limits.replica_slots for _ in self._held]
        self._pinned.clear()
        self._planned.clear()
        self._owing.clear()
        self._backwards, self._num_backwards = 0, num_backwards
        if self.replica_buffers is not None:
            self.replica_buffers.begin_passes()
        self.tally[:], self.ranks[:], self.worst = 0, 0, 0.0

    def plan_call(
        self,
        choice: Choice,
        routing_map_TE: torch.Tensor,
        primaries: Slab,
        keep: bool,
        again: bool = False,
        cut: Sequence[int] = (),
    ) -> tuple[Destinations, CallReplicas]:
        """Plan a call; return the destinations of its assignments, and its replicas. Collective over the group.

        `keep`: a backward pass follows and needs the replicas. `again`: the call is recomputed later with `keep`, so
        its plan and replicas stay. `cut`: the first token of each chunk, then the number of tokens.
        """
        counts_RDE = self._gather(routing_map_TE, [0, len(routing_map_TE)] if self.block_rows is None else cut)
        if keep and self._planned:
            plan, self._is_counted = self._planned.popleft(), False
            assert (plan.counts_RDE == counts_RDE).all(), "a recomputed call has other assignments"
        else:
            plan, self._is_counted = self._plan(counts_RDE), True
            if again:
                self._planned.append(plan)
            self._count(plan)
            self.tally[CHARGED] += np.dot(plan.charged_R[:, self.rank], (primaries.expert_bytes, primaries.grad_bytes))
        used_by_rank = self._used(plan.quotas_ER)
        pins = Counter((expert, rank) for rank, used in enumerate(used_by_rank) for expert in used)
        learns = keep and any(each.requires_grad for each in primaries.given)
        replicas = self._call_replicas(used_by_rank, primaries, plan, learns)
        if self._is_counted and (keep or again):
            self._pinned += pins
        if keep:
            replicas.on_backward = partial(self._backward, pins)
        return self._destinations(choice, plan, used_by_rank), replicas

    def ran(self, sizes: PassSizes) -> None:
        """Add the token rows that a planned call sends and receives to the statistics, unless it is a recomputation."""
        if self._is_counted:
            stayed = sum(sizes.sends.token_rows[self.rank])
            self.ranks[2:, self.rank] += sum(sizes.sends.total_rows()), sum(sizes.received_rows), stayed

    def _backward(self, pins: Counter[tuple[int, int]]) -> list[HeldReplica]:
        """Unpin a call's replicas in its backward pass, and return the replicas whose gradients are complete.

        Gradients are complete in the last backward pass of the step; in earlier ones the list is empty.
        """
        self._pinned.subtract(pins)
        self._backwards += 1
        if self._backwards < self._num_backwards:
            return []
        complete = sorted(self._owing)
        self._owing.clear()
        return self._returning(complete)

    def _returning(self, replicas: list[HeldReplica]) -> list[HeldReplica]:
        self.tally[RETURNED] += sum(replica.rank == self.rank for replica in replicas)
        return replicas

    def _plan(self, counts_RDE: Integers) -> CallPlan:
        fresh = [(expert, rank) for rank, held in enumerate(self._held) for expert in held if expert is not None]
        placement = PlacementMap(self.map.num_experts, self.map.num_ranks, self.map.primaries, tuple(fresh))
        counts_RE = counts_RDE.sum(1)
        pinned = frozenset(replica for replica, calls in self._pinned.items() if calls > 0)
        limits = replace(self.limits, most=self.most(int(counts_RE.sum())), pinned=pinned)
        trains = self._num_backwards > 0
        costs = self.costs.of_call(trains, self.block_rows)
        quotas_ER = self.planner(counts_RE, placement, costs, limits)
        for rank, used in enumerate(self._used(quotas_ER)):
            # If pinned replicas leave no slot for a new replica, the primary computes its assignments.
            on_rank = self._held[rank]
            new = sorted((e for e in used if e not in on_rank), key=lambda e: -quotas_ER[e, rank])
            taken = sum(e is not None and (e in used or self._pinned[e, rank] > 0) for e in on_rank)
            for expert in new[len(on_rank) - taken :]:
                quotas_ER[expert, self.map.primary_ranks[expert]] += quotas_ER[expert, rank]
                quotas_ER[expert, rank] = 0
        before, after = (outcome(q, placement, costs, limits) for q in (at_primaries(counts_RE, placement), quotas_ER))
        times = before.seconds, after.seconds
        if self.block_rows is None:
            return CallPlan(counts_RDE, quotas_ER, times, np.stack([after.new_R, after.new_R * trains]))
        blocks_E = num_blocks(counts_RDE, self.block_rows).sum((0, 1))
        blocks = assign(counts_RDE, in_blocks(quotas_ER, blocks_E), self.block_rows, self.limits.ranks_per_node)
        if limits.most is not None:
            reachable = bool(quotas_ER.sum(0).max() <= limits.most)
            blocks = within_limit(blocks, placement, costs, limits, reachable)
        quotas_ER = blocks.quotas_ER(*quotas_ER.shape)
        new_R = ((quotas_ER > 0) & ~held(placement)).sum(0)
        grads_R = np.where(placement.is_primary_ER, 0, quotas_ER).sum(0) * trains
        return CallPlan(counts_RDE, quotas_ER, times, np.stack([new_R, grads_R]), blocks)

    def most(self, assignments: int) -> int | None:
        """Return the limit on a rank's assignments in a call with `assignments` in total; None without a limit."""
        return None if self.max_load is None else math.ceil(self.max_load * assignments / self.map.num_ranks - 1e-6)

    def _count(self, plan: CallPlan) -> None:
        mean = max(plan.counts_RDE.sum() / self.map.num_ranks, 1.0)
        primary_R = at_primaries(plan.counts_RDE.sum(1), self.map).sum(0)
        placed_R = plan.loads_R()
        self.ranks[:2] += np.stack([primary_R, placed_R]) / mean
        self.tally[:5] += 1, primary_R.max() / mean, placed_R.max() / mean, *plan.times
        of_expert = plan.quotas_ER.max() if plan.blocks is None else plan.counts_RDE.sum((0, 1)).max()
        self.tally[BUSIEST : BUSIEST + 2] += placed_R.max(), of_expert
        most = self.most(int(plan.counts_RDE.sum()))
        if most is not None and placed_R.max() > most:
            self.tally[OVER] += 1
            self.worst = max(self.worst, float(placed_R.max() / mean))

    def _gather(self, routing_map_TE: torch.Tensor, cut: Sequence[int]) -> Integers:
        """All-gather the assignments by source rank, chunk (bounds `cut`) and expert: int64 [R, D, E] on the host."""
        own_DE = torch.stack([routing_map_TE[first:end].sum(0, dtype=torch.int32) for first, end in pairwise(cut)])
        everywhere = own_DE.new_empty(self.map.num_ranks * len(own_DE), own_DE.size(1))
        dist.all_gather_into_tensor(everywhere, own_DE, group=self.group)
        return everywhere.cpu().numpy().astype(np.int64).reshape(self.map.num_ranks, *own_DE.shape)

    def _used(self, quotas_ER: Integers) -> list[list[int]]:
        """Return, for each rank, the experts of which it computes replicas, in ascending order."""
        primary_ranks, num_ranks = self.map.primary_ranks, self.map.num_ranks
        return [[int(e) for e in np.flatnonzero(quotas_ER[:, r]) if primary_ranks[e] != r] for r in range(num_ranks)]

    def _call_replicas(
        self, used_by_rank: list[list[int]], primaries: Slab, plan: CallPlan, learns: bool
    ) -> CallReplicas:
        """Assign replica slots to a call's new replicas, and return all of its replicas.

        `learns`: the backward pass will compute gradients of the replicas.
        """
        if self.replica_buffers is None:
            self.replica_buffers = ReplicaBuffers(self.group, self.limits.replica_slots, primaries)
        fetched, leaving = [], []
        for rank, used in enumerate(used_by_rank):
            held = self._held[rank]
            for expert in used:
                if expert in held:
                    continue
                is_free = [each is None or (each not in used and self._pinned[each, rank] <= 0) for each in held]
                assert any(is_free), f"rank {rank} has no slot left: {held}, used {used}"
                replica_slot = is_free.index(True)
                before, held[replica_slot] = held[replica_slot], expert
                if before is not None and (old := self._held_replica(before, rank, replica_slot)) in self._owing:
                    self._owing.remove(old)
                    leaving.append(old)
                fetched.append(self._held_replica(expert, rank, replica_slot))
        self.tally[REPLICAS] += sum(replica.rank == self.rank for replica in fetched)
        own = [self._held[self.rank].index(expert) for expert in used_by_rank[self.rank]]
        if learns and plan.blocks is None:
            for rank, used in enumerate(used_by_rank):
                self._owing |= {self._held_replica(expert, rank, self._held[rank].index(expert)) for expert in used}
        elif learns:
            self.tally[RETURNED] += sum(plan.quotas_ER[expert, self.rank] for expert in used_by_rank[self.rank])
        blocks = [] if plan.blocks is None else self._expert_blocks(plan.blocks, used_by_rank)
        replicas = CallReplicas(self.replica_buffers, own, fetched, self._returning(leaving), blocks)
        replicas.on_sent = self._sent
        return replicas

    def _sent(self, num_bytes: int) -> None:
        self.tally[SENT] += num_bytes

    def _held_replica(self, expert: int, rank: int, replica_slot: int) -> HeldReplica:
        return HeldReplica(int(self.map.primary_ranks[expert]), int(self.map.primary_slots[expert]), rank, replica_slot)

    def _expert_blocks(self, blocks: BlockLayout, used_by_rank: list[list[int]]) -> list[ExpertBlocks]:
        primary_ranks, held, result = self.map.primary_ranks, self._held[self.rank], []
        for expert in sorted({expert for used in used_by_rank for expert in used}):
            if primary_ranks[expert] == self.rank:
                number = int(self.map.primary_slots[expert])
            elif expert in used_by_rank[self.rank]:
                number = self.map.num_expert_slots + held.index(expert)
            else:
                continue
            result.append(ExpertBlocks(number, int(primary_ranks[expert]), blocks.ranks_in_order(expert)))
        return result

    def _destinations(self, choice: Choice, plan: CallPlan, used_by_rank: list[list[int]]) -> Destinations:
        num_primary_slots = self.map.num_expert_slots
        slots_ER = np.zeros_like(plan.quotas_ER)
        slots_ER[np.arange(self.map.num_experts), self.map.primary_ranks] = self.map.primary_slots
        for rank, used in enumerate(used_by_rank):
            slots_ER[used, rank] = [num_primary_slots + self._held[rank].index(expert) for expert in used]
        num_slots = num_primary_slots + self.limits.replica_slots
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
        slots_P = codes_P.sub(ranks_P, alpha=num_slots)
        return Destinations(ranks_P, slots_P, self.map.num_ranks, num_slots, num_primary_slots)
