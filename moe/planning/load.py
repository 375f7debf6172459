"""The load of an MoE layer's busiest rank, with which planners predict times, from the routers' counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe.chunk_plan import FP32, WHOLE, LayerLoad, stored_fields
from moe.experts.sizes import BLOCK_ROWS
from moe.placement_map import PlacementMap


@dataclass(frozen=True)
class Ran:
    """The measured load of a layer, as means over its calls.

    `assignments`, `token_rows`: of the busiest rank. `away_rows`: token rows exchanged with other ranks, on the busiest
    rank. `expert_assignments`: of the busiest expert on one rank. `fetched`: replicas whose weights a rank fetched.
    `returned`: replica gradients that a rank returned.
    """

    assignments: float
    expert_assignments: float
    token_rows: float
    away_rows: float
    fetched: float
    returned: float


@dataclass(frozen=True)
class Shape:
    """Constant sizes of a layer on one rank, and the distribution of its experts over ranks."""

    tokens: int  # of one call on one rank, including those of its expert tensor parallel peers
    num_experts: int  # of the layer
    num_ranks: int  # of the expert parallel group
    top_k: int
    hidden_size: int
    width: int  # F of this rank's shard of an expert
    gated: bool
    element_size: int
    whole: bool = False  # an expert computes all token rows of a chunk at once, as on a GPU
    tiled: bool = False  # see LayerLoad
    block_rows: int | None = None  # see Slab
    replica_slots: int = 0  # replicas of experts that a rank may hold
    expert_numel: int = 0  # parameters of one expert on this rank

    def as_key(self) -> dict[str, Any]:
        """Return this shape as a dict with the field names under which measured costs are cached."""
        return stored_fields(self, {"replica_slots": "slots", "expert_numel": "expert_numbers"})

    def at_primaries(self, counts: Sequence[float], placement: PlacementMap, kept: float = 1.0) -> LayerLoad:
        """Return the load of a call whose experts are computed on their primary ranks.

        `counts`: tokens per expert, of any number of calls, as only their ratio matters. `kept`: the share of
        assignments that is not dropped.
        """
        total = sum(counts)
        scale = kept * self.tokens * self.num_ranks * self.top_k / total if total else 0.0
        of_ranks = [placement.experts_of(rank) for rank in range(self.num_ranks)]
        assignments = [scale * sum(counts[expert] for expert in experts) for experts in of_ranks]
        # token rows that this rank sends to each rank
        sent = [self._unique(of_rank / self.num_ranks) for of_rank in assignments]
        token_rows = max(sum(sent), self.num_ranks * max(sent))
        away = math.ceil(token_rows) * (self.num_ranks - 1) / self.num_ranks
        of_expert = scale * max(counts, default=0.0)
        return self.placed(Ran(max(assignments), of_expert, token_rows, away, 0.0, 0.0))

    def even(self, kept: float = 1.0) -> LayerLoad:
        """Return the load if all experts get equal numbers of tokens; `kept`: share of assignments not dropped."""
        return self.at_primaries([1.0] * self.num_experts, PlacementMap(self.num_experts, self.num_ranks), kept)

    def placed(self, ran: Ran) -> LayerLoad:
        """Return the load of a call from the measured numbers `ran`; experts may have replicas."""
        grad_size = max(self.element_size, FP32) if self.block_rows is None else self.element_size
        return LayerLoad(
            tokens=self.tokens,
            token_rows=math.ceil(ran.token_rows),
            away_rows=math.ceil(ran.away_rows),
            assignments=math.ceil(ran.assignments),
            hidden_size=self.hidden_size,
            hidden_columns=self.width * (2 if self.gated else 1),
            width=self.width,
            element_size=self.element_size,
            expert_assignments=math.ceil(ran.expert_assignments),
            tiled=self.tiled,
            block=self.block_rows or (WHOLE if self.whole else BLOCK_ROWS),
            replica_numbers=self.replica_slots * self.expert_numel,
            fetched_bytes=math.ceil(ran.fetched * self.expert_numel * self.element_size),
            returned_bytes=math.ceil(ran.returned * self.expert_numel * grad_size),
        )

    def _unique(self, assignments: float) -> float:
        """Return the expected number of tokens that a rank sends to one rank for `assignments` of its assignments.

        A token with two experts on the receiving rank is sent once. The result is exact for even counts (`top_k`
        experts are drawn without replacement). For uneven counts a busier rank is treated as if it had more experts.
        """
        if self.block_rows is not None or not self.tokens:  # in blocks each assignment has a row of its own
            return assignments
        there = self.num_experts * assignments / (self.tokens * self.top_k)  # in experts with the mean load
        none = 1.0
        for drawn in range(self.top_k):
            none *= max(0.0, self.num_experts - there - drawn) / (self.num_experts - drawn)
        return self.tokens * (1.0 - none)
