"""Placement planner that keeps a limit on each rank's assignments, however much its replicas cost.

Choosing the replicas is a packing problem: a rank has few replica slots, and a replica takes no more assignments than
its expert has. `fill` moves assignments along the widest path from a rank above the limit to a rank with headroom,
through existing replicas if possible, else through new ones. On its way a rank may give away its own experts to accept
others. If a path takes a rank's last slot, the rank is filled up, so that the headroom left is on ranks with slots. If
that is not enough, replicas are removed at random, some of them are barred, and `fill` runs again. A new plan is
accepted if it is no worse, and occasionally if it is worse (large neighbourhood search, Shaw 1998). A plan that keeps
the limit is improved in the same way for some tries, to take less time. If no plan keeps the limit, the lowest limit
with a plan is searched for.

The random numbers are a fixed sequence, so the plan depends only on the call. limit.h is the compiled version.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

TRIES = 300  # tries to find a plan that keeps the limit
FEWER = 30  # tries for each higher limit, if no plan keeps the given one
POLISH = 60  # tries to take less time, once the limit is kept
NONE, MAY, HELD, PINNED = range(4)  # state of a replica on a rank: not allowed, possible, existing, pinned
# Replicas that a path may use: only existing ones; also new ones in the primary's node; also new ones anywhere.
THERE, IN_NODE, ANYWHERE = range(3)


@dataclass
class LimitProblem:
    """The planner's input for one call: sizes, costs and assignments.

    `node`: ranks per node. `near`, `far`: cost of a new replica inside a node, and between nodes (negative: not
    allowed). `totals`: assignments of each expert. `primaries`: rank of each expert's primary.
    """

    experts: int
    ranks: int
    replica_slots: int
    node: int
    overhead: int
    near: int
    far: int
    totals: Sequence[int]
    primaries: Sequence[int]
    kinds: list[list[int]]  # state of each replica (NONE to PINNED), by rank and expert

    def takes(self, expert: int, rank: int) -> int:
        """Return 1 if an expert needs a replica slot on a rank; 0 on its primary's rank or if its replica is pinned."""
        return int(rank != self.primaries[expert] and self.kinds[rank][expert] != PINNED)


@dataclass
class Spread:
    """A mutable placement plan: quotas, loads, used replica slots and experts of each rank."""

    quotas: list[list[int]]  # assignments, by rank and expert
    loads: list[int]
    used: list[int]  # replica slots in use on each rank
    experts: list[list[int]]  # experts that each rank computes, ascending

    def clone(self) -> Spread:
        quotas, experts = ([list(each) for each in of_ranks] for of_ranks in (self.quotas, self.experts))
        return Spread(quotas, list(self.loads), list(self.used), experts)


@dataclass
class Random:
    """Knuth's linear congruential random number generator, modulo 2^64."""

    state: int = 1

    def below(self, end: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % end


def move(p: LimitProblem, s: Spread, expert: int, source: int, target: int, count: int) -> None:
    """Move `count` of an expert's assignments from the rank `source` to the rank `target`."""
    if count == 0:
        return
    if s.quotas[target][expert] == 0:
        s.used[target] += p.takes(expert, target)
        bisect.insort(s.experts[target], expert)
    s.quotas[source][expert] -= count
    s.quotas[target][expert] += count
    s.loads[source] -= count
    s.loads[target] += count
    if s.quotas[source][expert] == 0:
        s.used[source] -= p.takes(expert, source)
        s.experts[source].remove(expert)


def augment(p: LimitProblem, s: Spread, most: int, reach: int, large: bool) -> bool:
    """Move assignments from a rank above `most` to a rank with headroom; return whether there is a path between them.

    The widest path is used, found as in Dijkstra's algorithm. `reach`: replicas that it may use (THERE, IN_NODE or
    ANYWHERE). `large`: among equally wide paths, prefer experts with more assignments, whose replicas may take more
    later.
    """
    width = [max(load - most, 0) for load in s.loads]
    size = [0] * p.ranks
    before, by, done = [-1] * p.ranks, [-1] * p.ranks, [False] * p.ranks
    end, amount = -1, 0
    while True:
        now_R = [0 if is_done else each for is_done, each in zip(done, width, strict=True)]
        widest = max(now_R)
        if widest == 0 or widest < amount:
            break
        source = now_R.index(widest)
        done[source] = True
        headroom = min(widest, most - s.loads[source])
        if headroom > amount or (headroom > 0 and headroom == amount and s.loads[source] > s.loads[end]):
            end, amount = source, headroom
        for expert in s.experts[source]:
            there, primary = s.quotas[source][expert], p.primaries[expert]
            now = min(widest, there)
            for target in range(p.ranks):
                if done[target] or now < width[target]:
                    continue
                if now == width[target] and (size[target] == 0 or there <= size[target]):
                    continue
                if target != primary and s.quotas[target][expert] == 0:
                    kind = p.kinds[target][expert]
                    if kind == NONE or (kind != PINNED and (reach == THERE or s.used[target] >= p.replica_slots)):
                        continue
                    if reach == IN_NODE and primary // p.node != target // p.node:
                        continue
                width[target], before[target], by[target] = now, source, expert
                size[target] = there if large else 0
    if end < 0:
        return False
    target = end
    while before[target] >= 0:
        move(p, s, by[target], before[target], target, amount)
        target = before[target]
    last, expert = before[end], by[end]
    if s.used[end] == p.replica_slots and s.used[last] < p.replica_slots:
        move(p, s, expert, last, end, min(s.quotas[last][expert], most - s.loads[end]))
    return True


def fill(p: LimitProblem, s: Spread, most: int, near_first: bool, large: bool) -> None:
    """Move assignments from ranks above the limit `most` to ranks with headroom until no path is left.

    `near_first`: prefer new replicas in the primary's node to new replicas anywhere. `large`: as in `augment`.
    """
    reaches = (THERE, IN_NODE, ANYWHERE) if near_first else (THERE, ANYWHERE)
    while any(augment(p, s, most, reach, large) for reach in reaches):
        pass


def score(p: LimitProblem, s: Spread, most: int) -> tuple[int, int, int]:
    """Return a plan's (assignments above the limit, summed over ranks; time of the busiest rank; new replicas)."""
    work, replicas = [0] * p.ranks, 0
    for rank, experts in enumerate(s.experts):
        work[rank] += s.loads[rank] + p.overhead * len(experts)
        for expert in experts:
            primary = p.primaries[expert]
            if primary == rank or p.kinds[rank][expert] != MAY:
                continue
            cost = p.near if primary // p.node == rank // p.node else p.far
            work[rank] += cost
            work[primary] += cost
            replicas += 1
    return sum(max(load - most, 0) for load in s.loads), max(work), replicas


def remove(p: LimitProblem, s: Spread, random: Random) -> list[tuple[int, int, int]]:
    """Remove one to three replicas at random, preferably small ones, and bar some of them from being made again.

    Returns (rank, expert, previous kind) of each barred replica.
    """
    replicas = [(rank, expert) for rank in range(p.ranks) for expert in s.experts[rank] if p.primaries[expert] != rank]
    barred: list[tuple[int, int, int]] = []
    for _ in range(1 + random.below(3)):
        if not replicas:
            break
        chosen = random.below(len(replicas))
        if random.below(2):
            chosen = min(chosen, random.below(len(replicas)), key=lambda i: s.quotas[replicas[i][0]][replicas[i][1]])
        rank, expert = replicas.pop(chosen)
        move(p, s, expert, rank, p.primaries[expert], s.quotas[rank][expert])
        if random.below(2) and p.kinds[rank][expert] != PINNED:
            barred.append((rank, expert, p.kinds[rank][expert]))
            p.kinds[rank][expert] = NONE
    return barred


def search(p: LimitProblem, start: Spread, most: int, tries: int, polish: int) -> Spread:
    """Return the best plan that a random search from `start` finds.

    It has `tries` attempts to keep the limit `most`, and then `polish` attempts to save time.
    """
    random, best = Random(), start.clone()
    fill(p, best, most, near_first=True, large=False)
    now, least = best, score(p, best, most)
    current = least
    while (tries if least[0] > 0 else polish) > 0:
        if least[0] > 0:
            tries -= 1
        else:
            polish -= 1
        following = now.clone()
        barred = remove(p, following, random)
        fill(p, following, most, near_first=current[0] == 0, large=random.below(4) == 0)
        for rank, expert, kind in barred:
            p.kinds[rank][expert] = kind
        found = score(p, following, most)
        if found <= current or (current[0] > 0 and random.below(8) == 0):
            now, current = following, found
        if found < least:
            best, least = following, found
    return best


def may_exist(p: LimitProblem, loads: Sequence[int], most: int) -> bool:
    """Return whether a plan could keep the limit `most`; only the answer False is certain.

    The answer is False if the usable headroom of a node (of all ranks, if replicas between nodes are possible) is less
    than its excess, even if every rank's free slots get the largest experts. `loads`: each rank's assignments without
    replicas.
    """
    joined = p.far >= 0 or any(
        kind != NONE and p.primaries[expert] // p.node != rank // p.node
        for rank, of_rank in enumerate(p.kinds)
        for expert, kind in enumerate(of_rank)
    )
    size = p.ranks if joined else p.node
    for first in range(0, p.ranks, size):
        over = headroom = 0
        for rank in range(first, min(first + size, p.ranks)):
            over += max(loads[rank] - most, 0)
            if loads[rank] >= most:
                continue
            of_rank = p.kinds[rank]
            pinned = [total for kind, total in zip(of_rank, p.totals, strict=True) if kind == PINNED]
            free = sorted((t for kind, t in zip(of_rank, p.totals, strict=True) if kind in (MAY, HELD)), reverse=True)
            headroom += min(sum(pinned) + sum(free[: max(p.replica_slots - len(pinned), 0)]), most - loads[rank])
        if over > headroom:
            return False
    return True


def keep(p: LimitProblem, start: Spread, most: int, tries: int, fewer: int, polish: int) -> Spread:
    """Return a plan that keeps the limit `most` on each rank's assignments, or exceeds it as little as possible.

    `start`: the plan to improve. `tries`, `polish`: as in `search`. `fewer`: tries for each higher limit.
    """
    loads = [0] * p.ranks
    for primary, total in zip(p.primaries, p.totals, strict=True):
        loads[primary] += total
    if may_exist(p, loads, most):
        found = search(p, start, most, tries, polish)
        if max(found.loads) <= most or max(found.loads) < max(start.loads):
            start = found
    low, mean = most, sum(loads) // p.ranks
    while max(start.loads) - low > 1 + mean // 1000:
        middle = low + (max(start.loads) - low) // 2
        found = search(p, start, middle, fewer, fewer) if may_exist(p, loads, middle) else start
        if max(found.loads) <= middle:
            start = found
        else:
            low = middle
    return start
