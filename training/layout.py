"""Who holds what: the parameters of each pipeline stage, and the place of every rank, without process groups.

Ranks are laid out as parallel/topology.py has Megatron-core do it: tensor fastest, then data, pipeline; experts fold over the same
ranks: expert tensor fastest, then expert, expert data, pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from training.activations import Part


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank. `local` are the numbers that the rank holds, `total` those of the whole model; 0 for a copy."""

    name: str
    local: int
    total: int
    is_expert: bool = False
    active: int = 0  # of `total`, those that work on a token
    is_shared: bool = False  # an embedding that two stages hold


@dataclass(frozen=True)
class Place:
    """A rank's coordinates."""

    rank: int
    tensor: int
    data: int
    stage: int
    expert: int
    expert_data: int


def places(config: Config, world_size: int) -> Iterator[Place]:
    """The place of every rank."""
    tensor, stages = config.parallel.tensor, config.parallel.pipeline
    split, experts = derived.expert_tensor_size(config), config.parallel.expert
    per_stage = world_size // stages
    for rank in range(world_size):
        stage, inner = divmod(rank, per_stage)
        folded = inner // split
        yield Place(rank, inner % tensor, inner // tensor, stage, folded % experts, folded // experts)


def parts(config: Config) -> list[list[Part]]:
    """The model's parts by stage, then by model chunk of the stage."""
    pattern, stages, chunks = derived.moe_layer_pattern(config), config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    size = config.model.num_layers // (stages * chunks)
    result = []
    for stage in range(stages):
        numbers = [chunk * stages + stage for chunk in range(chunks)]
        result.append([Part(tuple(pattern[n * size : (n + 1) * size]), n == 0, n == stages * chunks - 1) for n in numbers])
    return result


def layer_numbers(config: Config) -> list[list[range]]:
    """The layers, from 0, of each stage's model chunks."""
    stages, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    size = config.model.num_layers // (stages * chunks)
    return [[range((c * stages + s) * size, (c * stages + s + 1) * size) for c in range(chunks)] for s in range(stages)]


def parameters(config: Config, part: Part, vocab_size: int, padded_vocab_size: int) -> list[Parameter]:
    """A part's parameters in the order of the modules. The vocabulary's padding is held but does not count as the model's."""
    model, tensor = config.model, config.parallel.tensor
    hidden, bert = model.hidden_size, model.family == "bert"
    several_stages = config.parallel.pipeline > 1
    result: list[Parameter] = []

    def add(name: str, total: int, split: int = 1) -> None:
        result.append(Parameter(name, total // split, total, active=total))

    def norm(name: str, width: int = hidden) -> None:
        result.extend(_norm(config, name, width))

    def vocabulary(name: str, copied: bool = False) -> None:
        total = 0 if copied else vocab_size * hidden
        shared = model.tie_embeddings and several_stages
        result.append(Parameter(name, padded_vocab_size // tensor * hidden, total, active=total, is_shared=shared))

    if part.is_first:
        vocabulary("embedding.word")
        if model.position_embedding == "learned":
            add("embedding.position", model.sequence_length * hidden)
        if bert:
            add("embedding.type", 2 * hidden)
            norm("embedding.norm")
    for number, is_moe in enumerate(part.layers):
        for parameter in _layer(config, bool(is_moe)):
            result.append(Parameter(f"layer.{number}.{parameter.name}", **{k: v for k, v in vars(parameter).items() if k != "name"}))
    if part.is_last:
        if model.norm_position == "pre":
            norm("final_norm")
        if bert:
            add("head.dense", hidden * hidden)
            add("head.dense.bias", hidden)
            norm("head.norm")
        if not (part.is_first and model.tie_embeddings):
            vocabulary("output", copied=model.tie_embeddings)
        if bert:
            result.append(Parameter("output.bias", padded_vocab_size // tensor, vocab_size, active=vocab_size))
            if model.sentence_head != "none":
                for name, size in (("pooler", hidden), ("sentence_head", 2)):
                    add(name, hidden * size)
                    add(f"{name}.bias", size)
    return result


def _norm(config: Config, name: str, width: int) -> Iterator[Parameter]:
    for part in ("weight", "bias") if config.model.normalization == "layernorm" else ("weight",):
        yield Parameter(f"{name}.{part}", width, width, active=width)


def _layer(config: Config, is_moe: bool) -> Iterator[Parameter]:
    model, tensor = config.model, config.parallel.tensor
    hidden = model.hidden_size
    matrices = 2 if model.activation == "swiglu" else 1

    def feed_forward(name: str, width: int, bias: bool) -> Iterator[Parameter]:
        yield _whole(f"{name}.fc1", matrices * width * hidden, tensor)
        if bias:
            yield _whole(f"{name}.fc1.bias", matrices * width, tensor)
        yield _whole(f"{name}.fc2", hidden * width, tensor)
        if bias:
            yield _whole(f"{name}.fc2.bias", hidden)

    yield from _norm(config, "norm", hidden)
    yield from _attention(config)
    yield from _norm(config, "feed_forward.norm", hidden)
    if not is_moe:
        yield from feed_forward("feed_forward", derived.ffn_hidden_size(config), model.linear_bias)
        return
    moe, split = config.moe, derived.expert_tensor_size(config)
    num_experts, width = moe.num_experts or 0, derived.expert_ffn_hidden_size(config)
    yield _whole("router", num_experts * hidden)

    def experts(name: str, size: int, split: int) -> Parameter:
        # Without expert parallelism Megatron-core reduces experts' gradients with all others.
        local = num_experts // config.parallel.expert * size // split
        return Parameter(name, local, num_experts * size, is_expert=config.parallel.expert > 1, active=moe.top_k * size)

    yield experts("experts.fc1", matrices * width * hidden, split)
    yield experts("experts.fc2", hidden * width, split)
    if model.linear_bias:
        yield experts("experts.fc1.bias", matrices * width, split)
        yield experts("experts.fc2.bias", hidden, 1)
    if moe.shared_expert_ffn_hidden_size is not None:
        yield from feed_forward("shared_expert", moe.shared_expert_ffn_hidden_size, False)


def _whole(name: str, total: int, split: int = 1) -> Parameter:
    return Parameter(name, total // split, total, active=total)


def _attention(config: Config) -> Iterator[Parameter]:
    model, tensor = config.model, config.parallel.tensor
    hidden, head = model.hidden_size, derived.head_dim(config)
    heads, groups = model.num_attention_heads, derived.num_query_groups(config)
    if model.attention == "latent":
        rotating, value, query_rank, rank = model.rotary_head_dim, model.value_head_dim, model.q_lora_rank, model.kv_lora_rank
        yield _whole("attention.proj", heads * value * hidden, tensor)
        if query_rank is not None:
            yield _whole("attention.q_down", query_rank * hidden, tensor)
        yield _whole("attention.q_up", heads * (head + rotating) * (query_rank or hidden), tensor)
        yield _whole("attention.kv_down", (rank + rotating) * hidden, tensor)
        yield _whole("attention.kv_up", heads * (head + value) * rank, tensor)
        if query_rank is not None:
            yield _whole("attention.q_norm", query_rank)
        yield _whole("attention.kv_norm", rank)
        return
    yield _whole("attention.proj", heads * head * hidden, tensor)
    if model.linear_bias:
        yield _whole("attention.proj.bias", hidden)
    yield _whole("attention.qkv", (heads + 2 * groups) * head * hidden, tensor)
    if model.linear_bias or model.qkv_bias:
        yield _whole("attention.qkv.bias", (heads + 2 * groups) * head, tensor)
    if model.qk_norm:
        over_all = model.qk_norm_over == "all_heads"
        yield from _norm(config, "attention.q_norm", head * (heads if over_all else 1))
        yield from _norm(config, "attention.k_norm", head * (groups if over_all else 1))
