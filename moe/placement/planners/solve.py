"""Mixtrain's placement planner: it fills existing replicas first, and makes new ones only if they save time.

For each of several thresholds above the mean work, ranks above the threshold give away their excess: first to fresh
replicas, which have their weights already, then to new ones, the largest expert first. Replica slots are scarce: the
target is a rank on which the excess fits and a slot remains for the rest of its headroom; else a rank that the excess
fills; and only then a rank that would waste its last slot. Ranks that remain above the threshold give first in the next
try. The result is the attempt whose busiest rank finishes first; one attempt leaves everything on the primaries. A
rank's time has its assignments, its overhead per expert, and the replicas that it sends and receives. A replica is made
only if it takes more assignments than it costs. A limit on a rank's assignments takes precedence over time.

The core is compiled (solve.cpp). Without a compiler, `reference` computes equal plans in Python.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from moe.kernels.compiler import FLAGS, cache_folder, compile_library
from moe.placement.planners import limit
from moe.placement.quotas import Costs, ReplicaLimits
from moe.placement_map import Integers, PlacementMap

STEPS = (2, 5, 9, 15, 25, 50, 100, 200, 400, 800)  # thresholds: thousandths of the mean work above the mean
ROUNDS = 6  # most tries per threshold and order of ranks (busiest first, idlest first)
PATIENCE = 2  # consecutive tighter thresholds without improvement after which the search ends
ENOUGH = 10  # thousandths of the mean above it, at which a plan's time is good enough
_LOGGER = logging.getLogger(__name__)


def solve(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Return the quotas [E, R] of one call according to Mixtrain's own planner."""
    if (library := _loaded()) is None:
        return reference(counts_RE, placement, costs, limits)
    ranks, experts = counts_RE.shape
    left, replicas = np.empty(experts, np.int64), np.empty((ranks * max(limits.replica_slots, 1), 3), np.int64)
    held = sorted(placement.replicas)
    fresh = np.array([rank for _, rank in held], np.int64)
    pinned = np.array([replica in limits.pinned for replica in held], np.int64)
    starts = np.searchsorted([expert for expert, _ in held], np.arange(experts + 1))  # of each expert's replicas
    totals, steps = counts_RE.sum(0), np.array(STEPS)
    far = -1 if costs.replica_between is None else costs.replica_between
    most = -1 if limits.most is None else limits.most
    sizes = experts, ranks, limits.replica_slots, limits.ranks_per_node
    arrays = (totals, placement.primary_ranks, starts, fresh, pinned, steps)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    outputs = [ctypes.c_void_p(array.ctypes.data) for array in (left, replicas)]
    of_replica = costs.replica_in_node, far, costs.grad_in_node, costs.grad_between, costs.block_rows
    integers = [ctypes.c_int64(number) for number in (*sizes, costs.expert_overhead, *of_replica, most)]
    searched = len(STEPS), ROUNDS, ENOUGH, PATIENCE, limit.TRIES, limit.FEWER, limit.POLISH
    count = library.mixtrain_placement(*integers, *addresses, *map(ctypes.c_int64, searched), *outputs)
    return _quotas(placement, left, replicas[:count])


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    try:
        source = Path(__file__).with_name("solve.cpp")
        library = ctypes.CDLL(str(compile_library(source, cache_folder(), FLAGS)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).splitlines()[0]
        _LOGGER.warning("expert placement uses its slow Python planner, as the compiled one cannot be used: %s", reason)
        return None
    library.mixtrain_placement.restype = ctypes.c_int64
    return library


def _quotas(placement: PlacementMap, left_E: Integers, replicas: Integers) -> Integers:
    quotas_ER = np.where(placement.is_primary_ER, left_E[:, None], 0)
    quotas_ER[replicas[:, 0], replicas[:, 1]] = replicas[:, 2]
    return quotas_ER


def reference(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Return the quotas [E, R] of one call, planned in Python; equal to those of the compiled planner."""
    fresh_ranks: list[list[int]] = [[] for _ in range(placement.num_experts)]
    for expert, rank in sorted(placement.replicas):
        fresh_ranks[expert].append(rank)
    totals, primary_ranks = counts_RE.sum(0).tolist(), placement.primary_ranks.tolist()
    problem = _Problem(totals, primary_ranks, fresh_ranks, costs, limits, placement.num_ranks)
    primary = best = problem.at_primaries()
    base, least = problem.mean(primary.work), problem.score(primary)
    thresholds = [each for step in STEPS if (each := base + base * step // 1000) < max(primary.work)]
    of_fresh = []
    for threshold in thresholds:
        of_fresh.append(primary.clone())
        problem.use_fresh(of_fresh[-1], threshold)
        if (now := problem.score(of_fresh[-1])) < least:
            least, best = now, of_fresh[-1]
        if max(of_fresh[-1].work) <= threshold:
            break
    falling = sorted(range(problem.ranks), key=lambda rank: -primary.work[rank])
    if least[0] > 0 or least[1] > base + base * ENOUGH // 1000:
        misses = 0
        for threshold, fresh in reversed(list(zip(thresholds, of_fresh))):
            if misses == PATIENCE:
                break
            if least[0] <= 0 and threshold >= least[1]:
                continue
            starts, before = [fresh, primary] if placement.replicas else [primary], least
            for attempt in (each for start in starts for each in problem.with_new_replicas(start, falling, threshold)):
                if (now := problem.score(attempt)) < least:
                    least, best = now, attempt
            misses = 0 if least < before else misses + 1
    if least[0] > 0:
        best = min(best, problem.keep_limit(best), key=problem.score)
    replicas = np.array([(c.expert, c.rank, c.count) for c in best.replicas if c.count], np.int64).reshape(-1, 3)
    return _quotas(placement, np.array(best.left, np.int64), replicas)


@dataclass
class _Replica:
    """A replica in a mutable placement plan, with its number of assignments."""

    expert: int
    rank: int
    count: int  # assignments
    is_new: bool  # its weights must be sent
    takes: int  # replica slots: 1, or 0 for a pinned replica, whose slot is counted already


@dataclass
class _Attempt:
    """A mutable placement plan: assignments on primaries, work and slots of ranks, and replicas."""

    left: list[int]  # assignments of each expert on its primary
    work: list[int]  # assignments and overhead of each rank
    used: list[int]  # replica slots in use on each rank
    replicas: list[_Replica] = field(default_factory=list)

    def clone(self) -> _Attempt:
        return _Attempt(list(self.left), list(self.work), list(self.used), [replace(each) for each in self.replicas])


@dataclass
class _Problem:
    """The planner's input for one call, in plain Python numbers."""

    totals: list[int]  # assignments of each expert
    primaries: list[int]  # rank of each expert
    fresh: list[list[int]]  # ranks that already have a replica, by expert
    costs: Costs
    limits: ReplicaLimits
    ranks: int

    @property
    def far(self) -> int:
        """Cost of a replica on another node than its primary, in assignments; -1 if such replicas are not allowed."""
        return -1 if self.costs.replica_between is None else self.costs.replica_between

    @functools.cached_property
    def experts_of(self) -> list[list[int]]:
        """Experts with assignments, by rank of their primary; those with the most assignments are first."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert in sorted(range(len(self.totals)), key=lambda expert: -self.totals[expert]):
            if self.totals[expert] > 0:
                found[self.primaries[expert]].append(expert)
        return found

    def at_primaries(self) -> _Attempt:
        attempt = _Attempt(list(self.totals), [0] * self.ranks, [0] * self.ranks)
        for primary, total in zip(self.primaries, self.totals, strict=True):
            if total > 0:
                attempt.work[primary] += total + self.costs.expert_overhead
        for _, rank in self.limits.pinned:
            attempt.used[rank] += 1
        return attempt

    def blocks(self, expert: int, rank: int, count: int) -> int:
        """Return the cost of returning a replica's gradients block by block; 0 if they are returned once per step."""
        if (block_rows := self.costs.block_rows) == 0:
            return 0
        node = self.limits.ranks_per_node
        near = self.primaries[expert] // node == rank // node
        return (self.costs.grad_in_node if near else self.costs.grad_between) * -(-count // block_rows)

    def new_replica(self, expert: int, rank: int) -> _Replica:
        """Return a replica of an expert on a rank, still without assignments."""
        is_new = rank not in self.fresh[expert]
        return _Replica(expert, rank, 0, is_new, int((expert, rank) not in self.limits.pinned))

    def mean(self, work: list[int]) -> int:
        """Return the mean work of all ranks or, without replicas between nodes, the mean of the busiest node."""
        size = self.ranks if self.far >= 0 else self.limits.ranks_per_node
        groups = [work[first : first + size] for first in range(0, self.ranks, size)]
        return max(-(-sum(group) // len(group)) for group in groups)

    def give(self, attempt: _Attempt, replica: _Replica, count: int) -> None:
        """Move `count` assignments from an expert's primary to its replica; a negative count moves them back."""
        primary, overhead = self.primaries[replica.expert], self.costs.expert_overhead
        work, left = attempt.work, attempt.left
        work[primary] += overhead * (left[replica.expert] == 0)
        left[replica.expert] -= count
        work[primary] -= count + overhead * (left[replica.expert] == 0)
        is_first = replica.count == 0
        replica.count += count
        change = is_first - (replica.count == 0)
        attempt.used[replica.rank] += change * replica.takes
        work[replica.rank] += count + overhead * change

    def use_fresh(self, attempt: _Attempt, threshold: int) -> None:
        """Move assignments from ranks above the threshold to ranks with headroom, through existing replicas only.

        The paths are augmenting paths (Edmonds and Karp 1972). Each of their steps moves assignments from a primary to
        a replica, or from a replica back to its primary.
        """
        work, left, primaries, overhead = attempt.work, attempt.left, self.primaries, self.costs.expert_overhead
        by_primary: list[list[_Replica]] = [[] for _ in work]
        at_rank: list[list[_Replica]] = [[] for _ in work]
        for expert, ranks in enumerate(self.fresh):
            for rank in ranks:
                attempt.replicas.append(self.new_replica(expert, rank))
                by_primary[primaries[expert]].append(attempt.replicas[-1])
                at_rank[rank].append(attempt.replicas[-1])
        for _ in range(4 * len(attempt.replicas)):
            queue = [rank for rank in range(self.ranks) if work[rank] > threshold]
            over: dict[int, _Replica | None] = dict.fromkeys(queue)  # the replica over which the path reaches each rank
            end, headroom, position = -1, 0, 0
            while position < len(queue) and end < 0:
                rank, position = queue[position], position + 1
                steps = [(r.rank, r, overhead * (r.count == 0)) for r in by_primary[rank] if left[r.expert]]
                steps += [(primaries[r.expert], r, overhead * (left[r.expert] == 0)) for r in at_rank[rank] if r.count]
                for to, replica, needed in steps:
                    if to not in over:
                        over[to] = replica
                        queue.append(to)
                        if end < 0 and work[to] + needed < threshold:
                            end, headroom = to, threshold - needed - work[to]
            if end < 0:
                break
            path, amount, rank = [], headroom, end
            while (taken := over[rank]) is not None:
                takes = taken.rank == rank
                path.append((taken, takes))
                amount = min(amount, left[taken.expert] if takes else taken.count)
                rank = primaries[taken.expert] if takes else taken.rank
            amount = min(amount, work[rank] - threshold)
            for taken, takes in path:
                self.give(attempt, taken, amount if takes else -amount)

    def with_new_replicas(self, fresh: _Attempt, falling: list[int], threshold: int) -> Iterator[_Attempt]:
        """Yield plans that add new replicas to `fresh`, until one keeps the work of all ranks within the threshold.

        `falling`: ranks sorted by decreasing work; they give away assignments in this order, then in the reverse one.
        """
        for start in (falling, falling[::-1]):
            donors, before = list(start), -1
            for _ in range(ROUNDS):
                attempt = fresh.clone()
                self.add_new(attempt, donors, threshold)
                yield attempt
                if (most := max(attempt.work)) <= threshold:
                    return
                if most == before:
                    break
                donors.sort(key=lambda rank, work=attempt.work: work[rank] <= threshold)  # type: ignore[misc]
                before = most

    def add_new(self, attempt: _Attempt, donors: list[int], threshold: int) -> None:
        work, overhead, node = attempt.work, self.costs.expert_overhead, self.limits.ranks_per_node
        holds: list[list[int]] = [[] for _ in self.totals]
        for replica in attempt.replicas:
            holds[replica.expert].append(replica.rank)

        def target(ranks: range, least: int, expert: int, wanted: int, donor: int) -> int:
            used, num_slots, pinned = attempt.used, self.limits.replica_slots, self.limits.pinned
            headroom = {rank: threshold - overhead - work[rank] for rank in ranks if rank != donor}
            allowed = [rank for rank in headroom if headroom[rank] > least and rank not in holds[expert]]
            allowed = [rank for rank in allowed if used[rank] + ((expert, rank) not in pinned) <= num_slots]
            fits = [rank for rank in allowed if headroom[rank] >= wanted]
            exact = [rank for rank in fits if used[rank] + 2 <= num_slots or headroom[rank] == wanted]
            filled = [rank for rank in allowed if headroom[rank] < wanted]
            if exact or not filled:
                return max(exact or fits, key=work.__getitem__, default=-1)
            return min(filled, key=lambda rank: (-used[rank], work[rank]))

        for donor in donors:
            experts, first = list(self.experts_of[donor]), donor // node * node
            while work[donor] > threshold and experts:
                expert = max(experts, key=attempt.left.__getitem__)
                wanted, cost = min(work[donor] - threshold, attempt.left[expert]), self.costs.replica_in_node
                rank = target(range(first, min(first + node, self.ranks)), cost, expert, wanted, donor)
                if rank < 0 and self.far >= 0:
                    cost = self.far
                    rank = target(range(self.ranks), cost, expert, wanted, donor)
                count = 0 if rank < 0 else min(wanted, threshold - overhead - work[rank])
                grads = 0 if rank < 0 else self.blocks(expert, rank, count)
                # an expert's overhead moves only with all of its assignments
                if count <= cost + grads + overhead * (count < attempt.left[expert]):
                    experts.remove(expert)
                    continue
                attempt.replicas.append(self.new_replica(expert, rank))
                self.give(attempt, attempt.replicas[-1], count)
                holds[expert].append(rank)

    def keep_limit(self, before: _Attempt) -> _Attempt:
        """Return a plan that keeps the limit on each rank's assignments, or exceeds it by no more than `before`."""
        assert self.limits.most is not None
        ranks, experts, node = range(self.ranks), len(self.totals), self.limits.ranks_per_node
        kinds, attempt = [[limit.NONE] * experts for _ in ranks], self.at_primaries()
        quotas = [[0] * experts for _ in ranks]
        spread = limit.Spread(quotas, [0] * self.ranks, list(attempt.used), [[] for _ in ranks])
        for expert, (primary, total) in enumerate(zip(self.primaries, self.totals, strict=True)):
            for rank in ranks:
                if rank in self.fresh[expert]:
                    kinds[rank][expert] = limit.PINNED if (expert, rank) in self.limits.pinned else limit.HELD
                elif rank != primary and (self.far >= 0 or rank // node == primary // node):
                    kinds[rank][expert] = limit.MAY
            spread.quotas[primary][expert] = total
            spread.loads[primary] += total
            spread.experts[primary] += [expert] * (total > 0)
        costs = self.costs.expert_overhead, self.costs.replica_in_node, self.far
        sizes = experts, self.ranks, self.limits.replica_slots, node, *costs, self.totals, self.primaries, kinds
        problem = limit.LimitProblem(*sizes)
        for replica in before.replicas:
            limit.move(problem, spread, replica.expert, self.primaries[replica.expert], replica.rank, replica.count)
        spread = limit.keep(problem, spread, self.limits.most, limit.TRIES, limit.FEWER, limit.POLISH)
        for rank, of_rank in enumerate(spread.experts):
            for expert in of_rank:
                if self.primaries[expert] != rank:
                    attempt.replicas.append(self.new_replica(expert, rank))
                    self.give(attempt, attempt.replicas[-1], spread.quotas[rank][expert])
        return attempt

    def score(self, attempt: _Attempt) -> tuple[int, int, int]:
        """Return a plan's (excess of the busiest rank over the limit, time of the busiest rank, new replicas)."""
        loads, copying, node = [0] * self.ranks, [0] * self.ranks, self.limits.ranks_per_node
        for primary, left in zip(self.primaries, attempt.left, strict=True):
            loads[primary] += left
        num_new = 0
        for replica in attempt.replicas:
            loads[replica.rank] += replica.count
            primary = self.primaries[replica.expert]
            near = primary // node == replica.rank // node
            cost = (self.costs.replica_in_node if near else max(self.far, 0)) * replica.is_new
            cost += self.blocks(replica.expert, replica.rank, replica.count)
            copying[primary] += cost
            copying[replica.rank] += cost
            num_new += replica.is_new
        over = 0 if self.limits.most is None else max(0, *(load - self.limits.most for load in loads))
        seconds = max(work + transfers for work, transfers in zip(attempt.work, copying, strict=True))
        return over, seconds, num_new
