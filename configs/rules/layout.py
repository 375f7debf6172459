"""Rules of the layout: divisibility by each parallel size, and the number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from configs import derived
from configs.keys import get
from configs.rules.problem import WORLD_SIZE, Fix, Problem, divisors, multiples, must_divide, set_to
from configs.schema import KEYS, Config
from configs.searched import LAYOUT_KEYS


def tensor(config: Config, world_size: int) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    tensor = ("parallel.tensor", parallel.tensor)
    yield from must_divide(tensor, ("model.num_attention_heads", model.num_attention_heads))
    yield from must_divide(tensor, ("model.num_query_groups", derived.num_query_groups(config)))
    if model.attention == "latent":
        width = model.kv_lora_rank + model.rotary_head_dim
        if width % parallel.tensor:
            rule = f"must divide model.kv_lora_rank + model.rotary_head_dim ({width})"
            yield Problem("parallel.tensor", rule, *divisors(width, parallel.tensor))
        if model.q_lora_rank is not None:
            yield from must_divide(tensor, ("model.q_lora_rank", model.q_lora_rank))
    if parallel.sequence and parallel.tensor == 1:
        rule = "needs parallel.tensor (1) above 1: it shards sequences over the tensor ranks"
        yield Problem("parallel.sequence", rule, False, {"parallel.tensor": 2})
    if parallel.sequence and parallel.context == 1:
        yield from must_divide(tensor, ("model.sequence_length", model.sequence_length))
    if derived.is_moe(config) and parallel.tensor > 1 and not parallel.sequence:
        rule = (
            f"must be true for an MoE model if parallel.tensor ({parallel.tensor}) is above 1: Megatron-core needs it"
        )
        yield Problem("parallel.sequence", rule, True, {"parallel.tensor": 1})
    if 0 in derived.moe_layer_pattern(config):
        yield from must_divide(tensor, ("model.ffn_hidden_size", derived.ffn_hidden_size(config)))
    if derived.is_moe(config) and config.moe.shared_expert_ffn_hidden_size is not None:
        yield from must_divide(tensor, ("moe.shared_expert_ffn_hidden_size", config.moe.shared_expert_ffn_hidden_size))


def context(config: Config, world_size: int) -> Iterator[Problem]:
    model, parallel, training = config.model, config.parallel, config.training
    context, heads, micro = parallel.context, parallel.context_heads, training.micro_batch_size
    if context == 1:
        return
    num_shards = context * parallel.tensor if parallel.sequence else context
    num_rows = micro * model.sequence_length
    if num_rows % num_shards:
        times = f" times parallel.tensor ({parallel.tensor})" if parallel.sequence else ""
        rule = f"{times} must divide training.micro_batch_size ({micro}) * model.sequence_length = {num_rows}".strip()
        length = num_shards // math.gcd(num_shards, micro)
        lengths = set_to("model.sequence_length", multiples(length, model.sequence_length))
        yield Problem("parallel.context", rule, *lengths, *(n for n in divisors(num_rows, context) if n < context))
    if model.attention_dropout > 0:
        rule = f"must be 0 if parallel.context ({context}) is above 1, because its attention has no dropout"
        yield Problem("model.attention_dropout", rule, 0.0, {"parallel.context": 1})
    if heads is None:
        return
    fits = sorted(derived.allowed_context_heads(config), key=lambda n: (abs(n - heads), n))
    if context % heads:
        yield Problem("parallel.context_heads", f"must divide parallel.context ({context})", *fits, None)
    elif not derived.shares_query_heads(config, heads):
        queries, keys = derived.heads_of_tensor_rank(config)
        rule = (
            f"must divide {queries}, the query heads of a tensor rank, and must divide {keys}, its key heads, or be a "
            "multiple of that number"
        )
        yield Problem("parallel.context_heads", rule, *fits, None)


def experts(config: Config, world_size: int) -> Iterator[Problem]:
    parallel, experts = config.parallel, config.moe.num_experts
    if experts is None and parallel.expert > 1:
        rule = "must be 1 in a dense model (moe.num_experts is null)"
        yield Problem("parallel.expert", rule, 1, {"moe.num_experts": multiples(parallel.expert, 8)[0]})
    if experts is not None:
        yield from must_divide(("parallel.expert", parallel.expert), ("moe.num_experts", experts))
    if parallel.expert == 1 and derived.expert_tensor_size(config) != parallel.tensor:
        # Megatron-core 0.16.1 reduces the gradients of such experts over the wrong group (NVIDIA/Megatron-LM#1628).
        rule = f"must be null or equal parallel.tensor ({parallel.tensor}) if parallel.expert is 1"
        yield Problem("parallel.expert_tensor", rule, None, *set_to("parallel.expert", [2, 4, 8]))
    if experts is not None:
        key = "parallel.expert_tensor" if parallel.expert_tensor is not None else "parallel.tensor"
        width = ("moe.ffn_hidden_size", derived.expert_ffn_hidden_size(config))
        yield from must_divide((key, derived.expert_tensor_size(config)), width)


def pipeline(config: Config, world_size: int) -> Iterator[Problem]:
    parallel, num_layers = config.parallel, config.model.num_layers
    chunks = parallel.virtual_pipeline
    if chunks is not None and parallel.pipeline == 1:
        yield Problem(
            "parallel.virtual_pipeline", "needs parallel.pipeline (1) above 1", None, {"parallel.pipeline": 2}
        )
    if chunks is None:
        yield from must_divide(("parallel.pipeline", parallel.pipeline), ("model.num_layers", num_layers))
    elif num_layers % (parallel.pipeline * chunks):
        product = parallel.pipeline * chunks
        rule = f"times parallel.pipeline ({parallel.pipeline}) must divide model.num_layers ({num_layers})"
        fits = [d for d in divisors(num_layers, product) if d % parallel.pipeline == 0 and d > parallel.pipeline]
        other = set_to("parallel.pipeline", divisors(num_layers, parallel.pipeline))
        other += set_to("model.num_layers", multiples(product, num_layers))
        yield Problem("parallel.virtual_pipeline", rule, *(d // parallel.pipeline for d in fits), None, *other)


def world(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    dense, expert = derived.model_parallel_size(config), derived.expert_model_parallel_size(config)
    # Fixes change one size to a value that divides the world, else all sizes to 1, else the number of processes.
    smaller: list[Fix] = []
    for name in sorted(("tensor", "pipeline", "context", "expert"), key=lambda name: -getattr(parallel, name)):
        size = getattr(parallel, name)
        smaller += set_to(f"parallel.{name}", [d for d in divisors(world_size, size) if d != size])
    sizes = {key: KEYS[key].default for key in LAYOUT_KEYS if key.startswith("parallel.")}
    alone: Fix = {key: value for key, value in sizes.items() if get(config, key) != value}
    launch = set_to(WORLD_SIZE, multiples(math.lcm(dense, expert), world_size))
    if world_size % dense:
        product = f"{parallel.tensor} * {parallel.pipeline} * {parallel.context} = {dense}"
        rule = f"must be divisible by parallel.tensor * parallel.pipeline * parallel.context = {product}"
        yield Problem(WORLD_SIZE, rule, *smaller, alone, *launch)
    if derived.is_moe(config) and world_size % expert:
        product = f"{parallel.expert} * {derived.expert_tensor_size(config)} * {parallel.pipeline} = {expert}"
        rule = f"must be divisible by parallel.expert * parallel.expert_tensor * parallel.pipeline = {product}"
        yield Problem(WORLD_SIZE, rule, *smaller, alone, *launch)
