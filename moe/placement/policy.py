"""Which planner places a layer's experts, and what it reckons with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs import derived
from configs.schema import Config
from moe.placement.planners.flex import flex
from moe.placement.planners.least_loaded import least_loaded
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, QuotaPlanner
from moe.placement_map import Integers, PlacementMap

POLICIES: Mapping[str, QuotaPlanner] = {
    "flex": flex,
    "least_loaded": least_loaded,
    "solve": solve,
    "auto": solve,
}
LEAST_GAIN = 0.02  # of the mean rank's work, for which auto has copies
# Where nothing was measured. A copy's weights, and its gradients in fp32, against an assignment's six products: all
# grow with the expert's size. A card with weights of 2 bytes at 400 TFLOP/s, 400 GB/s inside a node and 50 between
# nodes; a host with weights of 4 bytes at 50 GFLOP/s and 2 GB/s.
ASSUMED = {
    "cuda": Costs(piece=64, copy_in_node=350, copy_between=2650, grad_in_node=700, grad_between=5300),
    "cpu": Costs(piece=8, copy_in_node=16, copy_between=128, grad_in_node=16, grad_between=128),
}


@dataclass(frozen=True)
class Policy:
    """How all MoE layers place their experts."""

    planner: QuotaPlanner | None  # None: every expert is computed at its home
    costs: Costs
    extra_slots: int  # copies that a rank may hold of a layer
    block_rows: int | None  # see `moe.experts.weights.Weights`
    max_load: float | None = None  # see `LayerPlacement`
    chooses: bool = False  # step by step whether experts are copied at all, see `pays`


def policy_of(config: Config, device: str) -> Policy | None:
    """What a config asks for; None where every expert is computed at its home, as ever. `device` is "cpu" or "cuda"."""
    asked = config.moe.placement
    block_rows = derived.block_rows(config)
    if derived.places_experts(config):
        chooses = asked.policy == "auto"
        planner = POLICIES[asked.policy]
        return Policy(planner, ASSUMED[device], asked.extra_slots, block_rows, asked.max_load, chooses)
    return Policy(None, ASSUMED[device], 0, block_rows) if block_rows is not None else None


def pays(tokens_E: Integers, placement: PlacementMap, costs: Costs) -> bool:
    """Whether a step like one that sent so many tokens to each expert is to have copies: even the gain of perfect
    balance must be worth a copy, and be no trifle."""
    loads_R = np.bincount(placement.home_ranks, tokens_E, placement.num_ranks)
    gain = loads_R.max() - loads_R.mean()
    copy = costs.of_call(trains=True).copy_in_node
    return bool(gain > max(2 * copy, LEAST_GAIN * loads_R.mean()))
