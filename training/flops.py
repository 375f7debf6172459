"""Floating-point operations of the model per token, counted from the shapes of its matrix products.

Convention of model FLOPs utilisation (PaLM, appendix B): a multiply-add is 2 operations, backward costs twice the
forward, recomputation does not count, and attention counts its full square for BERT and half of it for causal GPT.
"""

from __future__ import annotations

from configs import derived
from configs.schema import Config


def forward_flops_per_token(config: Config, vocab_size: int) -> float:
    """Operations of one forward pass divided by its tokens; embeddings look-ups, norms and softmax are left out."""
    model = config.model
    heads, groups, head_dim = model.num_attention_heads, derived.num_query_groups(config), derived.head_dim(config)
    attention_weights = model.hidden_size * head_dim * (heads + 2 * groups) + heads * head_dim * model.hidden_size
    pairs = model.sequence_length / 2 if model.family == "gpt" else model.sequence_length
    attention = 2 * attention_weights + 2 * 2 * heads * head_dim * pairs
    matrices = 3 if model.activation == "swiglu" else 2
    dense = 2 * matrices * model.hidden_size * derived.ffn_hidden_size(config)
    moe_layers = sum(derived.moe_layer_pattern(config))
    moe = 0.0
    if config.moe.num_experts is not None:
        width = config.moe.top_k * derived.expert_ffn_hidden_size(config) + (config.moe.shared_expert_ffn_hidden_size or 0)
        moe = 2 * matrices * model.hidden_size * width + 2 * model.hidden_size * config.moe.num_experts
    head = 2 * model.hidden_size * vocab_size
    if model.family == "bert":
        head += 2 * model.hidden_size**2
    return model.num_layers * attention + (model.num_layers - moe_layers) * dense + moe_layers * moe + head


def training_flops_per_token(config: Config, vocab_size: int) -> float:
    """Forward and backward together: three times the forward."""
    return 3 * forward_flops_per_token(config, vocab_size)
