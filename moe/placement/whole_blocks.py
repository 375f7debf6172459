"""Placement plans in whole blocks: which rank computes each block of a source rank's assignments of an expert.

If sums must be bitwise equal for every plan, a block is computed and added as a whole. A plan of assignments that keeps
the limit on load may exceed it after rounding to blocks. `within_limit` therefore moves and exchanges blocks, to
existing and new replicas, while this lowers the excess. If that is not enough, replicas are removed at random and the
ranks are filled again, as in `moe.placement.planners.limit`. Finally a small number of blocks is searched exhaustively.
Shapes: R ranks, D chunks of a call, E experts, B blocks, A blocks of one rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from moe.placement.planners.limit import Random
from moe.placement.planners.published import may_hold
from moe.placement.quotas import Costs, ReplicaLimits, held, interleave, shares
from moe.placement_map import Integers, PlacementMap


def num_blocks(counts: Integers, block_rows: int) -> Integers:
    """Return the number of blocks (of at most `block_rows` assignments) for each number of assignments in `counts`."""
    return -(-counts // block_rows)


def in_blocks(quotas_ER: Integers, blocks_E: Integers) -> Integers:
    """Convert quotas of assignments to quotas of blocks [E, R] in the same ratio; `blocks_E`: blocks of each expert.

    Blocks that remain after rounding down are assigned to the ranks with the largest remainders.
    """
    totals_E = np.maximum(quotas_ER.sum(1), 1)[:, None]
    whole_ER, rest_ER = np.divmod(quotas_ER * blocks_E[:, None], totals_E)
    left_E = blocks_E - whole_ER.sum(1)
    by_rest = np.argsort(-rest_ER, axis=1, kind="stable")
    extra = np.arange(quotas_ER.shape[1]) < left_E[:, None]
    np.add.at(whole_ER, (np.arange(len(quotas_ER))[:, None], by_rest), extra)
    return whole_ER


@dataclass(frozen=True)
class BlockLayout:
    """All blocks of a call, each with the rank that computes it, sorted by source rank, expert, chunk and token."""

    sources: Integers  # [B]
    experts: Integers  # [B]
    chunks: Integers  # [B]
    sizes: Integers  # [B] assignments
    ranks: Integers  # [B] the rank that computes each block

    def of_source(self, rank: int) -> tuple[Integers, Integers, Integers]:
        """Return (experts, computing ranks, sizes) of the blocks of a rank's own tokens."""
        own = slice(*np.searchsorted(self.sources, [rank, rank + 1]))
        return self.experts[own], self.ranks[own], self.sizes[own]

    def loads_R(self, num_ranks: int) -> Integers:
        """Return the number of assignments that each rank computes: [R]."""
        return np.bincount(self.ranks, self.sizes, num_ranks).astype(np.int64)

    def quotas_ER(self, num_experts: int, num_ranks: int) -> Integers:
        """Return the number of blocks of each expert that each rank computes: [E, R]."""
        found = np.bincount(self.experts * num_ranks + self.ranks, minlength=num_experts * num_ranks)
        return found.reshape(num_experts, num_ranks).astype(np.int64)

    def ranks_in_order(self, expert: int) -> list[int]:
        """Return the rank that computes each block of an expert, in the order in which gradients are added.

        This order is by chunk, source rank and token.
        """
        of_expert = np.flatnonzero(self.experts == expert)
        in_order = of_expert[np.argsort(self.chunks[of_expert], kind="stable")]
        return [int(rank) for rank in self.ranks[in_order]]


def assign(counts_RDE: Integers, quotas_ER: Integers, block_rows: int, ranks_per_node: int) -> BlockLayout:
    """Assign a rank to each block, so that every rank gets its quota of blocks.

    A quota is filled with the blocks of the rank's own tokens first, then with those of its node.
    """
    num_ranks, num_chunks, num_experts = counts_RDE.shape
    counts_RED = counts_RDE.swapaxes(1, 2)
    blocks_RED = num_blocks(counts_RED, block_rows)
    cells = np.repeat(np.arange(blocks_RED.size), blocks_RED.reshape(-1))
    is_last = np.append(cells[1:] != cells[:-1], True)[: len(cells)]
    sizes = np.where(is_last, (counts_RED.reshape(-1)[cells] - 1) % block_rows + 1, block_rows)
    blocks_RE, ranks = blocks_RED.sum(2), []
    for source in range(num_ranks):
        shares_ER = shares(blocks_RE, quotas_ER, ranks_per_node, source)
        of_source = np.repeat(np.nonzero(shares_ER)[1], shares_ER[np.nonzero(shares_ER)])
        interleave(of_source, shares_ER)
        ranks.append(of_source)
    sources, rest = np.divmod(cells, num_experts * num_chunks)
    experts, chunks = np.divmod(rest, num_chunks)
    return BlockLayout(sources, experts, chunks, sizes, np.concatenate(ranks))


TRIES = 300
FEW = 400  # blocks up to which TRIES tries run; with more blocks a try takes longer, and fewer run
NODES = 20_000  # limit on the nodes of the exhaustive search
MOST_PAIRS = 1_000_000  # limit on the pairs of blocks that are considered for an exchange


def within_limit(
    blocks: BlockLayout, placement: PlacementMap, costs: Costs, limits: ReplicaLimits, reachable: bool
) -> BlockLayout:
    """Return a layout with at most `limits.most` assignments per rank or, if none is found, with the least excess.

    `reachable`: whether a plan of single assignments keeps the limit; if not, there is no random search.
    """
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
    """State of the search: the rank of each block, and the load and number of blocks of each rank."""

    def __init__(self, blocks: BlockLayout, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> None:
        assert limits.most is not None
        self.sizes, self.experts, self.limits, self.most = blocks.sizes, blocks.experts, limits, limits.most
        self.shape = placement.num_experts, placement.num_ranks
        self.primaries_E = placement.primary_ranks
        self.pinned_ER = np.zeros(self.shape, dtype=bool)
        for expert, rank in limits.pinned:
            self.pinned_ER[expert, rank] = True
        self.is_primary_ER = placement.is_primary_ER
        self.always_ER = self.pinned_ER | self.is_primary_ER
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
        """Return bool [E, R]: whether a rank has an expert, or may get it in a free replica slot."""
        taken_R = ((self.num_ER > 0) & ~self.always_ER).sum(0) + self.pinned_ER.sum(0)
        return self.always_ER | (self.num_ER > 0) | (self.may_ER & (taken_R < self.limits.replica_slots))

    def move(self, block: int, rank: int) -> None:
        before, expert, size = self.ranks[block], self.experts[block], self.sizes[block]
        self.num_ER[expert, before] -= 1
        self.num_ER[expert, rank] += 1
        self.loads_R[before] -= size
        self.loads_R[rank] += size
        self.ranks[block] = rank

    def fill(self) -> None:
        """Move or exchange blocks of ranks above the limit as long as this lowers the total excess."""
        while True:
            over = np.flatnonzero(self.loads_R > self.most)
            in_order = over[np.argsort(-self.loads_R[over], kind="stable")]
            if not any(self._relieve(int(rank)) for rank in in_order):
                return

    def _relieve(self, rank: int) -> bool:
        """Move the block of `rank` that lowers the excess most, or else exchange two; return False if nothing helps."""
        most, open_ER = self.most, self.open_ER()
        over, own_A = self.loads_R[rank] - most, np.flatnonzero(self.ranks == rank)
        _, first = np.unique(np.stack([self.experts[own_A], self.sizes[own_A]]), axis=1, return_index=True)
        own_A = own_A[first]  # one of equal blocks
        sizes_A, to_AR = self.sizes[own_A, None], open_ER[self.experts[own_A]]
        gain_AR = np.minimum(sizes_A, over) - np.maximum(self.loads_R + sizes_A - most, 0)
        gain_AR = np.where(to_AR, gain_AR, 0)
        gain_AR[:, rank] = 0
        has_AR = (self.num_ER > 0)[self.experts[own_A]]
        if gain_AR.max() > 0:
            best = np.unravel_index((2 * gain_AR + (has_AR & (gain_AR > 0))).argmax(), gain_AR.shape)
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
        """Return a rank for each block [B] so that no rank exceeds the limit, by exhaustive search, large blocks first.

        Returns None if no solution exists, or none is found in the first `NODES` nodes of the search tree.
        """
        order = np.lexsort((self.experts, -self.sizes)).tolist()
        experts, sizes = self.experts[order].tolist(), self.sizes[order].tolist()
        headroom = [self.most] * self.shape[1]
        free_slots = (self.limits.replica_slots - self.pinned_ER.sum(0)).tolist()
        always, may = self.always_ER.tolist(), self.may_ER.tolist()
        num: Counter[tuple[int, int]] = Counter()
        chosen = [-1] * len(order)  # the rank of each block so far
        level = nodes = 0
        while 0 <= level < len(order) and nodes < NODES:
            nodes += 1
            expert, size, rank = experts[level], sizes[level], chosen[level]
            if rank >= 0:  # undo this choice
                headroom[rank] += size
                num[expert, rank] -= 1
                free_slots[rank] += not always[expert][rank] and num[expert, rank] == 0
            elif level > 0 and (experts[level - 1], sizes[level - 1]) == (expert, size):
                rank = chosen[level - 1] - 1  # equal blocks in the order of ranks
            for target in range(rank + 1, len(headroom)):
                takes = not always[expert][target] and num[expert, target] == 0
                if headroom[target] >= size and (not takes or (free_slots[target] > 0 and may[expert][target])):
                    headroom[target] -= size
                    num[expert, target] += 1
                    free_slots[target] -= takes
                    chosen[level] = target
                    level += 1
                    break
            else:
                chosen[level] = -1
                level -= 1
        if level < len(order):
            return None
        ranks_B = np.empty(len(order), dtype=np.int64)
        ranks_B[order] = chosen
        return ranks_B

    def remove(self, random: Random) -> list[tuple[int, int]]:
        """Remove up to 2 random replicas, move 1 to 3 random blocks; return (expert, rank) of replicas now barred."""
        replicas = np.argwhere((self.num_ER > 0) & ~self.is_primary_ER)
        barred: list[tuple[int, int]] = []
        for _ in range(random.below(3)):
            if len(replicas):
                expert, rank = (int(each) for each in replicas[random.below(len(replicas))])
                for each in np.flatnonzero((self.experts == expert) & (self.ranks == rank)):
                    self.move(int(each), int(self.primaries_E[expert]))
                if random.below(2) and self.may_ER[expert, rank]:
                    self.may_ER[expert, rank] = False
                    barred.append((expert, rank))
        for _ in range(1 + random.below(3)):
            block = random.below(len(self.ranks))
            ranks = np.flatnonzero(self.open_ER()[self.experts[block]])
            self.move(block, int(ranks[random.below(len(ranks))]))
        return barred
