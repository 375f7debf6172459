"""Floating-point operations of the model per token, counted from the shapes of its matrix products.

Two counts. The model's (`forward_flops_per_token`, `training_flops_per_token`) is the convention of model FLOPs utilisation (PaLM,
appendix B): a multiply-add is 2 operations, backward costs twice the forward, recomputation and the vocabulary's padding do not
count, and attention counts its full square for BERT and half of it for causal GPT. MFU everywhere is made of it.

The machine's (`executed_flops_per_token`) is what PyTorch's FlopCounterMode counts over a step on all ranks: the full square, the
fused attention's backward pass with its scores computed again (2.5 times the forward), whatever training.recompute and
moe.memory_strategy compute again, the padding, and what every tensor rank computes alike. On a CPU in half precision, where moe/experts.py
computes an expert's rows in blocks of a few sizes, half a step of these for each block. Both leave out look-ups, norms, softmax and sums.
"""

from __future__ import annotations

from configs import derived
from configs.schema import Config

BLOCK_ROWS, STEP_ROWS = 1024, 16  # of moe/blocks.py, which imports torch; a test compares


def has_fused_attention(config: Config, device: str) -> bool:
    """Whether torch has one kernel for the attention; on a CPU there is none with dropout or with values of another width than keys."""
    model = config.model
    same_width = model.attention == "grouped" or derived.head_dim(config) + model.rotary_head_dim == model.value_head_dim
    return device == "cuda" or (model.attention_dropout == 0 and same_width)


def attention_weights(config: Config) -> int:
    """Numbers in the matrices of one layer's attention."""
    model, head_dim = config.model, derived.head_dim(config)
    heads, hidden = model.num_attention_heads, model.hidden_size
    if model.attention == "grouped":
        return hidden * head_dim * (2 * heads + 2 * derived.num_query_groups(config))
    query, rank = head_dim + model.rotary_head_dim, model.q_lora_rank
    queries = hidden * heads * query if rank is None else rank * (hidden + heads * query)
    keys_and_values = hidden * (model.kv_lora_rank + model.rotary_head_dim) + model.kv_lora_rank * heads * (head_dim + model.value_head_dim)
    return queries + keys_and_values + heads * model.value_head_dim * hidden


def forward_operations(config: Config, vocab_size: int) -> dict[str, float]:
    """Operations of the forward pass per token by kind; attention's scores with their full square."""
    model, moe = config.model, config.moe
    hidden, head_dim = model.hidden_size, derived.head_dim(config)
    channels = 2 * head_dim if model.attention == "grouped" else head_dim + model.rotary_head_dim + model.value_head_dim
    matrices = 3 if model.activation == "swiglu" else 2
    moe_layers = sum(derived.moe_layer_pattern(config))
    result = {
        "attention_projections": 2.0 * model.num_layers * attention_weights(config),
        "attention_scores": 2.0 * model.num_layers * model.num_attention_heads * channels * model.sequence_length,
        "feed_forward": 2.0 * (model.num_layers - moe_layers) * matrices * hidden * derived.ffn_hidden_size(config),
        "logits": 2.0 * hidden * vocab_size,
    }
    if moe.num_experts is not None:
        result["router"] = 2.0 * moe_layers * hidden * moe.num_experts
        result["experts"] = 2.0 * moe_layers * matrices * hidden * moe.top_k * derived.expert_ffn_hidden_size(config)
        result["shared_expert"] = 2.0 * moe_layers * matrices * hidden * (moe.shared_expert_ffn_hidden_size or 0)
    if model.family == "bert":
        result["head"] = 2.0 * hidden**2
    return result


def forward_flops_per_token(config: Config, vocab_size: int) -> float:
    """Operations of one forward pass divided by its tokens; embeddings look-ups, norms and softmax are left out."""
    operations = forward_operations(config, vocab_size)
    if config.model.family == "gpt":
        operations["attention_scores"] /= 2
    return sum(operations.values())


def training_flops_per_token(config: Config, vocab_size: int) -> float:
    """Forward and backward together: three times the forward."""
    return 3 * forward_flops_per_token(config, vocab_size)


def executed_flops_per_token(config: Config, padded_vocab_size: int, device: str) -> float:
    """Operations of forward and backward pass that all ranks together carry out, divided by the tokens."""
    model, training = config.model, config.training
    forward = forward_operations(config, padded_vocab_size)
    copies = 1 if config.parallel.sequence else config.parallel.tensor  # ranks that compute the same where nothing is split
    if "head" in forward:
        pooler = forward["head"] / model.sequence_length + 4 * model.hidden_size / model.sequence_length
        forward["head"] = copies * (forward["head"] + (pooler if model.sentence_head != "none" else 0.0))
        if model.sentence_head != "none" and config.parallel.sequence:
            forward["head"] += (config.parallel.tensor - 1) * pooler
    times = dict.fromkeys(forward, 3.0)
    if has_fused_attention(config, device):
        times["attention_scores"] = 3.5
    if device == "cpu" and training.precision == "bf16" and "router" in times:
        times["router"] = 5.0  # its backward pass takes the gradient as a sum of two bf16 numbers
    if training.recompute == "full":
        times |= {name: count + 1 for name, count in times.items() if name not in ("logits", "head")}
    elif training.recompute == "selective":
        times["attention_scores"] += 1
        times["feed_forward"] += 1
    if device == "cpu" and training.precision != "fp32" and "experts" in forward:
        forward["experts"] *= _padded_rows(config)
    if "experts" in times and "recompute" in config.moe.memory_strategy:
        times["experts"] += 2 / 3 if model.activation == "swiglu" else 1 / 2
    return sum(count * times[name] for name, count in forward.items())


def _padded_rows(config: Config) -> float:
    """Rows that an even load computes in half precision on a CPU, over those that it has; see moe/blocks.py's padded."""
    moe, training = config.moe, config.training
    tokens = training.micro_batch_size * config.model.sequence_length * derived.expert_tensor_size(config) / config.parallel.tensor
    degree = derived.pipeline_degrees(config)[0] or 1
    rows = tokens * moe.top_k * config.parallel.expert / (moe.num_experts or 1) / degree
    block = rows / max(1, -(-rows // BLOCK_ROWS))
    return (block + STEP_ROWS / 2) / block
