"""Where the ranks of an axis lie in the nodes, and what an exchange between them takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from models.blueprint.operation import CONTEXT, CONTEXT_HEADS, EXPERT, EXPERT_TENSOR, TENSOR
from simulator.clock.hardware import Hardware

PIPELINE, DENSE_COPIES, EXPERT_COPIES = "pipeline", "dense_copies", "expert_copies"
INSIDE, BETWEEN = "inside", "between"
# Steps of a collective between n ranks of a node, or between n nodes, each with its start-up; and how often what goes
# round passes a link.
ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True)
class Group:
    """The ranks that exchange something: how many, how many of them in a node, and how many such groups share a
    node's card."""

    size: int
    in_node: int
    beside: int

    @property
    def place(self) -> str:
        return INSIDE if self.in_node >= self.size else BETWEEN


def groups(config: Config, world_size: int, ranks_per_node: int) -> dict[str, Group]:
    """The groups of each axis, as parallel/topology.py lays ranks out."""
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
        DENSE_COPIES: (data * parallel.context, parallel.tensor),
        EXPERT_TENSOR: (split, 1),
        EXPERT: (parallel.expert, split),
        EXPERT_COPIES: (max(stage // experts, 1), experts),
        PIPELINE: (parallel.pipeline, stage),
    }
    return {axis: _group(size, stride, node) for axis, (size, stride) in found.items()}


def _group(size: int, stride: int, node: int) -> Group:
    in_node = max(1, min(size, node // stride))
    return Group(size, in_node, max(1, node // in_node))


def rate(hardware: Hardware, group: Group) -> float:
    """Bytes a second that a ring of these ranks carries."""
    if group.place == INSIDE:
        return hardware["inside.rate"]
    own = _card(hardware, group.in_node * group.beside) / group.beside
    return own if group.in_node == 1 else min(hardware["inside.rate"], own)


def startup_inside(hardware: Hardware, ranks: int) -> float:
    """Seconds of a gather between ranks of a node beside its bytes: linear between the sizes that figures are of, on
    with the last slope."""
    if ranks == 1:
        return 0.0
    two, four, eight = (hardware[f"inside.startup_{size}"] for size in (2, 4, 8))
    if ranks <= 4:
        return two + (four - two) * (ranks - 2) / 2
    return max(four, four + (eight - four) * (ranks - 4) / 4)


def collective(hardware: Hardware, kind: str, group: Group, num_bytes: float) -> float:
    """Seconds of an all_reduce, all_gather or reduce_scatter of so many bytes, all ranks' together."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    nodes = math.ceil(group.size / group.in_node)
    startup = startup_inside(hardware, group.in_node) + hardware["between.startup"] * math.log2(nodes)
    return ROUNDS[kind] * (startup + (group.size - 1) / group.size * num_bytes / rate(hardware, group))


def exchange(hardware: Hardware, group: Group) -> tuple[float, float]:
    """(start-up, seconds a byte) of what a rank sends to all others alike: the slower of the links inside a node and
    the card."""
    if group.size == 1:
        return 0.0, 0.0
    if group.place == INSIDE:
        return hardware["inside.startup_2"], 1 / hardware["inside.rate"]
    away = (group.size - group.in_node) / (group.size - 1)
    card = away * group.in_node * group.beside / _card(hardware, group.in_node * group.beside)
    return hardware["between.startup"], max(card, (1 - away) / hardware["inside.rate"])


def send(hardware: Hardware, group: Group, num_bytes: float) -> float:
    """Seconds in which a rank sends to the next stage, while the other ranks of its node do."""
    if group.in_node > 1:
        return hardware["inside.startup_2"] + num_bytes / hardware["inside.rate"]
    return hardware["between.startup"] + num_bytes * group.beside / _card(hardware, group.beside)


def _card(hardware: Hardware, ranks: int) -> float:
    """Bytes a second of the cards that so many ranks of a node use."""
    return hardware["between.rate"] * max(1.0, ranks / hardware["between.shared_by"])
