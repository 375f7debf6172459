"""Bytes that one rank of each pipeline stage sends per optimizer step, by kind of communication.

Collectives are assumed to use rings: in an all-reduce of x bytes over n ranks each rank sends 2 (n - 1) / n x, in an
all-gather or a reduce-scatter half of that. All-to-alls assume that every expert is equally busy, and context ranks
send the mean number of key and value rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from configs import derived
from configs.job import Job
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
from optim.arrangement.experts import expert_traffic
from simulator.buffers import buffers
from simulator.context.shared_rows import SharedRows, shared_rows
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
RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # how often (n - 1) / n of the bytes are sent
KIND_OF_AXIS = {
    TENSOR: "tensor_parallel",
    EXPERT_TENSOR: "tensor_parallel",
    EXPERT: "expert_all_to_all",
    CONTEXT: "context_exchange",
    CONTEXT_HEADS: "context_exchange",
}


def bytes_per_step(job: Job, shared: SharedRows | None = None) -> list[dict[str, int]]:
    """Return the bytes that one rank of each pipeline stage sends per step, by kind of communication.

    `shared`: sharding of sequences over context ranks, if the documents' lengths are known. Raises ValueError for an
    unknown collective or axis.
    """
    shared = shared or shared_rows(job.config)
    return [_stage(job, stage, shared) for stage in range(job.config.parallel.pipeline)]


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _stage(job: Job, stage: int, shared: SharedRows) -> dict[str, int]:
    config, world_size = job.config, job.world_size
    sizes, parallel = Sizes(config), config.parallel
    micro_batches = derived.num_micro_batches(config, world_size)
    replicas = state_ranks(config, world_size)
    numbers = {kind: sum(b.size for b in of_kind) for kind, of_kind in buffers(job, stage).items()}
    once = sum(size * _share(replicas[kind]) for kind, size in numbers.items())
    gathered = reduced = 0.0
    offloaded = expert_traffic(config, world_size, stage)
    if offloaded is not None:
        records, share = offloaded.layer.records, _share(offloaded.layer.records.data_parallel_size)
        gathered = share * offloaded.total.gathered
        reduced = (1 if records.num_shards > 1 else 2) * share * offloaded.total.reduced
    state = sizes.own_tokens * config.model.hidden_size * sizes.element
    chunks = blueprint.model_chunks(config)[stage]
    sent = sum((not chunk.is_last) + (not chunk.is_first) for chunk in chunks) * state
    exchanged = dict.fromkeys(KIND_OF_AXIS.values(), 0.0)
    for chunk in chunks:
        for kind, number in micro_batch_bytes(config, job.vocab_size, chunk, job.device, shared).items():
            exchanged[kind] += number
    has_end = any(chunk.is_first or chunk.is_last for chunk in chunks)
    ends = parallel.pipeline > 1 and config.model.tie_embeddings and has_end
    vocab_rows = blueprint.padded_vocab_size(job.vocab_size, parallel.tensor) // parallel.tensor
    tied = 2 * _share(2) * vocab_rows * config.model.hidden_size * FP32 if ends else 0
    return {
        "gradient_reduction": int(once * FP32 * (1 if config.optimizer.distributed else 2) + reduced),
        "parameter_gather": int((once * sizes.element if config.optimizer.distributed else 0) + gathered),
        "tensor_parallel": int(micro_batches * exchanged["tensor_parallel"]),
        "pipeline": micro_batches * sent,
        "expert_all_to_all": int(micro_batches * exchanged["expert_all_to_all"]),
        "context_exchange": int(micro_batches * exchanged["context_exchange"]),
        "expert_copies": int(sum(moe_layers(config, stage)) * _replica_bytes(config, job.device, micro_batches)),
        "tied_embedding": int(tied),
    }


def micro_batch_bytes(
    config: Config, vocab_size: int, chunk: blueprint.ModelChunk, device: str, shared: SharedRows | None = None
) -> dict[str, float]:
    """Return the bytes that the collectives of a model chunk send per micro-batch, by kind of communication."""
    sizes, result = Sizes(config), dict.fromkeys(KIND_OF_AXIS.values(), 0.0)
    is_spread = config.parallel.expert > 1
    for block in blueprint.blocks(config, vocab_size, chunk):
        for operation, forwards in walk(block.operations):
            for collective in operation.collectives:
                if collective.axis not in KIND_OF_AXIS:
                    unknown("communication", f"axis of {operation.name}", collective.axis)
                passes = 1 if collective.is_backward else forwards
                if collective.kind == "all_to_all" and collective.axis == EXPERT:
                    number = 0.0
                    if is_spread:
                        number = _expert_call_bytes(config, even_load(config, device), forwards)[traffic.TOKEN_ROWS]
                elif collective.kind in ("all_to_all", "rounds"):
                    shared = shared or shared_rows(config)
                    number = passes * _between_context_ranks(collective, sizes, shared, block.slides)
                elif collective.kind in RINGS:
                    share = RINGS[collective.kind] * _share(sizes.ranks[collective.axis])
                    number = passes * share * sizes.bytes(collective.whole)
                else:
                    unknown("communication", f"collective of {operation.name}", collective.kind)
                result[KIND_OF_AXIS[collective.axis]] += number
    return result


def context_bytes(config: Config, operations: Sequence[ModelOperation], shared: SharedRows) -> dict[str, float]:
    """Return the bytes that a context rank sends per layer and micro-batch, forward and backward.

    "heads": exchanges of attention heads; "rounds": key and value rows, as a mean over all layers.
    """
    sizes, result = Sizes(config), {"heads": 0.0, "rounds": 0.0}
    for operation, forwards in walk(operations):
        for collective in operation.collectives:
            if collective.axis in (CONTEXT, CONTEXT_HEADS):
                passes = 1 if collective.is_backward else forwards
                key = "heads" if collective.axis == CONTEXT_HEADS else "rounds"
                result[key] += passes * _between_context_ranks(collective, sizes, shared)
    return result


def _between_context_ranks(
    collective: Collective, sizes: Sizes, shared: SharedRows, slides: bool | None = None
) -> float:
    """Return the bytes that a context rank sends in one exchange of heads, or in one pass of key and value rounds.

    `slides`: for a layer with (True) or without (False) a sliding window; None: the mean over all layers.
    """
    share = _share(sizes.ranks[CONTEXT_HEADS]) if collective.kind == "all_to_all" else shared.mean_received(slides)
    return share * sizes.bytes(collective.whole)


def _expert_call_bytes(config: Config, load: LayerLoad, forwards: int) -> Counter[str]:
    """Return the bytes that an MoE layer sends in `forwards` forward passes and one backward pass, by traffic kind."""
    plan = initial_plan(config)
    strategy = STRATEGIES[plan.memory_strategy]
    forward = traffic.sent(program.forward(plan.degree, strategy, load.has_replicas), load, plan.degree)
    backward = program.backward(plan.backward_degree, strategy, plan.weight_lag, load.has_replicas)
    result = traffic.sent(backward, load, plan.backward_degree)
    for _ in range(forwards):
        result.update(forward)
    return result


def _replica_bytes(config: Config, device: str, micro_batches: int) -> float:
    """Return the bytes that replicas of experts send per MoE layer in a step that fills every replica slot once.

    Weights are sent once per step. Gradients are sent once per step or, if replicas return them per block of rows, once
    per block and micro-batch under an even load.
    """
    if not derived.places_experts(config):
        return 0.0
    shape, load = layer_shape(config, device), even_load(config, device)
    filled_slots, returned, calls = float(shape.replica_slots), float(shape.replica_slots), 1
    if shape.block_rows is not None:
        of_source = math.ceil(load.expert_assignments / shape.num_ranks)
        returned *= shape.num_ranks * math.ceil(of_source / shape.block_rows)
        calls = micro_batches
    full = shape.placed(Ran(0, 0, 0, 0, filled_slots, returned))
    return _expert_call_bytes(config, replace(full, returned_bytes=full.returned_bytes * calls), 1)[traffic.REPLICAS]
