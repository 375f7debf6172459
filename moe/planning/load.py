"""From the routers' counts to the load of the busiest rank, which planners plan for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe.chunk_plan import FP32, WHOLE, LayerLoad
from moe.experts.sizes import BLOCK_ROWS
from moe.placement_map import PlacementMap


@dataclass(frozen=True)
class Ran:
    """What a call of a layer came to, a mean over calls: assignments of the busiest rank and of the busiest expert on
    one rank, rows of the busiest rank and those that travel, copies whose weights came to a rank, and gradients of
    copies that left it."""

    assignments: float
    expert_assignments: float
    rows: float
    away_rows: float
    fetched: float
    returned: float


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
    block_rows: int | None = None  # see Slab
    slots: int = 0  # copies of experts that a rank may hold
    expert_numbers: int = 0  # parameters of one expert on this rank

    def at_home(self, counts: Sequence[float], homes: PlacementMap, kept: float = 1.0) -> LayerLoad:
        """The load of a call whose experts are computed at their homes, from the tokens that each expert gets, on any
        scale: one call's, or a whole step's. `kept`: the share of all assignments that is not dropped."""
        total = sum(counts)
        scale = kept * self.tokens * self.num_ranks * self.top_k / total if total else 0.0
        of_ranks = [homes.experts_of(rank) for rank in range(self.num_ranks)]
        assignments = [scale * sum(counts[expert] for expert in experts) for experts in of_ranks]
        # rows of this rank's tokens for each
        sent = [self._unique(of_rank / self.num_ranks) for of_rank in assignments]
        rows = max(sum(sent), self.num_ranks * max(sent))
        away = math.ceil(rows) * (self.num_ranks - 1) / self.num_ranks
        of_expert = scale * max(counts, default=0.0)
        return self.placed(Ran(max(assignments), of_expert, rows, away, 0.0, 0.0))

    def even(self, kept: float = 1.0) -> LayerLoad:
        """The load where every expert gets as many tokens; homes are alike then. `kept` as in `at_home`."""
        return self.at_home([1.0] * self.num_experts, PlacementMap(self.num_experts, self.num_ranks), kept)

    def placed(self, ran: Ran) -> LayerLoad:
        """The load of calls like those that ran with a placement."""
        wide = max(self.element_size, FP32)
        return LayerLoad(
            tokens=self.tokens,
            rows=math.ceil(ran.rows),
            away_rows=math.ceil(ran.away_rows),
            assignments=math.ceil(ran.assignments),
            hidden_size=self.hidden_size,
            hidden_columns=self.width * (2 if self.gated else 1),
            width=self.width,
            element_size=self.element_size,
            expert_assignments=math.ceil(ran.expert_assignments),
            tiled=self.tiled,
            block=self.block_rows or (WHOLE if self.whole else BLOCK_ROWS),
            slot_numbers=self.slots * self.expert_numbers,
            fetched_bytes=math.ceil(ran.fetched * self.expert_numbers * self.element_size),
            returned_bytes=math.ceil(
                ran.returned * self.expert_numbers * (wide if self.block_rows is None else self.element_size)
            ),
        )

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
