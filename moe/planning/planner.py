"""How an MoE layer runs best: measured costs and a load go in, a plan and its prediction come out.

Pure, no processes. A plan's time follows from its schedule, operation by operation (timing.py), with what a plain
startup-plus-rate model leaves out: the host's work per chunk, and how much computation and communication slow each
other down. What whole passes, run in a few numbers of chunks, take beyond that (caches that operations alone find warm,
ranks that wait for each other) is added as it was measured. After PipeMoE (Shi et al., INFOCOM 2023) and MPipeMoE
(Zhang et al., IPDPS 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe.chunk_plan import LayerLoad, PassPlan, Plan
from moe.planning.costs import Decision, LayerCosts, Limits
from moe.planning.search import CLOSE, best_plan, close_plans, memory_bytes, total

# Loads are rounded up to 1/32 of a power of two, at most 3%, so that drifting counts find old decisions.
STEPS_PER_DOUBLING = 32


class Planner:
    """Decides for one layer, again whenever its load has drifted to where nothing was decided yet (MPipeMoE's adaptive
    granularity).

    A decision depends on the load and on what `learn` was told, not on earlier ones: so ranks that plan with the same
    numbers decide alike. It is that of the load rounded up, at most 1/STEPS_PER_DOUBLING more: what fits the memory
    budget rounded up fits it.
    """

    def __init__(self, costs: LayerCosts, limits: Limits | None = None) -> None:
        self.costs, self.limits = costs, limits or Limits()
        self.num_decisions = self.num_solved = 0  # asked for; not found among earlier ones
        self._decisions: dict[LayerLoad, Decision] = {}
        self._factors: dict[PassPlan, float] = {}

    def decide(self, load: LayerLoad) -> Decision:
        """The best plan, with the model's prediction for the rounded load. Raises ValueError as `best_plan` does."""
        rounded = rounded_up(load)
        decision = self._decisions.get(rounded)
        if decision is None:
            decision = self._decisions[rounded] = best_plan(self.costs, rounded, self.limits, self._factors)
            self.num_solved += 1
        self.num_decisions += 1
        return decision

    def close(self, load: LayerLoad, within: float = CLOSE) -> list[Decision]:
        """That and what might be as fast, see `close_plans`."""
        return close_plans(self.costs, rounded_up(load), self.limits, self._factors, within)

    def fits(self, plan: Plan, load: LayerLoad) -> bool:
        """Whether a plan fits the memory budget with this load."""
        limits = self.limits
        return (
            limits.memory_budget is None
            or limits.slot_bytes + memory_bytes(rounded_up(load), plan, limits.live_calls) <= limits.memory_budget
        )

    def expected(self, decision: Decision) -> float:
        """The score of both passes after what `learn` was told."""
        return total(decision, self._factors)

    def learn(self, factors: Mapping[PassPlan, float]) -> None:
        """What these passes took by what was predicted, where others are taken to take just that."""
        self._factors = dict(factors)
        self._decisions.clear()


def rounded_up(load: LayerLoad) -> LayerLoad:
    """The load with its counts rounded up, so that loads that hardly differ are one."""
    counts = ("tokens", "rows", "away_rows", "assignments", "expert_assignments", "fetched_bytes", "returned_bytes")
    rounded: dict[str, Any] = {name: _rounded_up(getattr(load, name)) for name in counts}
    return replace(load, **rounded)


def _rounded_up(count: int) -> int:
    step = (1 << max(count - 1, 1).bit_length() - 1) // STEPS_PER_DOUBLING
    return count if step <= 1 else -(-count // step) * step
