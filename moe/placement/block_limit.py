"""Whole blocks within a limit: which rank computes each, where a rank may compute only so many assignments.

A plan of assignments keeps the limit, its blocks need not: they are computed as a whole. So blocks are moved and
exchanged as long as that brings less above the limit, over the copies that are there and over new ones. Where it is not
enough, copies are taken out at random and the rest is filled again, as in `moe.placement.planners.limit`; few blocks
are then searched through. Shapes: R ranks, E experts, B blocks, A blocks of one rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from moe.placement.planners.instances import may_hold
from moe.placement.planners.limit import Random
from moe.placement.quotas import CopyLimits, Costs, held
from moe.placement.whole_blocks import BlockLayout
from moe.placement_map import Integers, PlacementMap

TRIES = 300
FEW = 400  # blocks up to which there are as many; with more, each try takes longer, and there are fewer
NODES = 20_000  # of the tree in which few blocks are searched through
MOST_PAIRS = 1_000_000  # of blocks that are looked at for an exchange


def within(
    blocks: BlockLayout, placement: PlacementMap, costs: Costs, limits: CopyLimits, reachable: bool
) -> BlockLayout:
    """The blocks with ranks that keep `limits.most`, or are less over it. reachable: whether a plan that need not keep
    blocks whole keeps it; else copies are not searched for."""
    state = _State(blocks, placement, costs, limits)
    state.fill()
    best, least = state.ranks.copy(), state.over()
    random, tries = Random(), TRIES * reachable * FEW // max(FEW, len(blocks.ranks))
    now, current = best, least
    while least > 0 and tries > 0:
        tries -= 1
        state.set(now)
        barred = state.remove(random)
        state.fill()
        for expert, rank in barred:
            state.may_ER[expert, rank] = True
        if (found := state.over()) <= current or random.below(8) == 0:
            now, current = state.ranks.copy(), found
        if found < least:
            best, least = state.ranks.copy(), found
    if least > 0 and reachable and (found_B := state.exactly()) is not None:
        best = found_B
    return replace(blocks, ranks=best)


class _State:
    """Where blocks are."""

    def __init__(self, blocks: BlockLayout, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> None:
        assert limits.most is not None
        self.sizes, self.experts, self.limits, self.most = blocks.sizes, blocks.experts, limits, limits.most
        self.shape = placement.num_experts, placement.num_ranks
        self.homes_E = placement.home_ranks
        self.pinned_ER = np.zeros(self.shape, dtype=bool)
        for expert, rank in limits.pinned:
            self.pinned_ER[expert, rank] = True
        self.always_ER = self.pinned_ER.copy()
        self.always_ER[np.arange(len(self.homes_E)), self.homes_E] = True
        self.may_ER = may_hold(placement, costs, limits) | held(placement)
        self.set(blocks.ranks)

    def set(self, ranks_B: Integers) -> None:
        self.ranks = ranks_B.copy()
        experts, ranks = self.shape
        self.loads_R = np.bincount(self.ranks, self.sizes, ranks).astype(np.int64)
        self.num_ER = np.bincount(self.experts * ranks + self.ranks, minlength=experts * ranks).reshape(self.shape)

    def over(self) -> int:
        return int(np.maximum(self.loads_R - self.most, 0).sum())

    def open_ER(self) -> np.ndarray:
        """bool [E, R]: where an expert's blocks may go."""
        taken_R = ((self.num_ER > 0) & ~self.always_ER).sum(0) + self.pinned_ER.sum(0)
        return self.always_ER | (self.num_ER > 0) | (self.may_ER & (taken_R < self.limits.slots))

    def move(self, block: int, rank: int) -> None:
        before, expert, size = self.ranks[block], self.experts[block], self.sizes[block]
        self.num_ER[expert, before] -= 1
        self.num_ER[expert, rank] += 1
        self.loads_R[before] -= size
        self.loads_R[rank] += size
        self.ranks[block] = rank

    def fill(self) -> None:
        """Move and exchange blocks of ranks above the limit as long as that helps."""
        while True:
            over = np.flatnonzero(self.loads_R > self.most)
            in_order = over[np.argsort(-self.loads_R[over], kind="stable")]
            if not any(self._relieve(int(rank)) for rank in in_order):
                return

    def _relieve(self, rank: int) -> bool:
        """The move that brings the most; else the exchange."""
        most, open_ER = self.most, self.open_ER()
        over, own_A = self.loads_R[rank] - most, np.flatnonzero(self.ranks == rank)
        _, first = np.unique(np.stack([self.experts[own_A], self.sizes[own_A]]), axis=1, return_index=True)
        own_A = own_A[first]  # of equal ones, one
        sizes_A, to_AR = self.sizes[own_A, None], open_ER[self.experts[own_A]]
        gain_AR = np.minimum(sizes_A, over) - np.maximum(self.loads_R + sizes_A - most, 0)
        gain_AR = np.where(to_AR, gain_AR, 0)
        gain_AR[:, rank] = 0
        there_AR = (self.num_ER > 0)[self.experts[own_A]]
        if gain_AR.max() > 0:
            best = np.unravel_index((2 * gain_AR + (there_AR & (gain_AR > 0))).argmax(), gain_AR.shape)
            self.move(int(own_A[best[0]]), int(best[1]))
            return True
        others = np.flatnonzero((self.ranks != rank) & open_ER[self.experts, rank])[: MOST_PAIRS // len(own_A)]
        if not len(others):
            return False
        less = sizes_A - self.sizes[others]
        gain = np.minimum(less, over) - np.maximum(self.loads_R[self.ranks[others]] + less - most, 0)
        gain = np.where(to_AR[:, self.ranks[others]], gain, 0)
        if gain.max() <= 0:
            return False
        best = np.unravel_index(gain.argmax(), gain.shape)
        block, other = int(own_A[best[0]]), int(others[best[1]])
        target = int(self.ranks[other])
        self.move(other, rank)
        self.move(block, target)
        return True

    def exactly(self) -> Integers | None:
        """Ranks that keep the limit, found by trying all of them, the largest blocks first; None where there are none,
        or not among the first `NODES`."""
        order = np.lexsort((self.experts, -self.sizes)).tolist()
        experts, sizes = self.experts[order].tolist(), self.sizes[order].tolist()
        room = [self.most] * self.shape[1]
        slots = (self.limits.slots - self.pinned_ER.sum(0)).tolist()
        always, may = self.always_ER.tolist(), self.may_ER.tolist()
        num: Counter[tuple[int, int]] = Counter()
        places = [-1] * len(order)  # the rank of each block so far
        level = nodes = 0
        while 0 <= level < len(order) and nodes < NODES:
            nodes += 1
            expert, size, rank = experts[level], sizes[level], places[level]
            if rank >= 0:  # take it back
                room[rank] += size
                num[expert, rank] -= 1
                slots[rank] += not always[expert][rank] and num[expert, rank] == 0
            elif level > 0 and (experts[level - 1], sizes[level - 1]) == (expert, size):
                rank = places[level - 1] - 1  # equal blocks in the order of ranks
            for target in range(rank + 1, len(room)):
                takes = not always[expert][target] and num[expert, target] == 0
                if room[target] >= size and (not takes or (slots[target] > 0 and may[expert][target])):
                    room[target] -= size
                    num[expert, target] += 1
                    slots[target] -= takes
                    places[level] = target
                    level += 1
                    break
            else:
                places[level] = -1
                level -= 1
        if level < len(order):
            return None
        ranks_B = np.empty(len(order), dtype=np.int64)
        ranks_B[order] = places
        return ranks_B

    def remove(self, random: Random) -> list[tuple[int, int]]:
        """Send copies home, and single blocks elsewhere; (expert, rank) of copies that are barred for now."""
        copies = np.argwhere((self.num_ER > 0) & (np.arange(self.shape[1]) != self.homes_E[:, None]))
        barred: list[tuple[int, int]] = []
        for _ in range(random.below(3)):
            if len(copies):
                expert, rank = (int(each) for each in copies[random.below(len(copies))])
                for each in np.flatnonzero((self.experts == expert) & (self.ranks == rank)):
                    self.move(int(each), int(self.homes_E[expert]))
                if random.below(2) and self.may_ER[expert, rank]:
                    self.may_ER[expert, rank] = False
                    barred.append((expert, rank))
        for _ in range(1 + random.below(3)):
            block = random.below(len(self.ranks))
            ranks = np.flatnonzero(self.open_ER()[self.experts[block]])
            self.move(block, int(ranks[random.below(len(ranks))]))
        return barred
