"""The inputs of the layer planner, from the config alone, so that a run and `plan=true` choose equal plans."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from moe.chunk_plan import FP32, STRATEGIES, LayerLoad, Plan
from moe.placement_map import PlacementMap
from moe.planning.costs import DEGREES, Limits
from moe.planning.load import Shape
from moe.planning.trial import TrialPolicy
from parallel.pipeline import layers_of_stage, most_in_flight


def initial_plan(config: Config) -> Plan:
    """Return the initial chunk plan of MoE layers.

    A degree that the config leaves open is the least allowed one (1 without moe.token_budget). An open memory strategy
    is "keep".
    """
    degree, backward_degree = derived.pipeline_degrees(config)
    strategy = "keep" if config.moe.memory_strategy == "auto" else config.moe.memory_strategy
    least = derived.least_pipeline_degree(config)
    return Plan(degree or least, backward_degree or least, strategy, config.moe.weight_lag)


def layer_shape(config: Config, device: str) -> Shape:
    """Return the constant sizes of an MoE layer on one rank; `device` is "cpu" or "cuda"."""
    width = derived.expert_ffn_hidden_size(config) // derived.expert_tensor_size(config)
    is_tiled = False
    if device == "cpu":  # the compiled kernels may compute experts in tiles; these modules import torch
        from moe.experts import blocks
        from parallel.dtypes import DTYPES

        is_tiled = blocks.are_tiled("cpu", DTYPES[config.training.precision], config.model.hidden_size, width)
    return Shape(
        tokens=derived.tokens_per_call(config),
        num_experts=config.moe.num_experts or 0,
        num_ranks=config.parallel.expert,
        top_k=config.moe.top_k,
        hidden_size=config.model.hidden_size,
        width=width,
        gated=config.model.activation == "swiglu",
        element_size=derived.element_size(config),
        whole=device == "cuda",
        tiled=is_tiled,
        block_rows=derived.block_rows(config),
        replica_slots=config.moe.placement.extra_slots if derived.places_experts(config) else 0,
        expert_numel=derived.expert_numel(config) if derived.is_moe(config) else 0,
    )


def even_load(config: Config, device: str) -> LayerLoad:
    """Return the load of a call in which all experts get equal numbers of tokens, minus those that capacity drops."""
    return layer_shape(config, device).even(derived.kept_share(config))


def fullest_load(config: Config, device: str) -> LayerLoad:
    """Return the load of a call whose busiest rank has moe.placement.max_load times the mean; if null, an even load."""
    limit = config.moe.placement.max_load
    if limit is None or not derived.limits_load(config):
        return even_load(config, device)
    shape, ranks = layer_shape(config, device), config.parallel.expert
    limit, per_rank = min(limit, ranks), shape.num_experts // ranks
    counts = [limit] * per_rank + [(ranks - limit) / (ranks - 1)] * (per_rank * (ranks - 1))
    return shape.at_primaries(counts, PlacementMap(shape.num_experts, ranks))


def moe_layers(config: Config, stage: int) -> list[int]:
    """Return the number of MoE layers in each model chunk of a pipeline stage."""
    pattern = derived.moe_layer_pattern(config)
    return [sum(pattern[number] for number in chunk) for chunk in layers_of_stage(config, stage)]


def live_calls(config: Config, world_size: int, stage: int) -> int:
    """Return the peak number of a stage's MoE calls (layers times micro-batches) that await their backward pass."""
    if config.training.recompute == "full":
        return 1  # a layer's forward pass runs again just before its backward pass
    return max(1, most_in_flight(config, world_size, stage, moe_layers(config, stage)))


def replica_bytes(config: Config, stage: int) -> int:
    """Return the bytes of expert replicas on each rank of a pipeline stage.

    They are weights and, unless gradients are returned block by block, gradients in fp32 or wider.
    """
    if not derived.places_experts(config):
        return 0
    element = derived.element_size(config)
    each = element if derived.block_rows(config) is not None else element + max(element, FP32)
    return sum(moe_layers(config, stage)) * derived.replica_bytes(config) // element * each


def limits(config: Config, device: str, world_size: int, stage: int) -> Limits:
    """Return the planner's limits for a pipeline stage: chunk plans that the config allows, and the memory budget."""
    moe = config.moe
    degree, backward_degree = derived.pipeline_degrees(config)
    # On a CPU, offloading to the host frees nothing.
    automatic = tuple(name for name, strategy in STRATEGIES.items() if device != "cpu" or not strategy.offloads)
    return Limits(
        degrees=_degrees(config) if degree is None else (degree,),
        backward_degrees=_degrees(config) if backward_degree is None else (backward_degree,),
        strategies=automatic if moe.memory_strategy == "auto" else (moe.memory_strategy,),
        memory_budget=None if moe.memory_budget is None else int(moe.memory_budget * 2**20),
        live_calls=live_calls(config, world_size, stage),
        replica_bytes=replica_bytes(config, stage),
    )


def _degrees(config: Config) -> tuple[int, ...]:
    """Return the numbers of chunks to choose from, each of which keeps chunks within moe.token_budget."""
    least = derived.least_pipeline_degree(config)
    return (least, *(degree for degree in DEGREES if degree > least))


def trial_policy(config: Config) -> TrialPolicy:
    """Return the policy for trials of chunk plans; deterministic runs have none, because trials depend on timing."""
    return TrialPolicy(most_plans=1) if config.training.deterministic else TrialPolicy()
