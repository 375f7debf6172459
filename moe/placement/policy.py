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
LEAST_GAIN = 0.02  # least gain, as a share of the mean rank's work, for which auto makes replicas
# Costs if none were measured: a replica's weights, and its gradients in fp32, against the six matmuls of an
# assignment; both grow with the expert's size. A GPU with weights of 2 bytes at 400 TFLOP/s, 400 GB/s inside a node and
# 50 between nodes; a host with weights of 4 bytes at 50 GFLOP/s and 2 GB/s.
ASSUMED = {
    "cuda": Costs(expert_overhead=64, replica_in_node=350, replica_between=2650, grad_in_node=700, grad_between=5300),
    "cpu": Costs(expert_overhead=8, replica_in_node=16, replica_between=128, grad_in_node=16, grad_between=128),
}


@dataclass(frozen=True)
class Policy:
    """The policy of expert placement in all MoE layers: planner, costs, and limits of replicas."""

    planner: QuotaPlanner | None  # None: every expert is computed by its primary
    costs: Costs
    extra_slots: int  # replicas of a layer that a rank may hold
    block_rows: int | None  # see `moe.experts.weights.Weights`
    max_load: float | None = None  # see `LayerPlacement`
    chooses: bool = False  # decides in each step whether there are replicas, see `pays`


def policy_of(config: Config, device: str) -> Policy | None:
    """Return the placement policy of a config; None if it asks for no placement. `device` is "cpu" or "cuda"."""
    placement = config.moe.placement
    block_rows = derived.block_rows(config)
    if derived.places_experts(config):
        chooses = placement.policy == "auto"
        planner = POLICIES[placement.policy]
        return Policy(planner, ASSUMED[device], placement.extra_slots, block_rows, placement.max_load, chooses)
    return Policy(None, ASSUMED[device], 0, block_rows) if block_rows is not None else None


def pays(tokens_E: Integers, placement: PlacementMap, costs: Costs) -> bool:
    """Return whether a step with `tokens_E` tokens per expert should have replicas.

    The gain of perfect balance must exceed the cost of a replica on both of its ranks, and LEAST_GAIN.
    """
    loads_R = np.bincount(placement.primary_ranks, tokens_E, placement.num_ranks)
    gain = loads_R.max() - loads_R.mean()
    replica_cost = costs.of_call(trains=True).replica_in_node
    return bool(gain > max(2 * replica_cost, LEAST_GAIN * loads_R.mean()))
