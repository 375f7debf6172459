"""Our planner of expert placement, and the published ones, against the best plan there is, on small cases.

`python -m benchmarks.checks.planner_oracle [--cases 200] [--seed 0] [--limit] [--markdown] [--json]`
`--limit`: whether ours keeps `moe.placement.max_load` wherever a plan does.

A case has 2 to 4 ranks, 4 to 8 experts, 1 or 2 slots a rank, and skewed counts with a few dozen assignments of an
expert. Some have an overhead per expert, costs of replicas, existing replicas, or nodes of two ranks. The score is
the time of the busiest rank (`moe.placement.quotas.outcome`): assignments, overheads, replicas sent and received.

`exact` finds the least such time. A plan is a set of (expert, rank) pairs that compute, and a split of the assignments
over them. It tries every set of copies that the slots allow, and for each expert with copies, its home with and
without a part. Pairs fix what pieces and copies cost each rank. A split with no rank above a time T is then a flow from
experts to ranks, and whole numbers do as well as fractions there. By Hall's theorem it exists exactly where, for each
subset of ranks, its costs and the experts that compute nowhere else fit into T times its size. So the least T is the
largest of these quotients, rounded up. A pair that gets nothing in the split costs too much, but the same split is also
tried without it. No split is searched, so the number of tokens does not matter.

With a limit of assignments, a rank's room is the lesser of the limit and what its costs leave of T. So each subset of
the ranks is split in all ways into those that the limit binds and those that T binds.

Sets are left out early where this bound is no better than the best plan so far, a home's piece being free as long as it
is not decided. With a free piece the bound is never too high, and when all are decided it is the time itself.

Cases of `--limit`: 2 to 64 ranks, cheap and expensive replicas, inside nodes and between nodes, some existing, some
pinned, and limits from the mean to 1.5 times the mean. A quarter of the calls is computed in whole blocks. Plans that
keep the limit are checked and counted. If our planner finds none, a bound may show that no plan keeps it: even with the
largest experts in all slots, each on all ranks, the headroom is less than the excess. Otherwise small calls are decided
by an exact search over all sets of replicas, or of blocks over all their ranks; larger calls are counted as undecided.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

import numpy as np

from base import command
from base.errors import ConfigError
from benchmarks.kit.tables import table
from benchmarks.planners import PLANNERS
from moe.placement.planners.published import may_hold
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, check, held, outcome
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
    """A call of a planner of expert placement: counts, costs and limits."""

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


def limited_call(seed: int, number: int) -> Call:
    """Return the case of this number, which depends on `seed` and `number` alone."""
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


COMPARED = ("static", "least_loaded", "quota", "flex", "solve")
SIZES = ((2, 4), (2, 6), (2, 8), (3, 6), (4, 4), (4, 8))  # ranks and experts
NEVER = 10**15
AN_EXPERT = (12, 48)  # assignments of an expert, on average


@dataclass(frozen=True)
class Case:
    """What a planner is asked."""

    counts_RE: Integers
    placement: PlacementMap
    costs: Costs
    limits: ReplicaLimits

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes that it belongs to."""
        names = ("pieces",) * (self.costs.expert_overhead > 0) + ("copies cost",) * (self.costs.replica_in_node > 0)
        names = names or ("nothing costs",)
        names += ("fresh copies",) * bool(self.placement.replicas)
        names += ("nodes",) * (self.limits.ranks_per_node < self.placement.num_ranks)
        return (*names, f"{self.limits.replica_slots} slot{'s' * (self.limits.replica_slots > 1)}")


def case(seed: int, number: int) -> Case:
    """Return the case of this number, which depends on `seed` and `number` alone."""
    rng = np.random.default_rng([seed, number])
    ranks, experts = SIZES[number % len(SIZES)]
    has_pieces, has_costs, has_fresh, has_nodes = rng.random(4) < 0.5
    popularity = np.exp(rng.uniform(0.5, 1.5) * rng.standard_normal(experts))
    total = experts * int(rng.integers(*AN_EXPERT))
    counts_RE = rng.multinomial(total // ranks, popularity / popularity.sum(), ranks).astype(np.int64)
    replica_slots, node = int(rng.integers(1, 3)), 2 if has_nodes and ranks == 4 else ranks
    near = int(rng.integers(1, 9)) if has_costs else 0
    far = None if node < ranks and rng.random() < 0.5 else near * int(rng.integers(1, 5))
    costs = Costs(int(rng.integers(1, 7)) if has_pieces else 0, near, far)
    placement, limits = (
        PlacementMap(experts, ranks, tuple(rng.permutation(experts).tolist())),
        ReplicaLimits(replica_slots, node),
    )
    fresh: list[tuple[int, int]] = []
    if has_fresh:
        may_ER = may_hold(placement, costs, limits)
        for rank in range(ranks):
            allowed = rng.permutation(np.flatnonzero(may_ER[:, rank]))
            fresh += [(int(expert), rank) for expert in allowed[: int(rng.integers(0, replica_slots + 1))]]
    return Case(counts_RE, PlacementMap(experts, ranks, placement.primaries, tuple(sorted(fresh))), costs, limits)


def exact(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> int | None:
    """The least time of the busiest rank, in the unit of Costs; None where no plan keeps `limits.most`."""
    worked_E = np.flatnonzero(counts_RE.sum(0))
    totals_E, primaries_E = counts_RE.sum(0)[worked_E], placement.primary_ranks[worked_E]
    inside_MA, sizes_A = _subsets(placement.num_ranks)
    numbers = np.arange(1, len(sizes_A) + 1)  # of subsets
    outer_P, inner_P = np.nonzero(numbers[:, None] & numbers == numbers)
    home, most = outcome(at_primaries(counts_RE, placement), placement, costs, limits), limits.most
    best = NEVER if most is not None and home.loads_R.max() > most else home.seconds

    def bound(where_NE: Integers, costs_NR: Integers) -> Integers:
        """[N]: the least time, were these costs all."""
        costs_NA = costs_NR @ inside_MA[1 << np.arange(placement.num_ranks)]
        work_NA = np.zeros_like(costs_NA)
        for total, mask_N in zip(totals_E, where_NE.T, strict=True):
            work_NA += total * inside_MA[mask_N]
        if most is None:
            return (-(-(work_NA + costs_NA) // sizes_A)).max(1)
        work_NP = work_NA[:, outer_P] - most * (sizes_A[outer_P] - sizes_A[inner_P])
        times_N = (-(-(work_NP + costs_NA[:, inner_P]) // sizes_A[inner_P])).max(1)
        return np.where((work_NA > most * sizes_A).any(1), NEVER, times_N)

    def better(where_NE: Integers, costs_NR: Integers) -> tuple[Integers, Integers]:
        keep = bound(where_NE, costs_NR) < best
        return where_NE[keep], costs_NR[keep]

    for where_NE, costs_NR in _sets_of_copies(worked_E, placement, costs, limits):
        for index, home in enumerate(primaries_E):  # with copies, a home's piece is decided below
            costs_NR[:, home] += costs.expert_overhead * (where_NE[:, index] == 0)
        where_NE, costs_NR = better(where_NE | 1 << primaries_E, costs_NR)
        for index, home in enumerate(primaries_E if costs.expert_overhead else ()):
            has_replicas = where_NE[:, index] != 1 << home
            where_without, costs_without = where_NE[has_replicas], costs_NR[has_replicas]
            where_without[:, index] ^= 1 << home
            costs_NR[has_replicas, home] += costs.expert_overhead
            both = np.concatenate([where_NE, where_without]), np.concatenate([costs_NR, costs_without])
            where_NE, costs_NR = better(*both)
        if len(where_NE):
            best = min(best, int(bound(where_NE, costs_NR).min()))
    return None if best == NEVER else best


def _subsets(ranks: int) -> tuple[Integers, Integers]:
    """[masks of ranks, subsets of ranks]: whether all ranks of a mask are in a subset; and the subsets' sizes."""
    masks, subsets = np.arange(1 << ranks), np.arange(1, 1 << ranks)
    inside = (masks[:, None] & ~subsets == 0).astype(np.int64)
    return inside, np.array([int(subset).bit_count() for subset in subsets])


def _sets_of_copies(
    experts: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits
) -> Iterator[tuple[Integers, Integers]]:
    """Every set of copies of the experts, many at a time: by expert the ranks as a mask [N, E], by rank what the
    copies and their pieces cost [N, R]."""
    ranks, primaries_E, held_ER = placement.num_ranks, placement.primary_ranks, held(placement)
    may_ER = may_hold(placement, costs, limits) | held_ER
    may_ER[np.arange(placement.num_experts), primaries_E] = False
    options = []
    for rank in range(ranks):
        allowed = [index for index, expert in enumerate(experts) if may_ER[expert, rank]]
        pinned = [index for index in allowed if (int(experts[index]), rank) in limits.pinned]
        taken = sum(replica_rank == rank for _, replica_rank in limits.pinned)
        others = [index for index in allowed if index not in pinned]
        chosen = [c for number in range(limits.replica_slots - taken + 1) for c in combinations(others, number)]
        chosen = [
            c + more for c in chosen for number in range(len(pinned) + 1) for more in combinations(pinned, number)
        ]
        where, prices = np.zeros((len(chosen), len(experts)), np.int64), np.zeros((len(chosen), ranks), np.int64)
        for number, replicas in enumerate(chosen):
            for index in replicas:
                home = primaries_E[experts[index]]
                where[number, index] = 1 << rank
                prices[number, rank] += costs.expert_overhead
                if not held_ER[experts[index], rank]:
                    near = home // limits.ranks_per_node == rank // limits.ranks_per_node
                    prices[number, [home, rank]] += costs.replica_in_node if near else costs.replica_between or 0
        options.append((where, prices))
    first, *rest = options
    where_NE, costs_NR = np.zeros((1, len(experts)), np.int64), np.zeros((1, ranks), np.int64)
    for where, prices in rest:
        where_NE = (where_NE[:, None] | where).reshape(-1, len(experts))
        costs_NR = (costs_NR[:, None] + prices).reshape(-1, ranks)
    for where, prices in zip(*first, strict=True):
        yield where_NE | where, costs_NR + prices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", action="store_true", help="judge calls with a limit of a rank's assignments")
    parser.add_argument("--markdown", action="store_true", help="tables for benchmarks/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    return command.run(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Prints what the planners take by the best, over all cases, and ours by kind of case."""
    if arguments.cases < 1:
        raise ConfigError(f"--cases ({arguments.cases}) must be at least 1")
    if arguments.limit:
        show_limits(arguments)
        return
    start, ratios, kinds = time.perf_counter(), {name: np.empty(arguments.cases) for name in COMPARED}, []
    for number in range(arguments.cases):
        asked = case(arguments.seed, number)
        least = exact(asked.counts_RE, asked.placement, asked.costs, asked.limits)
        assert least is not None, "a call without a limit has a plan"
        kinds.append(("all", *asked.kinds))
        for name in COMPARED:
            quotas_ER = PLANNERS[name].plan(asked.counts_RE, asked.placement, asked.costs, asked.limits)
            check(quotas_ER, asked.counts_RE, asked.placement, asked.limits)
            seconds = outcome(quotas_ER, asked.placement, asked.costs, asked.limits).seconds
            assert seconds >= least, (name, number, seconds, least)
            ratios[name][number] = seconds / least
    every = range(arguments.cases)
    planners = {name: summary(ratios[name], every) for name in COMPARED}
    by_kind = {
        kind: summary(ratios["solve"], [number for number in every if kind in kinds[number]])
        for kind in sorted({kind for of_case in kinds for kind in of_case})
    }
    show("planner", planners, arguments.markdown)
    show("solve, where", by_kind, arguments.markdown)
    print(f"{arguments.cases} cases, seed {arguments.seed}, {time.perf_counter() - start:.0f} s")
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "planners": planners, "solve": by_kind}))


def show_limits(arguments: argparse.Namespace) -> None:
    """Prints in how many calls the limit is kept, cannot be kept, and neither."""
    start, found = time.perf_counter(), dict[str, Counter[str]]()
    for number in range(arguments.cases):
        asked = limited_call(arguments.seed, number)
        verdict = grade(asked, exact)
        for kind in ("all", *asked.kinds):
            found.setdefault(kind, Counter()).update((verdict, "calls", *("plain",) * asked.is_plain_over()))
        if verdict in ("missed", "undecided"):
            print(f"{verdict}: case {number}")
    columns = ("calls", "plain", *VERDICTS)
    table_rows = [[kind, *(str(found[kind][column]) for column in columns)] for kind in sorted(found)]
    titles = ["calls with", "calls", "over it if it is not asked", "kept", "no plan keeps it", "missed", "undecided"]
    print(table(titles, table_rows, arguments.markdown) + "\n")
    print(f"{arguments.cases} calls, seed {arguments.seed}, {time.perf_counter() - start:.0f} s")
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "limit": found}))


def summary(ratios: np.ndarray, numbers: Sequence[int]) -> dict[str, float]:
    """Of the cases with these numbers: time by the least time."""
    chosen = [float(ratios[number]) for number in numbers]
    worst = max(numbers, key=ratios.__getitem__)
    optimal = sum(ratio == 1 for ratio in chosen)
    return {"cases": len(chosen), "mean": fmean(chosen), "worst": max(chosen), "case": worst, "optimal": optimal}


def show(heading: str, results: dict[str, dict[str, float]], markdown: bool) -> None:
    table_rows = [
        [name, str(f["cases"]), f"{f['mean']:.4f}", f"{f['worst']:.3f}", str(f["case"]), str(f["optimal"])]
        for name, f in results.items()
    ]
    print(table([heading, "cases", "time by the least", "worst", "its number", "optimal"], table_rows, markdown) + "\n")


if __name__ == "__main__":
    sys.exit(main())
