"""Placement of each parallel axis' groups on the nodes, and the seconds of their collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from models.blueprint.operation import CONTEXT, CONTEXT_HEADS, EXPERT, EXPERT_TENSOR, TENSOR
from simulator.clock.hardware import Hardware

PIPELINE, DENSE_REPLICAS, EXPERT_REPLICAS = "pipeline", "dense_replicas", "expert_replicas"
INSIDE, BETWEEN = "inside", "between"
# Ring passes of a collective. Each costs one start-up and transfers (n - 1) / n of the bytes.
ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True)
class Group:
    """Size of a group of communicating ranks, in total and within one node."""

    size: int
    in_node: int
    num_sharing: int  # groups of this axis that share a node's network card

    @property
    def link(self) -> str:
        """Slowest link that the group uses: "inside" a node or "between" nodes."""
        return INSIDE if self.in_node >= self.size else BETWEEN


def groups(config: Config, world_size: int, ranks_per_node: int) -> dict[str, Group]:
    """Return the group of ranks on each parallel axis, in the rank order of parallel/topology.py."""
    parallel, node = config.parallel, min(ranks_per_node, world_size)
    heads = derived.context_heads(config)
    dense = parallel.tensor * parallel.context
    split = derived.expert_tensor_size(config)
    data = world_size // (dense * parallel.pipeline)
    stage = world_size // parallel.pipeline
    experts = split * parallel.expert
    found = {
        TENSOR: (parallel.tensor, 1),
        CONTEXT_HEADS: (heads, parallel.tensor),
        CONTEXT: (parallel.context, parallel.tensor),
        DENSE_REPLICAS: (data * parallel.context, parallel.tensor),
        EXPERT_TENSOR: (split, 1),
        EXPERT: (parallel.expert, split),
        EXPERT_REPLICAS: (max(stage // experts, 1), experts),
        PIPELINE: (parallel.pipeline, stage),
    }
    result = {}
    for axis, (size, stride) in found.items():
        in_node = max(1, min(size, node // stride))
        result[axis] = Group(size, in_node, max(1, node // in_node))
    return result


def rate(hardware: Hardware, group: Group) -> float:
    """Return the bytes per second that each rank of the group sends in a ring collective."""
    if group.link == INSIDE:
        return hardware["inside.rate"]
    own = _card_rate(hardware, group.in_node * group.num_sharing) / group.num_sharing
    return own if group.in_node == 1 else min(hardware["inside.rate"], own)


def startup_inside(hardware: Hardware, ranks: int) -> float:
    """Return the start-up seconds of an all-gather in one node, linear between the figures for 2, 4 and 8 ranks."""
    if ranks == 1:
        return 0.0
    two, four, eight = (hardware[f"inside.startup_{size}"] for size in (2, 4, 8))
    if ranks <= 4:
        return two + (four - two) * (ranks - 2) / 2
    return max(four, four + (eight - four) * (ranks - 4) / 4)


def collective(hardware: Hardware, kind: str, group: Group, num_bytes: float) -> float:
    """Return the seconds of an all_reduce, all_gather or reduce_scatter. `num_bytes`: size of the complete tensor."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    nodes = math.ceil(group.size / group.in_node)
    startup = startup_inside(hardware, group.in_node) + hardware["between.startup"] * math.log2(nodes)
    return ROUNDS[kind] * (startup + (group.size - 1) / group.size * num_bytes / rate(hardware, group))


def exchange(hardware: Hardware, group: Group) -> tuple[float, float]:
    """Return (start-up seconds, seconds per byte) of an all-to-all that sends the same amount to each rank.

    The slower of the links inside a node and the node's network cards determines the seconds per byte.
    """
    if group.size == 1:
        return 0.0, 0.0
    if group.link == INSIDE:
        return hardware["inside.startup_2"], 1 / hardware["inside.rate"]
    away = (group.size - group.in_node) / (group.size - 1)
    senders = group.in_node * group.num_sharing
    card = away * group.in_node * group.num_sharing / _card_rate(hardware, senders)
    return hardware["between.startup"], max(card, (1 - away) / hardware["inside.rate"])


def send(hardware: Hardware, group: Group, num_bytes: float) -> float:
    """Return the seconds of a transfer to the next pipeline stage while all ranks of the node send."""
    if group.in_node > 1:
        return hardware["inside.startup_2"] + num_bytes / hardware["inside.rate"]
    return hardware["between.startup"] + num_bytes * group.num_sharing / _card_rate(hardware, group.num_sharing)


def _card_rate(hardware: Hardware, ranks: int) -> float:
    """Return the total bytes per second of the network cards that `ranks` ranks of a node use."""
    return hardware["between.rate"] * max(1.0, ranks / hardware["between.shared_by"])
