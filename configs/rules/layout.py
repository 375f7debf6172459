"""Rules of the layout: what each parallel size must divide, and the number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from configs import derived
from configs.rules.problem import WORLD_SIZE, Fix, Problem, divisors, multiples, must_divide, set_to
from configs.schema import Config


def tensor(config: Config, world_size: int) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    tensor = ("parallel.tensor", parallel.tensor)
    yield from must_divide(tensor, ("model.num_attention_heads", model.num_attention_heads))
    yield from must_divide(tensor, ("model.num_query_groups", derived.num_query_groups(config)))
    if model.attention == "latent":
        width = model.kv_lora_rank + model.rotary_head_dim
        if width % parallel.tensor:
            rule = f"must divide model.kv_lora_rank + model.rotary_head_dim ({width})"
            yield Problem("parallel.tensor", rule, set_to("parallel.tensor", divisors(width, parallel.tensor)))
        if model.q_lora_rank is not None:
            yield from must_divide(tensor, ("model.q_lora_rank", model.q_lora_rank))
    if parallel.sequence and parallel.tensor == 1:
        fixes: list[Fix] = [{"parallel.sequence": False}, *set_to("parallel.tensor", [2])]
        yield Problem(
            "parallel.sequence", "needs parallel.tensor (1) above 1: it splits the sequence over tensor ranks", fixes
        )
    if parallel.sequence and parallel.context == 1:
        yield from must_divide(tensor, ("model.sequence_length", model.sequence_length))
    if derived.is_moe(config) and parallel.tensor > 1 and not parallel.sequence:
        rule = (
            f"must be true for an MoE model with parallel.tensor ({parallel.tensor}) above 1: Megatron-core routes "
            "each token once"
        )
        fixes = [{"parallel.sequence": True}, {"parallel.tensor": 1}]
        yield Problem("parallel.sequence", rule, fixes)
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
        rule = (
            f"{times} must divide training.micro_batch_size ({micro}) * model.sequence_length, {num_rows} rows".strip()
        )
        length = num_shards // math.gcd(num_shards, micro)
        fixes: list[Fix] = [
            *set_to("model.sequence_length", multiples(length, model.sequence_length)),
            *set_to("parallel.context", [n for n in divisors(num_rows, context) if n < context]),
        ]
        yield Problem("parallel.context", rule, fixes)
    if model.attention_dropout > 0:
        rule = f"must be 0 with parallel.context ({context}) above 1, whose attention has no dropout"
        yield Problem("model.attention_dropout", rule, [{"model.attention_dropout": 0.0}, {"parallel.context": 1}])
    if heads is None:
        return
    fits = sorted(derived.allowed_context_heads(config), key=lambda n: (abs(n - heads), n))
    if context % heads:
        rule = f"must divide parallel.context ({context})"
        yield Problem("parallel.context_heads", rule, set_to("parallel.context_heads", [*fits, None]))
    elif not derived.shares_query_heads(config, heads):
        queries, keys = derived.heads_of_tensor_rank(config)
        rule = (
            f"must divide a tensor rank's {queries} query heads, and divide its {keys} key heads or be a multiple of "
            "them"
        )
        yield Problem("parallel.context_heads", rule, set_to("parallel.context_heads", [*fits, None]))


def experts(config: Config, world_size: int) -> Iterator[Problem]:
    parallel, experts = config.parallel, config.moe.num_experts
    if experts is None and parallel.expert > 1:
        fixes: list[Fix] = [{"parallel.expert": 1}, {"moe.num_experts": multiples(parallel.expert, 8)[0]}]
        yield Problem("parallel.expert", "must be 1 in a dense model (moe.num_experts is null)", fixes)
    if experts is not None:
        yield from must_divide(("parallel.expert", parallel.expert), ("moe.num_experts", experts))
    if parallel.expert == 1 and derived.expert_tensor_size(config) != parallel.tensor:
        # Megatron-core 0.16.1 reduces the gradients of such experts over the wrong group (NVIDIA/Megatron-LM#1628).
        rule = f"must be null or equal parallel.tensor ({parallel.tensor}) while parallel.expert is 1"
        yield Problem(
            "parallel.expert_tensor",
            rule,
            [*set_to("parallel.expert_tensor", [None]), *set_to("parallel.expert", [2, 4, 8])],
        )
    if experts is not None:
        key = "parallel.expert_tensor" if parallel.expert_tensor is not None else "parallel.tensor"
        width = ("moe.ffn_hidden_size", derived.expert_ffn_hidden_size(config))
        yield from must_divide((key, derived.expert_tensor_size(config)), width)


def pipeline(config: Config, world_size: int) -> Iterator[Problem]:
    parallel, num_layers = config.parallel, config.model.num_layers
    chunks = parallel.virtual_pipeline
    if chunks is not None and parallel.pipeline == 1:
        fixes: list[Fix] = [{"parallel.virtual_pipeline": None}, {"parallel.pipeline": 2}]
        yield Problem("parallel.virtual_pipeline", "needs parallel.pipeline (1) above 1", fixes)
    if chunks is None:
        yield from must_divide(("parallel.pipeline", parallel.pipeline), ("model.num_layers", num_layers))
    elif num_layers % (parallel.pipeline * chunks):
        product = parallel.pipeline * chunks
        rule = f"times parallel.pipeline ({parallel.pipeline}) must divide model.num_layers ({num_layers})"
        fits = [d for d in divisors(num_layers, product) if d % parallel.pipeline == 0 and d > parallel.pipeline]
        fixes = [
            *set_to("parallel.virtual_pipeline", [*(d // parallel.pipeline for d in fits), None]),
            *set_to("parallel.pipeline", divisors(num_layers, parallel.pipeline)),
            *set_to("model.num_layers", multiples(product, num_layers)),
        ]
        yield Problem("parallel.virtual_pipeline", rule, fixes)


def world(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    names = ("tensor", "pipeline", "context", "expert")
    dense, expert = derived.model_parallel_size(config), derived.expert_model_parallel_size(config)
    both = math.lcm(dense, expert)
    # Fixes change one size to a value that divides the world, else all sizes to 1, else the number of processes.
    smaller: list[Fix] = []
    for name in sorted(names, key=lambda name: -getattr(parallel, name)):
        size = getattr(parallel, name)
        smaller += set_to(f"parallel.{name}", [d for d in divisors(world_size, size) if d != size])
    alone: Fix = {
        "tensor": 1,
        "sequence": False,
        "pipeline": 1,
        "virtual_pipeline": None,
        "context": 1,
        "context_heads": None,
        "expert": 1,
        "expert_tensor": None,
    }
    alone = {f"parallel.{name}": value for name, value in alone.items() if getattr(parallel, name) != value}
    launch = set_to(WORLD_SIZE, multiples(both, world_size))
    product = "parallel.tensor * parallel.pipeline * parallel.context"
    if world_size % dense:
        sizes = f"{parallel.tensor} * {parallel.pipeline} * {parallel.context} = {dense}"
        yield Problem(WORLD_SIZE, f"must be divisible by {product} = {sizes}", [*smaller, alone, *launch])
    if derived.is_moe(config) and world_size % expert:
        sizes = f"{parallel.expert} * {derived.expert_tensor_size(config)} * {parallel.pipeline} = {expert}"
        rule = f"must be divisible by parallel.expert * parallel.expert_tensor * parallel.pipeline = {sizes}"
        yield Problem(WORLD_SIZE, rule, [*smaller, alone, *launch])
