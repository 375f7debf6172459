"""Who holds what: the parameters of each pipeline stage, and the place of every rank, without process groups.

Ranks are laid out as parallel/topology.py has Megatron-core do it: tensor fastest, then context, data, pipeline;
experts fold over the same ranks: expert tensor fastest, then expert, expert data, pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import EXPERT, axis_sizes, unknown

# Kinds of weights, and whether gradients train them.
# What every tensor rank has the gradients of all tokens of.
WHOLE_GRADIENTS = (
    "_embeddings.weight",
    "pooler.dense.weight",
    "pooler.dense.bias",
    "binary_head.weight",
    "binary_head.bias",
)
TRAINED = {"matrix": True, "output_matrix": True, "norm": True, "bias": True, "router_bias": False}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank. `local` are the numbers that the rank holds, `total` those of the whole model; 0 for a
    copy."""

    name: str
    local: int
    total: int
    is_expert: bool = False  # reduced over other ranks than the rest
    active: int = 0  # of `total`, those that work on a token
    is_shared: bool = False  # an embedding that two stages hold
    is_late: bool = False  # its gradient is not final when it has been reduced over the data parallel ranks
    is_off_device: bool = False  # of experts that come to the device for their uses: in no buffer


@dataclass(frozen=True)
class Place:
    """A rank's coordinates; `data_context` among those that hold the same dense weights."""

    rank: int
    tensor: int
    context: int
    data: int
    data_context: int
    stage: int
    expert: int
    expert_data: int


def places(config: Config, world_size: int) -> Iterator[Place]:
    """The place of every rank."""
    tensor, context, stages = config.parallel.tensor, config.parallel.context, config.parallel.pipeline
    split, experts = derived.expert_tensor_size(config), config.parallel.expert
    per_stage = world_size // stages
    for rank in range(world_size):
        stage, inner = divmod(rank, per_stage)
        folded = inner // split
        copy = inner // tensor
        expert, expert_data = folded % experts, folded // experts
        yield Place(rank, inner % tensor, copy % context, copy // context, copy, stage, expert, expert_data)


def state_ranks(config: Config, world_size: int) -> dict[str, int]:
    """Ranks that share the gradients and the optimizer's state of "dense" weights, and of "expert" ones."""
    return {
        "dense": derived.data_parallel_size(config, world_size) * config.parallel.context,
        "expert": derived.expert_data_parallel_size(config, world_size),
    }


def parameters(config: Config, part: blueprint.Part, vocab_size: int) -> list[Parameter]:
    """A part's parameters in the order of the modules. The vocabulary's padding is held but does not count as the
    model's.

    Raises ValueError for a kind of weight, or an axis, that it does not know.
    """
    sizes, moe, result = axis_sizes(config), config.moe, list[Parameter]()
    for name, weight in blueprint.weights(config, vocab_size, part):
        if weight.kind not in TRAINED:
            unknown("parameters", f"kind of weight of {name}", weight.kind)
        if not TRAINED[weight.kind]:
            continue
        total = 0 if weight.is_copy else math.prod(weight.shape)
        active = total // (moe.num_experts or 1) * moe.top_k if weight.is_expert else total
        # Without expert parallelism Megatron-core reduces experts' gradients with all others.
        is_expert = weight.is_expert and sizes[EXPERT] > 1
        local = math.prod(blueprint.local_shape(weight, sizes))
        is_late = _is_late(config, name, weight)
        is_off = weight.is_expert and derived.streams_experts(config)
        result.append(Parameter(name, local, total, is_expert, active, weight.is_shared, is_late, is_off))
    return result


def _is_late(config: Config, name: str, weight: blueprint.Weight) -> bool:
    """Whether parallel/megatron/tiered.py would say is_late: here is no model to be asked."""
    parallel = config.parallel
    # Sequence parallelism: each tensor rank has the gradient of its own tokens of what all of them hold.
    alike = parallel.sequence and not weight.splits and not name.endswith(WHOLE_GRADIENTS)
    return derived.is_added_late(
        name, alike=alike, shared=weight.is_shared, tensor=parallel.tensor, pipeline=parallel.pipeline
    )
