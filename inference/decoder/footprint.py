"""Bytes that generation needs beside the weights: keys and values, and what a pass computes."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from inference.decoder.head import LOGIT_BYTES
from inference.weights.source import WeightSource

WORK_BYTES = 16 * 2**20  # of readers, kernels and what is small


def cache_bytes(config: Config, source: WeightSource, rows: int, length: int) -> int:
    """Keys and values of `rows` texts of at most `length` tokens, of this rank's layers and heads."""
    model, heads = config.model, derived.num_query_groups(config) // source.topology.tensor.size
    width = 2 * derived.head_dim(config)
    if model.attention == "latent":
        width = derived.head_dim(config) + model.rotary_head_dim + model.value_head_dim
        heads = model.num_attention_heads // source.topology.tensor.size
    return len(source.held.layers) * rows * length * heads * width * source.dtype.itemsize


def pass_bytes(config: Config, source: WeightSource, tokens: int, batches: int, scored: int | None = None) -> int:
    """What a pass of `batches` batches, of at most `tokens` tokens each, holds at a time: the hidden states of all, the
    largest block's tensors of one, and the logits of `scored` tokens of all (None: as many at once as scores take)."""
    model, size = config.model, config.model.hidden_size
    heads = model.num_attention_heads * (derived.head_dim(config) + (model.rotary_head_dim or 0))
    routed = 0
    if config.moe.num_experts is not None:
        routed = config.moe.top_k * (2 * size + 3 * derived.expert_ffn_hidden_size(config))
        routed += 3 * (config.moe.shared_expert_ffn_hidden_size or 0)
    widest = max(4 * heads + 2 * size, 3 * derived.ffn_hidden_size(config), routed)
    numbers = tokens * (widest // source.topology.tensor.size + 2 * size) + 3 * size * tokens * batches
    at_once = min(4 * source.vocab_size * tokens, LOGIT_BYTES) if scored is None else 4 * source.vocab_size * scored
    return source.dtype.itemsize * numbers + 2 * at_once + WORK_BYTES
