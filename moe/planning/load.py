"""From the routers' counts to the load of the busiest rank, which planners plan for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe.experts.sizes import BLOCK_ROWS
from moe.placement.map import PlacementMap
from moe.schedule.chunk_plan import WHOLE, LayerLoad


@dataclass(frozen=True)
class Shape:
    """What does not change of a layer: sizes on one rank, and how its experts are spread."""

    tokens: int  # of one call on one rank, with those of its expert tensor peers
    num_experts: int  # of the layer
    num_ranks: int  # that share them
    top_k: int
    hidden_size: int
    width: int  # F of this rank's part of an expert
    gated: bool
    element_size: int
    whole: bool = False  # an expert computes all rows of a chunk at once, as on a GPU
    tiled: bool = False  # see LayerLoad
    block_rows: int | None = None  # see Weights

    def load(self, counts: Sequence[float]) -> LayerLoad:
        """The load of a call from the tokens that each expert gets, on any scale: one call's, or a whole step's."""
        total = sum(counts)
        scale = self.tokens * self.num_ranks * self.top_k / total if total else 0.0
        experts_of = PlacementMap(self.num_experts, self.num_ranks).experts_of
        of_ranks = [experts_of(rank) for rank in range(self.num_ranks)]
        assignments = [scale * sum(counts[expert] for expert in experts) for experts in of_ranks]
        # rows of this rank's tokens for each
        sent = [self._unique(of_rank / self.num_ranks) for of_rank in assignments]
        received = [self.num_ranks * rows for rows in sent]
        rows = max(sum(sent), max(received))
        return LayerLoad(
            tokens=self.tokens,
            rows=math.ceil(rows),
            away_rows=math.ceil(rows * (self.num_ranks - 1) / self.num_ranks),
            assignments=math.ceil(max(assignments)),
            hidden_size=self.hidden_size,
            hidden_columns=self.width * (2 if self.gated else 1),
            width=self.width,
            element_size=self.element_size,
            expert_assignments=math.ceil(scale * max(counts, default=0.0)),
            tiled=self.tiled,
            block=self.block_rows or (WHOLE if self.whole else BLOCK_ROWS),
        )

    def even(self) -> LayerLoad:
        """The load where every expert gets as many tokens."""
        return self.load([1.0] * self.num_experts)

    def _unique(self, assignments: float) -> float:
        """How many of one rank's tokens go to a rank that gets `assignments` of their assignments: a token with two
        experts there goes once.

        Right for even counts (drawing `top_k` of the experts without putting back); for others, as if the busier rank
        had more of the experts.
        """
        if self.block_rows is not None or not self.tokens:  # blocks' assignments have rows of their own
            return assignments
        there = self.num_experts * assignments / (self.tokens * self.top_k)  # that many experts' worth
        none = 1.0
        for drawn in range(self.top_k):
            none *= max(0.0, self.num_experts - there - drawn) / (self.num_experts - drawn)
        return self.tokens * (1.0 - none)
