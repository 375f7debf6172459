"""Which planner places a layer's experts, and what it reckons with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from moe.placement.planners.flex import flex
from moe.placement.planners.least_loaded import least_loaded
from moe.placement.planners.quota import quota
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, Planner

POLICIES: Mapping[str, Planner] = {"flex": flex, "quota": quota, "least_loaded": least_loaded, "solve": solve}
# Where nothing was measured. A copy's weights and gradients against an assignment's six products, both grow with the
# expert's size: at 400 TFLOP/s, 400 GB/s inside a node and 50 between nodes; a host at 50 GFLOP/s and 2 GB/s.
ASSUMED = {
    "cuda": Costs(piece=64, copy_in_node=700, copy_between=5300),
    "cpu": Costs(piece=8, copy_in_node=32, copy_between=256),
}


@dataclass(frozen=True)
class Policy:
    """Of all MoE layers."""

    planner: Planner | None  # None: every expert is computed at its home
    costs: Costs
    extra_slots: int  # copies that a rank may hold of a layer
    block_rows: int | None  # see `moe.experts.weights.Weights`
    homes_move: bool


def policy_of(config: Config, device: str) -> Policy | None:
    """What a config asks for; None where every expert is computed at its home, as ever. `device` is "cpu" or "cuda"."""
    asked = config.moe.placement
    block_rows = derived.block_rows(config)
    if derived.places_experts(config):
        homes_move = derived.homes_move(config)
        return Policy(POLICIES[asked.policy], ASSUMED[device], asked.extra_slots, block_rows, homes_move)
    return Policy(None, ASSUMED[device], 0, block_rows, homes_move=False) if block_rows is not None else None
