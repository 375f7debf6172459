"""Plans for a limit of what a rank may compute: copies are made for it whatever they cost.

Which copies keep a limit is a packing problem: a rank has few slots, an expert's copy takes no more than the expert
has. `fill` moves assignments along the widest path from a rank above the limit to one with room: over copies that are
there, else over new ones. A rank may pass on its own experts to make room for others', and one whose last slot is taken
is filled up, so that its room moves to a rank with slots. Where that is not enough, copies are taken out at random,
some of them barred, and the rest is filled again; what is no worse, and now and then what is, is gone on from (large
neighbourhood search, Shaw 1998). The same goes on for a while with a plan that keeps the limit, to take less time.
Where none is found, the least limit that has one is searched.

The random numbers are a fixed sequence: a call's plan depends on nothing else. limit.h is the same compiled.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

TRIES = 300  # spreads without a plan that keeps the limit
FEWER = 30  # the same for each higher limit, where the one that is asked has no plan
POLISH = 60  # tries for less time, once the limit is kept
NONE, MAY, HELD, PINNED = range(4)  # an expert's copy on a rank: never, a new one, one that is there, with its own slot
THERE, IN_NODE, ANYWHERE = range(3)  # where copies come from


@dataclass
class LimitProblem:
    """What is asked; the costs as in `moe.placement.quotas`, `far` is copy_between."""

    experts: int
    ranks: int
    slots: int
    node: int
    piece: int
    near: int
    far: int
    totals: Sequence[int]
    homes: Sequence[int]
    kinds: list[list[int]]  # by rank and expert

    def takes(self, expert: int, rank: int) -> int:
        """Slots."""
        return int(rank != self.homes[expert] and self.kinds[rank][expert] != PINNED)

    def home_loads(self) -> list[int]:
        loads = [0] * self.ranks
        for home, total in zip(self.homes, self.totals, strict=True):
            loads[home] += total
        return loads


@dataclass
class Spread:
    """A plan as it grows."""

    quotas: list[list[int]]  # by rank and expert
    loads: list[int]
    used: list[int]  # of each rank's slots
    experts: list[list[int]]  # by rank those that it computes, ascending

    def copy(self) -> Spread:
        return Spread(
            [list(each) for each in self.quotas],
            list(self.loads),
            list(self.used),
            [list(each) for each in self.experts],
        )


@dataclass
class Random:
    """Knuth's linear congruential generator, modulo 2^64."""

    state: int = field(default=1)

    def below(self, end: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % end


def move(p: LimitProblem, s: Spread, expert: int, source: int, target: int, count: int) -> None:
    """That many of an expert's assignments to another rank."""
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
    """Move along the path that takes the most, found as Dijkstra's shortest one is; whether there is any. large: of
    such paths the one over experts with more assignments, whose copies may take more later."""
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
        room = min(widest, most - s.loads[source])
        if room > amount or (room > 0 and room == amount and s.loads[source] > s.loads[end]):
            end, amount = source, room
        for expert in s.experts[source]:
            there, home = s.quotas[source][expert], p.homes[expert]
            now = min(widest, there)
            for target in range(p.ranks):
                if done[target] or now < width[target]:
                    continue
                if now == width[target] and (size[target] == 0 or there <= size[target]):
                    continue
                if target != home and s.quotas[target][expert] == 0:
                    kind = p.kinds[target][expert]
                    if kind == NONE or (kind != PINNED and (reach == THERE or s.used[target] >= p.slots)):
                        continue
                    if reach == IN_NODE and home // p.node != target // p.node:
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
    if s.used[end] == p.slots and s.used[last] < p.slots:
        move(p, s, expert, last, end, min(s.quotas[last][expert], most - s.loads[end]))
    return True


def fill(p: LimitProblem, s: Spread, most: int, near_first: bool, large: bool) -> None:
    """Move what is over the limit to where room is, as far as there are paths."""
    while (
        augment(p, s, most, THERE, large)
        or (near_first and augment(p, s, most, IN_NODE, large))
        or augment(p, s, most, ANYWHERE, large)
    ):
        pass


def score(p: LimitProblem, s: Spread, most: int) -> tuple[int, int, int]:
    """(assignments over the limit on all ranks, time of the busiest rank, new copies)."""
    work, copies = [0] * p.ranks, 0
    for rank, experts in enumerate(s.experts):
        work[rank] += s.loads[rank] + p.piece * len(experts)
        for expert in experts:
            home = p.homes[expert]
            if home == rank or p.kinds[rank][expert] != MAY:
                continue
            cost = p.near if home // p.node == rank // p.node else p.far
            work[rank] += cost
            work[home] += cost
            copies += 1
    return sum(max(load - most, 0) for load in s.loads), max(work), copies


def remove(p: LimitProblem, s: Spread, random: Random) -> list[tuple[int, int, int]]:
    """Send one to three copies home, small ones rather; (rank, expert, kind) of those that are barred for now."""
    copies = [(rank, expert) for rank in range(p.ranks) for expert in s.experts[rank] if p.homes[expert] != rank]
    barred: list[tuple[int, int, int]] = []
    for _ in range(1 + random.below(3)):
        if not copies:
            break
        chosen = random.below(len(copies))
        if random.below(2):
            chosen = min(chosen, random.below(len(copies)), key=lambda i: s.quotas[copies[i][0]][copies[i][1]])
        rank, expert = copies.pop(chosen)
        move(p, s, expert, rank, p.homes[expert], s.quotas[rank][expert])
        if random.below(2) and p.kinds[rank][expert] != PINNED:
            barred.append((rank, expert, p.kinds[rank][expert]))
            p.kinds[rank][expert] = NONE
    return barred


def search(p: LimitProblem, start: Spread, most: int, tries: int, polish: int) -> Spread:
    """The best plan found from a start."""
    random, best = Random(), start.copy()
    fill(p, best, most, near_first=True, large=False)
    now, least = best, score(p, best, most)
    current = least
    while (tries if least[0] > 0 else polish) > 0:
        if least[0] > 0:
            tries -= 1
        else:
            polish -= 1
        following = now.copy()
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
    """False where certainly no plan keeps the limit: even with the largest experts in every slot, each as often as
    there are ranks, the room of a node, or of all ranks, takes less than what is over."""
    joined = p.far >= 0 or any(
        kind != NONE and p.homes[expert] // p.node != rank // p.node
        for rank, of_rank in enumerate(p.kinds)
        for expert, kind in enumerate(of_rank)
    )
    size = p.ranks if joined else p.node
    for first in range(0, p.ranks, size):
        over = room = 0
        for rank in range(first, min(first + size, p.ranks)):
            over += max(loads[rank] - most, 0)
            if loads[rank] >= most:
                continue
            of_rank = p.kinds[rank]
            pinned = [total for kind, total in zip(of_rank, p.totals, strict=True) if kind == PINNED]
            free = sorted((t for kind, t in zip(of_rank, p.totals, strict=True) if kind in (MAY, HELD)), reverse=True)
            room += min(sum(pinned) + sum(free[: max(p.slots - len(pinned), 0)]), most - loads[rank])
        if over > room:
            return False
    return True


def keep(p: LimitProblem, start: Spread, most: int, tries: int, fewer: int, polish: int) -> Spread:
    """A plan that keeps the limit, or is least over it."""
    loads = p.home_loads()
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
