"""Our planner: fills the copies that are there, makes new ones only for the rest, and only where they pay.

For each of a few thresholds over the mean work of a rank, the ranks above it give away what is over: first to fresh
copies, whose weights need not travel, then to new ones, the largest expert first. Slots are few: a rank takes what fits
where it keeps a slot for the rest of its room, else what fills it, and only then what wastes its last slot. Ranks that
keep too much all the same give first in another try. Of all attempts, and of leaving everything at home, the one counts
whose busiest rank is done first: its assignments, its pieces, and the copies that it sends and receives. A copy takes
more assignments than it costs, or is not made. Where a rank may compute only so many, that comes before time.

The core is compiled (solve.cpp); `reference` is the same in Python, and takes its place where there is no compiler.
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

from moe.kernels.build import FLAGS, cache_folder, compile_library
from moe.placement.planners import limit
from moe.placement.quotas import CopyLimits, Costs
from moe.placement_map import Integers, PlacementMap

STEPS = (2, 5, 9, 15, 25, 50, 100, 200, 400, 800)  # thousandths of the mean work above it
ROUNDS = 6  # tries at a threshold, from the busiest rank and from the idlest
PATIENCE = 2  # tighter and tighter thresholds that may bring nothing
ENOUGH = 10  # thousandths above the mean that are left alone
_LOGGER = logging.getLogger(__name__)


def solve(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Integers:
    """quotas_ER of one call."""
    if (library := _loaded()) is None:
        return reference(counts_RE, placement, costs, limits)
    ranks, experts = counts_RE.shape
    left, copies = np.empty(experts, np.int64), np.empty((ranks * max(limits.slots, 1), 3), np.int64)
    held = sorted(placement.copies)
    starts = np.zeros(experts + 1, np.int64)
    fresh, pinned = np.empty(len(held), np.int64), np.zeros(len(held), np.int64)
    if held:
        fresh[:] = [rank for _, rank in held]
        pinned[:] = [copy in limits.pinned for copy in held]
        np.cumsum(np.bincount([expert for expert, _ in held], minlength=experts), out=starts[1:])
    totals, steps = counts_RE.sum(0), np.array(STEPS)
    numbers = (experts, ranks, limits.slots, limits.ranks_per_node, costs.piece, costs.copy_in_node)
    far = -1 if costs.copy_between is None else costs.copy_between
    most = -1 if limits.most is None else limits.most
    arrays = (totals, placement.home_ranks, starts, fresh, pinned, steps)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    outputs = [ctypes.c_void_p(array.ctypes.data) for array in (left, copies)]
    grads = costs.grad_in_node, costs.grad_between, costs.block_rows
    integers = [ctypes.c_int64(number) for number in (*numbers, far, *grads, most)]
    count = library.mixtrain_placement(
        *integers, *addresses, *map(ctypes.c_int64, (len(STEPS), ROUNDS, ENOUGH, PATIENCE, *_tries())), *outputs
    )
    return _quotas(placement, left, copies[:count])


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    try:
        source = Path(__file__).with_name("solve.cpp")
        library = ctypes.CDLL(str(compile_library(source, cache_folder(), FLAGS)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _LOGGER.warning("no compiled planner of expert placement, Python's is used: %s", str(error).splitlines()[0])
        return None
    library.mixtrain_placement.restype = ctypes.c_int64
    return library


def _tries() -> tuple[int, int, int]:
    return limit.TRIES, limit.FEWER, limit.POLISH


def _quotas(placement: PlacementMap, left_E: Integers, copies: Integers) -> Integers:
    quotas_ER = np.zeros((placement.num_experts, placement.num_ranks), np.int64)
    quotas_ER[np.arange(placement.num_experts), placement.home_ranks] = left_E
    quotas_ER[copies[:, 0], copies[:, 1]] = copies[:, 2]
    return quotas_ER


# ---------------------------------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------------------------------


def reference(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Integers:
    """The quotas of `solve`, computed in Python."""
    problem = _Problem.of(counts_RE, placement, costs, limits)
    home = best = problem.at_home()
    base, least = problem.mean(home.work), problem.score(home)
    thresholds = [base + base * step // 1000 for step in STEPS]
    thresholds = [threshold for threshold in thresholds if threshold < max(home.work)]
    of_fresh = []
    for threshold in thresholds:
        of_fresh.append(home.copy())
        problem.use_fresh(of_fresh[-1], threshold)
        if (now := problem.score(of_fresh[-1])) < least:
            least, best = now, of_fresh[-1]
        if max(of_fresh[-1].work) <= threshold:
            break
    falling = sorted(range(problem.ranks), key=lambda rank: -home.work[rank])
    if least[0] > 0 or least[1] > base + base * ENOUGH // 1000:
        misses = 0
        for threshold, fresh in reversed(list(zip(thresholds, of_fresh))):
            if misses == PATIENCE:
                break
            if least[0] <= 0 and threshold >= least[1]:
                continue
            starts, before = [fresh, home] if placement.copies else [home], least
            for attempt in (each for start in starts for each in problem.with_new(start, falling, threshold)):
                if (now := problem.score(attempt)) < least:
                    least, best = now, attempt
            misses = 0 if least < before else misses + 1
    if least[0] > 0:
        attempt = problem.keep_limit(best)
        if problem.score(attempt) < least:
            best = attempt
    copies = np.array([(c.expert, c.rank, c.count) for c in best.copies if c.count], np.int64).reshape(-1, 3)
    return _quotas(placement, np.array(best.left, np.int64), copies)


@dataclass
class _Copy:
    expert: int
    rank: int
    count: int  # assignments
    is_new: bool
    takes: int  # slots


@dataclass
class _Attempt:
    left: list[int]  # of each expert at its home
    work: list[int]  # of each rank
    used: list[int]  # of each rank's slots
    copies: list[_Copy] = field(default_factory=list)

    def copy(self) -> _Attempt:
        return _Attempt(list(self.left), list(self.work), list(self.used), [replace(copy) for copy in self.copies])


@dataclass
class _Problem:
    totals: list[int]
    homes: list[int]
    fresh: list[list[int]]  # by expert the ranks with a copy
    costs: Costs
    limits: CopyLimits
    ranks: int

    @classmethod
    def of(cls, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> _Problem:
        fresh: list[list[int]] = [[] for _ in range(placement.num_experts)]
        for expert, rank in sorted(placement.copies):
            fresh[expert].append(rank)
        totals, homes = counts_RE.sum(0).tolist(), placement.home_ranks.tolist()
        return cls(totals, homes, fresh, costs, limits, placement.num_ranks)

    @property
    def far(self) -> int:
        """What a copy between nodes costs; -1: there is to be none."""
        return -1 if self.costs.copy_between is None else self.costs.copy_between

    @functools.cached_property
    def experts_of(self) -> list[list[int]]:
        """By rank the experts at home there that have anything to do, most first."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert in sorted(range(len(self.totals)), key=lambda expert: -self.totals[expert]):
            if self.totals[expert] > 0:
                found[self.homes[expert]].append(expert)
        return found

    def at_home(self) -> _Attempt:
        attempt = _Attempt(list(self.totals), [0] * self.ranks, [0] * self.ranks)
        for home, total in zip(self.homes, self.totals, strict=True):
            if total > 0:
                attempt.work[home] += total + self.costs.piece
        for _, rank in self.limits.pinned:
            attempt.used[rank] += 1
        return attempt

    def blocks(self, expert: int, rank: int, count: int) -> int:
        """What the gradients of a copy's blocks cost; none where a copy's travel once."""
        if (rows := self.costs.block_rows) == 0:
            return 0
        node = self.limits.ranks_per_node
        near = self.homes[expert] // node == rank // node
        return (self.costs.grad_in_node if near else self.costs.grad_between) * -(-count // rows)

    def copy(self, expert: int, rank: int) -> _Copy:
        """One that has nothing yet."""
        is_new = rank not in self.fresh[expert]
        return _Copy(expert, rank, 0, is_new, int((expert, rank) not in self.limits.pinned))

    def mean(self, work: list[int]) -> int:
        """The mean of the ranks' work; of the busiest node's ranks where nothing is copied between nodes."""
        size = self.ranks if self.far >= 0 else self.limits.ranks_per_node
        groups = [work[first : first + size] for first in range(0, self.ranks, size)]
        return max(-(-sum(group) // len(group)) for group in groups)

    def give(self, attempt: _Attempt, copy: _Copy, count: int) -> None:
        """To a copy from its home; below zero: back."""
        home, piece, work, left = self.homes[copy.expert], self.costs.piece, attempt.work, attempt.left
        work[home] += piece * (left[copy.expert] == 0)
        left[copy.expert] -= count
        work[home] -= count + piece * (left[copy.expert] == 0)
        is_first = copy.count == 0
        copy.count += count
        change = is_first - (copy.count == 0)
        attempt.used[copy.rank] += change * copy.takes
        work[copy.rank] += count + piece * change

    def use_fresh(self, attempt: _Attempt, threshold: int) -> None:
        """Augmenting paths (Edmonds and Karp 1972) from ranks above the threshold to ranks with room: over a copy to
        its rank, or back from a copy's rank to its home."""
        work, left, piece = attempt.work, attempt.left, self.costs.piece
        at_home: list[list[_Copy]] = [[] for _ in work]
        at_rank: list[list[_Copy]] = [[] for _ in work]
        for expert, ranks in enumerate(self.fresh):
            for rank in ranks:
                attempt.copies.append(self.copy(expert, rank))
                at_home[self.homes[expert]].append(attempt.copies[-1])
                at_rank[rank].append(attempt.copies[-1])
        for _ in range(4 * len(attempt.copies)):
            queue = [rank for rank in range(self.ranks) if work[rank] > threshold]
            over: dict[int, _Copy | None] = dict.fromkeys(queue)  # by rank the copy that the path comes over
            end, room, place = -1, 0, 0
            while place < len(queue) and end < 0:
                rank, place = queue[place], place + 1
                steps = [(copy.rank, copy, piece * (copy.count == 0)) for copy in at_home[rank] if left[copy.expert]]
                steps += [
                    (self.homes[copy.expert], copy, piece * (left[copy.expert] == 0))
                    for copy in at_rank[rank]
                    if copy.count
                ]
                for to, copy, needed in steps:
                    if to not in over:
                        over[to] = copy
                        queue.append(to)
                        if end < 0 and work[to] + needed < threshold:
                            end, room = to, threshold - needed - work[to]
            if end < 0:
                break
            path, amount, rank = [], room, end
            while (taken := over[rank]) is not None:
                takes = taken.rank == rank
                path.append((taken, takes))
                amount = min(amount, left[taken.expert] if takes else taken.count)
                rank = self.homes[taken.expert] if takes else taken.rank
            amount = min(amount, work[rank] - threshold)
            for taken, takes in path:
                self.give(attempt, taken, amount if takes else -amount)

    def with_new(self, fresh: _Attempt, falling: list[int], threshold: int) -> Iterator[_Attempt]:
        """Attempts with new copies until one keeps all ranks at the threshold."""
        for start in (falling, falling[::-1]):
            donors, before = list(start), -1
            for _ in range(ROUNDS):
                attempt = fresh.copy()
                self.add_new(attempt, donors, threshold)
                yield attempt
                if (most := max(attempt.work)) <= threshold:
                    return
                if most == before:
                    break
                donors.sort(key=lambda rank, work=attempt.work: work[rank] <= threshold)  # type: ignore[misc]
                before = most

    def add_new(self, attempt: _Attempt, donors: list[int], threshold: int) -> None:
        work, piece, node = attempt.work, self.costs.piece, self.limits.ranks_per_node
        holds: list[list[int]] = [[] for _ in self.totals]
        for copy in attempt.copies:
            holds[copy.expert].append(copy.rank)
        for donor in donors:
            experts, first = list(self.experts_of[donor]), donor // node * node
            while work[donor] > threshold and experts:
                expert = max(experts, key=attempt.left.__getitem__)
                wanted, cost = min(work[donor] - threshold, attempt.left[expert]), self.costs.copy_in_node

                def target(
                    ranks: range, least: int, expert: int = expert, wanted: int = wanted, donor: int = donor
                ) -> int:
                    room = {rank: threshold - piece - work[rank] for rank in ranks}
                    may = [
                        rank
                        for rank in ranks
                        if room[rank] > least
                        and attempt.used[rank] + self.copy(expert, rank).takes <= self.limits.slots
                        if rank != donor and rank not in holds[expert]
                    ]
                    fits = [rank for rank in may if room[rank] >= wanted]
                    exact = [r for r in fits if attempt.used[r] + 2 <= self.limits.slots or room[r] == wanted]
                    filled = [rank for rank in may if room[rank] < wanted]
                    if exact or not filled:
                        return max(exact or fits, key=work.__getitem__, default=-1)
                    return min(filled, key=lambda rank: (-attempt.used[rank], work[rank]))

                rank = target(range(first, min(first + node, self.ranks)), cost)
                if rank < 0 and self.far >= 0:
                    cost = self.far
                    rank = target(range(self.ranks), cost)
                count = 0 if rank < 0 else min(wanted, threshold - piece - work[rank])
                grads = 0 if rank < 0 else self.blocks(expert, rank, count)
                # a whole expert's piece goes with it
                if count <= cost + grads + piece * (count < attempt.left[expert]):
                    experts.remove(expert)
                    continue
                attempt.copies.append(self.copy(expert, rank))
                self.give(attempt, attempt.copies[-1], count)
                holds[expert].append(rank)

    def keep_limit(self, before: _Attempt) -> _Attempt:
        """An attempt that keeps the limit, or is less over it than the one before."""
        assert self.limits.most is not None
        ranks, experts, node = range(self.ranks), range(len(self.totals)), self.limits.ranks_per_node
        kinds = [[limit.NONE] * len(self.totals) for _ in ranks]
        attempt = self.at_home()
        spread = limit.Spread(
            [[0] * len(self.totals) for _ in ranks], [0] * self.ranks, attempt.used, [[] for _ in ranks]
        )
        for expert, (home, total) in enumerate(zip(self.homes, self.totals, strict=True)):
            for rank in ranks:
                if rank in self.fresh[expert]:
                    kinds[rank][expert] = limit.PINNED if (expert, rank) in self.limits.pinned else limit.HELD
                elif rank != home and (self.far >= 0 or rank // node == home // node):
                    kinds[rank][expert] = limit.MAY
            spread.quotas[home][expert] = total
            spread.loads[home] += total
            spread.experts[home] += [expert] * (total > 0)
        costs = self.costs.piece, self.costs.copy_in_node, self.far
        asked = len(experts), self.ranks, self.limits.slots, node, *costs, self.totals, self.homes, kinds
        problem, attempt = limit.LimitProblem(*asked), self.at_home()
        for copy in before.copies:
            limit.move(problem, spread, copy.expert, self.homes[copy.expert], copy.rank, copy.count)
        spread = limit.keep(problem, spread, self.limits.most, *_tries())
        for rank, of_rank in enumerate(spread.experts):
            for expert in of_rank:
                if self.homes[expert] != rank:
                    attempt.copies.append(self.copy(expert, rank))
                    self.give(attempt, attempt.copies[-1], spread.quotas[rank][expert])
        return attempt

    def score(self, attempt: _Attempt) -> tuple[int, int, int]:
        """(assignments over what a rank may compute, time of the busiest rank, new copies)."""
        loads, copying, node = [0] * self.ranks, [0] * self.ranks, self.limits.ranks_per_node
        for home, left in zip(self.homes, attempt.left, strict=True):
            loads[home] += left
        num_new = 0
        for copy in attempt.copies:
            loads[copy.rank] += copy.count
            home = self.homes[copy.expert]
            near = home // node == copy.rank // node
            cost = (self.costs.copy_in_node if near else max(self.far, 0)) * copy.is_new
            cost += self.blocks(copy.expert, copy.rank, copy.count)
            copying[home] += cost
            copying[copy.rank] += cost
            num_new += copy.is_new
        over = 0 if self.limits.most is None else max(0, *(load - self.limits.most for load in loads))
        seconds = max(work + copies for work, copies in zip(attempt.work, copying, strict=True))
        return over, seconds, num_new
