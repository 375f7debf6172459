"""Parameters of each pipeline stage and coordinates of every rank, computed without process groups.

Ranks are numbered as parallel/topology.py has Megatron-core do it: the tensor index changes fastest, then context,
data, pipeline. Expert axes divide the same ranks: expert tensor fastest, then expert, expert data, pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import EXPERT, axis_sizes, unknown

# Ends of the names of weights of which every tensor rank has the gradients of all tokens.
WHOLE_GRADIENTS = (
    *("_embeddings.weight", "pooler.dense.weight", "pooler.dense.bias"),
    *("binary_head.weight", "binary_head.bias"),
)
# Kinds of weights, and whether gradients train them.
TRAINED = {"matrix": True, "output_matrix": True, "norm": True, "bias": True, "router_bias": False}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank. `local`: elements on the rank; `total`: in the whole model, 0 for a tied weight."""

    name: str
    local: int
    total: int
    is_expert: bool = False  # reduced over other ranks than the rest
    active: int = 0  # of `total`, the numbers that are used for one token
    is_shared: bool = False  # an embedding that two stages hold
    reduced_at_step_end: bool = False  # its gradient is not final after the reduction over data-parallel ranks
    is_offloaded: bool = False  # experts' weights that are copied to the device when used: in no gradient buffer


@dataclass(frozen=True)
class RankCoordinates:
    """Index of a rank on each parallel axis; `data_context`: index among the ranks with the same dense weights."""

    rank: int
    tensor: int
    context: int
    data: int
    data_context: int
    stage: int
    expert: int
    expert_data: int


def rank_coordinates(config: Config, world_size: int) -> Iterator[RankCoordinates]:
    """Yield the coordinates of every rank, in rank order."""
    tensor, context, stages = config.parallel.tensor, config.parallel.context, config.parallel.pipeline
    split, experts = derived.expert_tensor_size(config), config.parallel.expert
    per_stage = world_size // stages
    for rank in range(world_size):
        stage, inner = divmod(rank, per_stage)
        folded = inner // split
        replica = inner // tensor
        expert, expert_data = folded % experts, folded // experts
        yield RankCoordinates(
            rank, inner % tensor, replica % context, replica // context, replica, stage, expert, expert_data
        )


def state_ranks(config: Config, world_size: int) -> dict[str, int]:
    """Return the number of ranks that share the optimizer state of "dense" and of "expert" weights."""
    return {
        "dense": derived.data_parallel_size(config, world_size) * config.parallel.context,
        "expert": derived.expert_data_parallel_size(config, world_size),
    }


def parameters(config: Config, chunk: blueprint.ModelChunk, vocab_size: int) -> list[Parameter]:
    """Return the parameters of a model chunk on one rank, in module order.

    `local` includes the vocabulary's padding, `total` does not. Raises ValueError for an unknown weight kind or axis.
    """
    sizes, moe, parallel, result = axis_sizes(config), config.moe, config.parallel, list[Parameter]()
    for name, weight in blueprint.weights(config, vocab_size, chunk):
        if weight.kind not in TRAINED:
            unknown("parameters", f"kind of weight of {name}", weight.kind)
        if not TRAINED[weight.kind]:
            continue
        total = 0 if weight.is_copy else math.prod(weight.shape)
        active = total // (moe.num_experts or 1) * moe.top_k if weight.is_expert else total
        # Without expert parallelism Megatron-core reduces experts' gradients with all others.
        is_expert = weight.is_expert and sizes[EXPERT] > 1
        local = math.prod(blueprint.local_shape(weight, sizes))
        # Sequence parallelism: of a weight that all tensor ranks hold, each has the gradient of its own tokens.
        alike = parallel.sequence and not weight.splits and not name.endswith(WHOLE_GRADIENTS)
        at_step_end = derived.is_reduced_at_step_end(
            name, alike=alike, shared=weight.is_shared, tensor=parallel.tensor, pipeline=parallel.pipeline
        )
        is_offloaded = weight.is_expert and derived.streams_experts(config)
        result.append(Parameter(name, local, total, is_expert, active, weight.is_shared, at_step_end, is_offloaded))
    return result
