"""Published planners of expert placement that are no policies of a run, and the table of all."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planners.eplb import eplb
from benchmarks.planners.moonep import moonep
from benchmarks.planners.quota import quota
from benchmarks.planners.shadowing import shadowing
from moe.placement.planners.published import flex, least_loaded
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, QuotaPlanner, ReplicaLimits, at_primaries
from moe.placement_map import Integers, PlacementMap


@dataclass(frozen=True)
class Entry:
    """A planner, and what its system does with the copies."""

    plan: QuotaPlanner
    keeps: bool = False  # copies serve the whole step; else each is sent for a forward and again for its backward pass
    own_slots: bool = False  # it takes the slots that it needs, whatever the limit


def static(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Every expert is computed at its home."""
    return at_primaries(counts_RE, placement)


PLANNERS = {
    "static": Entry(static, keeps=True),
    "shadowing": Entry(shadowing),
    "eplb": Entry(eplb),
    "moonep": Entry(moonep, own_slots=True),
    "least_loaded": Entry(least_loaded),
    "quota": Entry(quota),
    "flex": Entry(flex, keeps=True),
    "solve": Entry(solve, keeps=True),
}
