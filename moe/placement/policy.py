"""The policy of expert placement: the planner of a layer and its assumed costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs import derived
from configs.schema import Config
from moe.placement.planners.published import flex, least_loaded
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, QuotaPlanner
from moe.placement_map import Integers, PlacementMap

POLICIES: Mapping[str, QuotaPlanner] = {"flex": flex, "least_loaded": least_loaded, "solve": solve, "auto": solve}
LEAST_GAIN = 0.02  # least gain, as a share of the mean rank's work, at which policy auto makes replicas
# Costs if none were measured: the time to send a replica's weights, and its gradients in fp32, divided by the time of
# an assignment's six matmuls. Both times grow with the expert's size. Assumed are a GPU with 2-byte weights,
# 400 TFLOP/s, 400 GB/s inside a node and 50 GB/s between nodes; and a host with 4-byte weights, 50 GFLOP/s and 2 GB/s.
ASSUMED = {
    "cuda": Costs(expert_overhead=64, replica_in_node=350, replica_between=2650, grad_in_node=700, grad_between=5300),
    "cpu": Costs(expert_overhead=8, replica_in_node=16, replica_between=128, grad_in_node=16, grad_between=128),
}


@dataclass(frozen=True)
class Policy:
    """Settings of expert placement for all MoE layers: planner, costs and limits on replicas."""

    planner: QuotaPlanner | None  # None: primaries compute all assignments
    costs: Costs
    extra_slots: int  # replicas of a layer's experts that a rank may hold
    block_rows: int | None  # see `moe.experts.weights.Weights`
    max_load: float | None = None  # see `LayerPlacement`
    chooses: bool = False  # whether each step decides if there are replicas, see `pays`


def policy_of(config: Config, device: str) -> Policy | None:
    """Return the placement settings of a config, or None if it uses neither replicas nor blocks.

    `device` is "cpu" or "cuda".
    """
    placement, block_rows = config.moe.placement, derived.block_rows(config)
    if derived.places_experts(config):
        planner, chooses = POLICIES[placement.policy], placement.policy == "auto"
        return Policy(planner, ASSUMED[device], placement.extra_slots, block_rows, placement.max_load, chooses)
    return Policy(None, ASSUMED[device], 0, block_rows) if block_rows is not None else None


def pays(tokens_E: Integers, placement: PlacementMap, costs: Costs) -> bool:
    """Return whether replicas save time in a step with `tokens_E` tokens per expert.

    The gain of perfect balance must exceed the cost of one replica on both of its ranks, and the share LEAST_GAIN.
    """
    loads_R = np.bincount(placement.primary_ranks, tokens_E, placement.num_ranks)
    gain = loads_R.max() - loads_R.mean()
    replica_cost = costs.of_call(trains=True).replica_in_node
    return bool(gain > max(2 * replica_cost, LEAST_GAIN * loads_R.mean()))
