"""What each pipeline stage's ranks send in an optimizer step, by kind, in bytes of one rank.

Ring algorithms: of n ranks, an all-reduce of x bytes has each send 2 (n - 1) / n x, a gather or a scatter-reduction
half of that. An exchange between expert parallel ranks sends the rows that travel, with every expert equally busy;
context ranks send the mean of their places' key and value rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import (
    CONTEXT,
    CONTEXT_HEADS,
    EXPERT,
    EXPERT_TENSOR,
    TENSOR,
    Collective,
    ModelOperation,
    unknown,
    walk,
)
from moe.chunk_plan import STRATEGIES, LayerLoad
from moe.planning import traffic
from moe.planning.inputs import even_load, initial_plan, layer_shape, moe_layers
from moe.planning.load import Ran
from moe.schedule import program
from optim.arrangement.traffic import expert_traffic
from simulator.buffers import buffers
from simulator.context.rows import SharedRows, shared_rows
from simulator.parameters import state_ranks
from simulator.sizes import FP32, Sizes

KINDS = (
    "gradient_reduction",
    "parameter_gather",
    "tensor_parallel",
    "pipeline",
    "expert_all_to_all",
    "context_exchange",
    "expert_copies",
    "tied_embedding",
)
RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that a rank sends its part of what goes round
KIND_OF_AXIS = {
    TENSOR: "tensor_parallel",
    EXPERT_TENSOR: "tensor_parallel",
    EXPERT: "expert_all_to_all",
    CONTEXT: "context_exchange",
    CONTEXT_HEADS: "context_exchange",
}


def bytes_per_step(
    config: Config, vocab_size: int, world_size: int, device: str, shared: SharedRows | None = None
) -> list[dict[str, int]]:
    """By stage: bytes that each of its ranks sends in a step, by kind. `shared`: by documents' lengths, where they are
    known. Raises ValueError for a collective or axis that it does not know."""
    shared = shared or shared_rows(config)
    return [_stage(config, vocab_size, world_size, device, stage, shared) for stage in range(config.parallel.pipeline)]


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _stage(
    config: Config, vocab_size: int, world_size: int, device: str, stage: int, shared: SharedRows
) -> dict[str, int]:
    sizes, parallel = Sizes(config), config.parallel
    micro_batches = derived.num_micro_batches(config, world_size)
    copies = state_ranks(config, world_size)
    numbers = {
        kind: sum(b.size for b in of_kind) for kind, of_kind in buffers(config, vocab_size, world_size, stage).items()
    }
    once = sum(size * _share(copies[kind]) for kind, size in numbers.items())
    gathered, reduced = _off_device(config, world_size, stage)
    state = sizes.own_tokens * config.model.hidden_size * sizes.element
    parts = blueprint.parts(config)[stage]
    sent = sum((not part.is_last) + (not part.is_first) for part in parts) * state
    exchanged = dict.fromkeys(KIND_OF_AXIS.values(), 0.0)
    for part in parts:
        for kind, number in of_operations(config, vocab_size, part, device, shared).items():
            exchanged[kind] += number
    ends = (
        parallel.pipeline > 1 and config.model.tie_embeddings and any(part.is_first or part.is_last for part in parts)
    )
    rows = blueprint.padded_vocab_size(vocab_size, parallel.tensor) // parallel.tensor
    tied = 2 * _share(2) * rows * config.model.hidden_size * FP32 if ends else 0
    return {
        "gradient_reduction": int(once * FP32 * (1 if config.optimizer.distributed else 2) + reduced),
        "parameter_gather": int((once * sizes.element if config.optimizer.distributed else 0) + gathered),
        "tensor_parallel": int(micro_batches * exchanged["tensor_parallel"]),
        "pipeline": micro_batches * sent,
        "expert_all_to_all": int(micro_batches * exchanged["expert_all_to_all"]),
        "context_exchange": int(micro_batches * exchanged["context_exchange"]),
        "expert_copies": int(sum(moe_layers(config, stage)) * _copies(config, device, micro_batches)),
        "tied_embedding": int(tied),
    }


def _off_device(config: Config, world_size: int, stage: int) -> tuple[float, float]:
    """Bytes that gathers of experts' weights and reductions of their gradients send where these lie off the device."""
    found = expert_traffic(config, world_size, stage)
    if found is None:
        return 0.0, 0.0
    records, moved = found.moves.records, found.total
    share = _share(records.alike)
    return share * moved.gathered, (1 if records.parts > 1 else 2) * share * moved.reduced


def of_operations(
    config: Config, vocab_size: int, part: blueprint.Part, device: str, shared: SharedRows | None = None
) -> dict[str, float]:
    """What the collectives of a part's operations send for one micro-batch, by kind."""
    sizes, result = Sizes(config), dict.fromkeys(KIND_OF_AXIS.values(), 0.0)
    is_spread = config.parallel.expert > 1
    for block in blueprint.blocks(config, vocab_size, part):
        for operation, forwards in walk(block.operations):
            for collective in operation.collectives:
                if collective.axis not in KIND_OF_AXIS:
                    unknown("communication", f"axis of {operation.name}", collective.axis)
                passes = 1 if collective.is_backward else forwards
                if collective.kind == "all_to_all" and collective.axis == EXPERT:
                    number = _passes(config, even_load(config, device), forwards)[traffic.ROWS] if is_spread else 0.0
                elif collective.kind in ("all_to_all", "rounds"):
                    shared = shared or shared_rows(config)
                    number = passes * _between_context_ranks(collective, sizes, shared, block.slides)
                elif collective.kind in RINGS:
                    number = (
                        passes
                        * RINGS[collective.kind]
                        * _share(sizes.ranks[collective.axis])
                        * sizes.bytes(collective.whole)
                    )
                else:
                    unknown("communication", f"collective of {operation.name}", collective.kind)
                result[KIND_OF_AXIS[collective.axis]] += number
    return result


def of_context(config: Config, operations: Sequence[ModelOperation], shared: SharedRows) -> dict[str, float]:
    """What context ranks send for a layer's operations and one micro-batch, forward and backward: of "heads" and of
    "rounds", the latter in the mean of all layers."""
    sizes, result = Sizes(config), {"heads": 0.0, "rounds": 0.0}
    for operation, forwards in walk(operations):
        for collective in operation.collectives:
            if collective.axis in (CONTEXT, CONTEXT_HEADS):
                passes = 1 if collective.is_backward else forwards
                what = "heads" if collective.axis == CONTEXT_HEADS else "rounds"
                result[what] += passes * _between_context_ranks(collective, sizes, shared)
    return result


def _between_context_ranks(
    collective: Collective, sizes: Sizes, shared: SharedRows, slides: bool | None = None
) -> float:
    """Exchanges of heads, and of rounds of keys and values, of a layer that slides or not; None: of the mean layer."""
    share = _share(sizes.ranks[CONTEXT_HEADS]) if collective.kind == "all_to_all" else shared.mean_received(slides)
    return share * sizes.bytes(collective.whole)


def _passes(config: Config, load: LayerLoad, forwards: int) -> Counter[str]:
    """What a call of an MoE layer sends: so many forward passes, and a backward pass."""
    plan = initial_plan(config)
    strategy = STRATEGIES[plan.memory_strategy]
    forward = traffic.sent(program.forward(plan.degree, strategy, load.has_copies), load, plan.degree)
    backward = program.backward(plan.backward_degree, strategy, plan.weight_lag, load.has_copies)
    result = traffic.sent(backward, load, plan.backward_degree)
    for _ in range(forwards):
        result.update(forward)
    return result


def _copies(config: Config, device: str, micro_batches: int) -> float:
    """What a layer's copies of experts send in a step in which every slot is filled once: weights, and gradients once;
    block by block, in each call those of an expert's even share."""
    if not derived.places_experts(config):
        return 0.0
    shape, load = layer_shape(config, device), even_load(config, device)
    slots, returned, calls = float(shape.slots), float(shape.slots), 1
    if shape.block_rows is not None:
        of_source = math.ceil(load.expert_assignments / shape.num_ranks)
        returned *= shape.num_ranks * math.ceil(of_source / shape.block_rows)
        calls = micro_batches
    full = shape.placed(Ran(0, 0, 0, 0, slots, returned))
    return _passes(config, replace(full, returned_bytes=full.returned_bytes * calls), 1)[traffic.COPIES]
