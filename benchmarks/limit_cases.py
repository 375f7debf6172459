"""Calls with a limit of a rank's assignments, for `benchmarks.planner_oracle --limit`, and the grading of their plans.

2 to 64 ranks, cheap and expensive replicas, inside nodes and between, some existing, some of them pinned; limits from
the mean to 1.5 times the mean. A quarter of the calls is computed in whole blocks. Plans that keep the limit are
checked and counted. If our planner finds none, a bound may show that no plan keeps it: even with the largest experts in
all slots, each on all ranks, the headroom is less than the excess. Else an exact search decides for small calls: over
all sets of replicas, or of blocks over all their ranks. The rest is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moe.placement.planners.published import may_hold
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, ReplicaLimits, check, held
from moe.placement.whole_blocks import assign, in_blocks, num_blocks, within_limit
from moe.placement_map import Integers, PlacementMap

VERDICTS = ("kept", "impossible", "missed", "undecided")
RANKS = (2, 3, 4, 6, 8, 12, 16, 32, 64)
LIMITS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5)
NODES = 200_000  # of the search over blocks
SETS = 2_000_000  # of copies that are tried
Exact = Callable[[Integers, PlacementMap, Costs, ReplicaLimits], int | None]


@dataclass(frozen=True)
class Call:
    """What is asked."""

    counts_RDE: Integers
    placement: PlacementMap
    costs: Costs
    limits: ReplicaLimits
    block_rows: int | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes that it belongs to."""
        ranks, node = self.placement.num_ranks, self.limits.ranks_per_node
        names = ["2 to 4 ranks" if ranks <= 4 else "6 to 16 ranks" if ranks <= 16 else "32 and 64 ranks"]
        names += ["whole blocks"] * (self.block_rows is not None) + ["fresh copies"] * bool(self.placement.replicas)
        if node < ranks:
            names.append("nodes, no copies between" if self.costs.replica_between is None else "nodes, copies between")
        return (*names, f"{self.limits.replica_slots} slot{'s' * (self.limits.replica_slots > 1)}")

    def is_plain_over(self) -> bool:
        """Whether the planner goes over the limit where it is not asked to keep it."""
        limits = replace(self.limits, most=None)
        loads_R = solve(self.counts_RDE.sum(1), self.placement, self.costs, limits).sum(0)
        return bool(loads_R.max() > (self.limits.most or 0))


def case(seed: int, number: int) -> Call:
    """Of these two numbers alone."""
    rng = np.random.default_rng([seed, number])
    in_blocks = number % 4 == 0
    ranks = int(rng.choice(RANKS[:3] if in_blocks else RANKS))
    experts = ranks * int(rng.integers(1, 4 if in_blocks or ranks > 16 else 7))
    spread = rng.uniform(0.3, 2.0)
    popularity = np.exp(spread * rng.standard_normal(experts))
    block_rows, chunks = int(rng.choice([1, 4, 16, 64])), int(rng.integers(1, 3)) if in_blocks else 1
    few = int(block_rows * rng.uniform(0.5, 3) * experts / ranks / chunks) + 1
    tokens = few if in_blocks else int(10 ** rng.uniform(1.5, 4))
    counts_RDE = rng.multinomial(tokens, popularity / popularity.sum(), (ranks, chunks)).astype(np.int64)
    node = int(rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0]))
    mean = counts_RDE.sum() / ranks
    near = int(rng.integers(0, 9)) if rng.random() < 0.5 else int(mean * rng.uniform(0.05, 3))
    costs = Costs(int(rng.integers(0, 9)), near, None if rng.random() < 0.4 else near * int(rng.integers(1, 9)))
    replica_slots, max_load = int(rng.integers(1, 5)), float(rng.choice(LIMITS))
    placement = PlacementMap(experts, ranks, tuple(rng.permutation(experts).tolist()))
    fresh: list[tuple[int, int]] = []
    if rng.random() < 0.3:
        may_ER = may_hold(placement, costs, ReplicaLimits(replica_slots, node))
        for rank in range(ranks):
            allowed = rng.permutation(np.flatnonzero(may_ER[:, rank]))
            fresh += [(int(expert), rank) for expert in allowed[: int(rng.integers(0, replica_slots + 1))]]
    pinned = frozenset(replica for replica in fresh if rng.random() < 0.3)
    limits = ReplicaLimits(replica_slots, node, math.ceil(max_load * mean - 1e-6), pinned)
    placement = PlacementMap(experts, ranks, placement.primaries, tuple(sorted(fresh)))
    return Call(counts_RDE, placement, costs, limits, block_rows if in_blocks else None)


def grade(call: Call, exact: Exact) -> str:
    """One of `VERDICTS`."""
    counts_RE, placement, limits = call.counts_RDE.sum(1), call.placement, call.limits
    asked = counts_RE, placement, call.costs, limits
    quotas_ER = solve(*asked)
    check(quotas_ER, counts_RE, placement, limits, with_pinned=True)
    assert limits.most is not None
    if call.block_rows is None:
        if quotas_ER.sum(0).max() <= limits.most:
            return "kept"
        if cannot_exist(*asked):
            return "impossible"
        if placement.num_ranks > 4 or placement.num_experts ** (placement.num_ranks * limits.replica_slots) > SETS:
            return "undecided"
        return "impossible" if exact(*asked) is None else "missed"
    blocks_E = num_blocks(call.counts_RDE, call.block_rows).sum((0, 1))
    blocks = assign(call.counts_RDE, in_blocks(quotas_ER, blocks_E), call.block_rows, limits.ranks_per_node)
    blocks = within_limit(blocks, placement, call.costs, limits, bool(quotas_ER.sum(0).max() <= limits.most))
    sums_ER = np.zeros_like(quotas_ER)
    np.add.at(sums_ER, (blocks.experts, blocks.ranks), blocks.sizes)
    check(sums_ER, counts_RE, placement, limits, with_pinned=True)
    if blocks.loads_R(placement.num_ranks).max() <= limits.most:
        return "kept"
    if cannot_exist(*asked):
        return "impossible"
    found = blocks_fit(blocks.sizes, blocks.experts, placement, call.costs, limits)
    return "undecided" if found is None else "missed" if found else "impossible"


def cannot_exist(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> bool:
    """Whether a bound shows that no plan keeps the limit."""
    assert limits.most is not None
    totals_E, ranks, node = counts_RE.sum(0), placement.num_ranks, limits.ranks_per_node
    may_ER = may_hold(placement, costs, limits) | held(placement)
    may_ER[np.arange(placement.num_experts), placement.primary_ranks] = False
    headroom_R = limits.most - np.bincount(placement.primary_ranks, totals_E, ranks).astype(np.int64)
    totals_ER, taken_R, pinned_R = np.where(may_ER, totals_E[:, None], 0), *np.zeros((2, ranks), np.int64)
    for expert, rank in limits.pinned:
        taken_R[rank] += totals_ER[expert, rank]
        pinned_R[rank] += 1
        totals_ER[expert, rank] = 0
    in_order_ER = np.sort(totals_ER, axis=0)[::-1]
    free_ER = np.arange(placement.num_experts)[:, None] < limits.replica_slots - pinned_R
    most_R = taken_R + np.where(free_ER, in_order_ER, 0).sum(0)
    takes_R = np.where(headroom_R > 0, np.minimum(headroom_R, most_R), headroom_R)
    between = (placement.primary_ranks // node)[:, None] != np.arange(ranks) // node
    size = ranks if (may_ER & between).any() else node
    return bool((takes_R.reshape(-1, size).sum(1) < 0).any())


def blocks_fit(
    sizes_B: Integers, experts_B: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits
) -> bool | None:
    """Whether blocks have ranks that keep the limit, by trying all of them, the largest first; None: too many."""
    order = sorted(range(len(sizes_B)), key=lambda block: (-sizes_B[block], experts_B[block]))
    blocks = [(int(experts_B[block]), int(sizes_B[block])) for block in order]
    may_ER = may_hold(placement, costs, limits) | held(placement)
    assert limits.most is not None
    headroom, held_by = [limits.most] * placement.num_ranks, [dict[int, int]() for _ in range(placement.num_ranks)]
    for expert, rank in limits.pinned:
        held_by[rank][expert] = 1
    primaries, left = placement.primary_ranks.tolist(), NODES

    def fits_from(index: int, first: int) -> bool | None:
        nonlocal left
        left -= 1
        if left < 0:
            return None
        if index == len(blocks):
            return True
        expert, size = blocks[index]
        for rank in range(first, len(headroom)):
            replicas = held_by[rank]
            is_replica = rank != primaries[expert]
            if headroom[rank] < size or (
                is_replica and not replicas.get(expert) and len(replicas) >= limits.replica_slots
            ):
                continue
            if is_replica and not replicas.get(expert) and not may_ER[expert, rank]:
                continue
            headroom[rank] -= size
            if is_replica:
                replicas[expert] = replicas.get(expert, 0) + 1
            is_equal = index + 1 < len(blocks) and blocks[index + 1] == blocks[index]
            if (found := fits_from(index + 1, rank if is_equal else 0)) is not False:
                return found
            headroom[rank] += size
            if is_replica:
                replicas[expert] -= 1
                if replicas[expert] == 0:
                    del replicas[expert]
        return False

    return fits_from(0, 0)
