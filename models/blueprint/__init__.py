"""The blueprint: every operation of a GPT or BERT, dense or mixture of experts, derived from the configuration alone.

It is the only description of the model's structure. Parameters, FLOPs, communication and memory (simulator/) and the
initial weights are computed from it; a test compares it with the built models. Imports neither torch nor Megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from configs import derived
from configs.schema import Config
from models.blueprint.attention import attention
from models.blueprint.ends import embedding, head, padded_vocab_size
from models.blueprint.feed_forward import experts, feed_forward
from models.blueprint.operation import (
    INPUT,
    Block,
    ModelOperation,
    Weight,
    axis_sizes,
    block,
    hidden,
    local_shape,
    norm,
    recomputed,
    residual_sum,
    transformer_name,
    walk,
)
from parallel.pipeline import layers_of_stage

__all__ = [
    "Block",
    "ModelChunk",
    "ModelOperation",
    "Weight",
    "axis_sizes",
    "blocks",
    "local_shape",
    "model_chunks",
    "padded_vocab_size",
    "walk",
    "weights",
    "whole_model",
]

# The order in which Megatron-core creates its modules. Post-norm layers have their norms elsewhere: models/specs.py.
ATTENTION_ORDER = (
    "linear_proj linear_qkv linear_q_proj linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj "
    "q_layernorm kv_layernorm k_layernorm"
)
LAYER_ORDER = (
    "input_layernorm",
    *(f"self_attention.{name}" for name in ATTENTION_ORDER.split()),
    "pre_cross_attn_layernorm",
    "pre_mlp_layernorm",
    "mlp",
    "mlp_bda",
)
EMBEDDING_ORDER = tuple(
    f"embedding.{name}" for name in ("word_embeddings", "position_embeddings", "tokentype_embeddings", "layer_norm")
)
HEAD_ORDER = ("encoder", "decoder", "lm_head", "embedding.word_embeddings", "output_layer", "pooler", "binary_head")


@dataclass(frozen=True)
class ModelChunk:
    """Consecutive layers on one pipeline stage. The model's first chunk also has the embedding, and its last chunk the
    head."""

    layers: tuple[int, ...]  # 1 for an MoE layer, 0 for a dense one
    is_first: bool
    is_last: bool
    first_layer: int = 0


def model_chunks(config: Config) -> list[list[ModelChunk]]:
    """Return the model chunks of each pipeline stage."""
    pattern, last = derived.moe_layer_pattern(config), config.model.num_layers - 1
    return [
        [
            ModelChunk(tuple(pattern[number] for number in layers), layers[0] == 0, layers[-1] == last, layers[0])
            for layers in layers_of_stage(config, stage)
        ]
        for stage in range(config.parallel.pipeline)
    ]


def whole_model(config: Config) -> ModelChunk:
    """Return a single model chunk with all layers, the embedding and the head."""
    return ModelChunk(tuple(derived.moe_layer_pattern(config)), True, True)


def blocks(config: Config, vocab_size: int, chunk: ModelChunk) -> list[Block]:
    """Return the operations of a model chunk in blocks (the embedding, each layer, the head), in the order of
    execution. `vocab_size` is without padding."""
    transformer = transformer_name(config)
    result = [block("", embedding(config, vocab_size, chunk.is_last), EMBEDDING_ORDER)] if chunk.is_first else []
    layers = {kind: layer(config, bool(kind)) for kind in set(chunk.layers)}
    slides = derived.window_pattern(config)
    for number, kind in enumerate(chunk.layers, chunk.first_layer):
        of = layers[kind]
        result.append(Block(f"{transformer}.layers.{number}.", of.operations, of.weights, bool(slides[number])))
    if chunk.is_last:
        result.append(block("", head(config, vocab_size, chunk.is_first), HEAD_ORDER))
    return result


def layer(config: Config, is_moe: bool) -> Block:
    """Return the operations of a transformer layer as a block: attention and feed-forward, each with a residual sum and
    a norm."""
    operations = (_pre_norm if config.model.norm_position == "pre" else _post_norm)(config, is_moe)
    if config.training.recompute == "full":
        operations = [recomputed("layer", (INPUT,), operations)]
    return block("", operations, LAYER_ORDER)


def _pre_norm(config: Config, is_moe: bool) -> list[ModelOperation]:
    size = config.model.hidden_size
    attended = attention(config, "attention.input", "attended")
    fed = (experts if is_moe else feed_forward)(config, "mlp.input", "fed")
    return [
        norm(config, "input_layernorm", INPUT, hidden(config, "attention.input"), size),
        *attended[:-1],
        replace(attended[-1], frees=(*attended[-1].frees, "attention.input")),
        *residual_sum(config, "attended", INPUT, "middle", biased=True, frees=("attended",)),
        norm(config, "pre_mlp_layernorm", "middle", hidden(config, "mlp.input"), size),
        *fed,
        *residual_sum(config, "fed", "middle", "output", biased=not is_moe, frees=("mlp.input", "fed", "middle")),
    ]


def _post_norm(config: Config, is_moe: bool) -> list[ModelOperation]:
    size = config.model.hidden_size
    fed = (experts if is_moe else feed_forward)(config, "middle", "fed")
    frees = ("attended", "attention.sum")
    return [
        *attention(config, INPUT, "attended"),
        *residual_sum(config, "attended", INPUT, "attention.sum", biased=True),
        norm(config, "pre_cross_attn_layernorm", "attention.sum", hidden(config, "middle"), size, frees=frees),
        *fed,
        *residual_sum(config, "fed", "middle", "mlp.sum", biased=not is_moe),
        norm(config, "mlp_bda.norm", "mlp.sum", hidden(config, "output"), size, frees=("fed", "mlp.sum", "middle")),
    ]


def weights(config: Config, vocab_size: int, chunk: ModelChunk) -> Iterator[tuple[str, Weight]]:
    """Yield the name and description of each weight of a model chunk, in the order of Megatron-core's modules. The
    routed experts of a layer are one stacked weight."""
    for each in blocks(config, vocab_size, chunk):
        yield from ((each.prefix + weight.name, weight) for weight in each.weights)
