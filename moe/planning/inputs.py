"""What the planner is given, from the configuration alone: so a run and its plan ask for the same."""

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
    """The plan that the MoE layers are built with: what the config fixes; what is left to the planner begins as
    few chunks, one without moe.token_budget, that are kept."""
    degree, backward_degree = derived.pipeline_degrees(config)
    strategy = "keep" if config.moe.memory_strategy == "auto" else config.moe.memory_strategy
    least = derived.least_pipeline_degree(config)
    return Plan(degree or least, backward_degree or least, strategy, config.moe.weight_lag)


def layer_shape(config: Config, device: str) -> Shape:
    """What one call of an MoE layer gets on one rank; `device` is "cpu" or "cuda"."""
    width = derived.expert_ffn_hidden_size(config) // derived.expert_tensor_size(config)
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
        tiled=device == "cpu" and _are_tiled(config, width),
        block_rows=derived.block_rows(config),
        slots=config.moe.placement.extra_slots if derived.places_experts(config) else 0,
        expert_numbers=derived.expert_numbers(config) if derived.is_moe(config) else 0,
    )


def _are_tiled(config: Config, width: int) -> bool:
    """Whether the compiled kernels compute the host's experts by tiles; torch is imported to ask them."""
    from moe.experts import blocks
    from parallel.dtypes import DTYPES

    return blocks.are_tiled("cpu", DTYPES[config.training.precision], config.model.hidden_size, width)


def even_load(config: Config, device: str) -> LayerLoad:
    """A call where every expert gets as many tokens, less what its capacity drops."""
    return layer_shape(config, device).even(derived.kept_share(config))


def fullest_load(config: Config, device: str) -> LayerLoad:
    """The call of the busiest rank: moe.placement.max_load times the mean rank's assignments; without a limit an even
    one."""
    limit = config.moe.placement.max_load
    if limit is None or not derived.limits_load(config):
        return even_load(config, device)
    shape, ranks = layer_shape(config, device), config.parallel.expert
    limit, homes = min(limit, ranks), shape.num_experts // ranks
    counts = [limit] * homes + [(ranks - limit) / (ranks - 1)] * (homes * (ranks - 1))
    return shape.at_home(counts, PlacementMap(shape.num_experts, ranks))


def moe_layers(config: Config, stage: int) -> list[int]:
    """How many MoE layers each of a stage's model chunks has."""
    pattern = derived.moe_layer_pattern(config)
    return [sum(pattern[number] for number in chunk) for chunk in layers_of_stage(config, stage)]


def live_calls(config: Config, world_size: int, stage: int) -> int:
    """Calls of MoE layers (layers times micro-batches in flight) that hold something between their passes at once on a
    stage's ranks."""
    if config.training.recompute == "full":
        return 1  # a layer's forward pass runs again just before its backward pass
    return max(1, most_in_flight(config, world_size, stage, moe_layers(config, stage)))


def slot_bytes(config: Config, stage: int) -> int:
    """What slots for copies of experts take on a stage's rank: weights and, unless blocks' gradients travel by
    themselves, gradients in fp32."""
    if not derived.places_experts(config):
        return 0
    element = derived.element_size(config)
    each = element if derived.block_rows(config) is not None else element + max(element, FP32)
    return sum(moe_layers(config, stage)) * derived.copy_bytes(config) // element * each


def limits(config: Config, device: str, world_size: int, stage: int) -> Limits:
    """What the planner of a pipeline stage may choose, where the config leaves it something."""
    moe = config.moe
    degree, backward_degree = derived.pipeline_degrees(config)
    # On a host there is no faster memory to bring things back to.
    automatic = tuple(name for name, strategy in STRATEGIES.items() if device != "cpu" or not strategy.offloads)
    return Limits(
        degrees=_degrees(config) if degree is None else (degree,),
        backward_degrees=_degrees(config) if backward_degree is None else (backward_degree,),
        strategies=automatic if moe.memory_strategy == "auto" else (moe.memory_strategy,),
        memory_budget=None if moe.memory_budget is None else int(moe.memory_budget * 2**20),
        live_calls=live_calls(config, world_size, stage),
        slot_bytes=slot_bytes(config, stage),
    )


def _degrees(config: Config) -> tuple[int, ...]:
    """What may be chosen, with chunks within moe.token_budget."""
    least = derived.least_pipeline_degree(config)
    return (least, *(degree for degree in DEGREES if degree > least))


def trial_policy(config: Config) -> TrialPolicy:
    """How plans are tried in the first steps. What is tried is judged by the clock, so a deterministic run tries
    nothing."""
    return TrialPolicy(most_plans=1) if config.training.deterministic else TrialPolicy()
