"""Plans in whole blocks: which rank computes each block of a source rank's assignments of an expert.

Where sums are to be the same bits whatever the plan, a block is computed and added as a whole. Shapes: R ranks, D
chunks of a call, E experts, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe.placement.quotas import interleave, shares
from moe.placement_map import Integers


def num_blocks(counts: Integers, block_rows: int) -> Integers:
    """How many blocks so many assignments make."""
    return -(-counts // block_rows)


def in_blocks(quotas_ER: Integers, blocks_E: Integers) -> Integers:
    """quotas_ER of blocks in the ratio of quotas of assignments: what is left of an expert's blocks goes to the ranks
    with the largest rests."""
    totals_E = np.maximum(quotas_ER.sum(1), 1)[:, None]
    whole_ER, rest_ER = np.divmod(quotas_ER * blocks_E[:, None], totals_E)
    left_E = blocks_E - whole_ER.sum(1)
    by_rest = np.argsort(-rest_ER, axis=1, kind="stable")
    extra = np.arange(quotas_ER.shape[1]) < left_E[:, None]
    np.add.at(whole_ER, (np.arange(len(quotas_ER))[:, None], by_rest), extra)
    return whole_ER


@dataclass(frozen=True)
class BlockLayout:
    """All blocks of a call, by source rank, expert and chunk, in the order of their tokens."""

    sources: Integers  # [B]
    experts: Integers  # [B]
    chunks: Integers  # [B]
    sizes: Integers  # [B] assignments
    ranks: Integers  # [B] that compute them

    def of_source(self, rank: int) -> tuple[Integers, Integers, Integers]:
        """(experts, ranks, sizes) of the blocks of a rank's own tokens."""
        part = slice(*np.searchsorted(self.sources, [rank, rank + 1]))
        return self.experts[part], self.ranks[part], self.sizes[part]

    def loads_R(self, num_ranks: int) -> Integers:
        """Assignments that each rank computes."""
        return np.bincount(self.ranks, self.sizes, num_ranks).astype(np.int64)

    def quotas_ER(self, num_experts: int, num_ranks: int) -> Integers:
        """How many blocks of each expert each rank computes."""
        found = np.bincount(self.experts * num_ranks + self.ranks, minlength=num_experts * num_ranks)
        return found.reshape(num_experts, num_ranks).astype(np.int64)

    def turns(self, expert: int) -> list[int]:
        """The rank that computes each block of an expert, in the order in which their gradients are added: by chunk,
        source rank and tokens."""
        of_expert = np.flatnonzero(self.experts == expert)
        in_order = of_expert[np.argsort(self.chunks[of_expert], kind="stable")]
        return [int(rank) for rank in self.ranks[in_order]]


def assign(counts_RDE: Integers, quotas_ER: Integers, block_rows: int, ranks_per_node: int) -> BlockLayout:
    """Each block's rank, so that every rank gets its quota of blocks: own blocks stay as far as it lasts, then those of
    its node."""
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
