"""The sections `model` and `moe` of the typed configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from configs.keys import architecture, free, refuse, say

EXPORT_FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3"),
    *("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "kimi_k2", "deepseek_v2", "bert"),
)


@dataclass
class ModelConfig:
    family: str = architecture("gpt", "model family: decoder (gpt) or masked encoder (bert)", choices=("gpt", "bert"))
    num_layers: int = architecture(2, "number of transformer layers", low=1, high=10_000)
    hidden_size: int = architecture(64, "width of the hidden states", low=1)
    ffn_hidden_size: Optional[int] = architecture(
        None, "width of a dense feed-forward layer; null: 4 * hidden_size", low=1
    )
    num_attention_heads: int = architecture(4, "number of query heads", low=1)
    num_query_groups: Optional[int] = architecture(
        None, "number of key and value heads; null: num_attention_heads (multi-head attention)", low=1
    )
    head_dim: Optional[int] = architecture(
        None,
        "channels per head (with attention=latent: of the part of a key that is not rotated); null: hidden_size / "
        "num_attention_heads",
        low=1,
    )
    attention: str = architecture(
        "grouped",
        "grouped: multi-head and grouped-query attention; latent: MLA of DeepSeek-V2 and V3",
        choices=("grouped", "latent"),
    )
    q_lora_rank: Optional[int] = architecture(None, "latent: width of compressed queries; null: no compression", low=1)
    kv_lora_rank: int = architecture(512, "latent: width of compressed keys and values", low=1)
    rotary_head_dim: int = architecture(
        64, "latent: rotated channels of each query and of the key that all heads share", low=1
    )
    value_head_dim: int = architecture(128, "latent: channels of a value head", low=1)
    # Learned positions are weights, so with them a model of another length is another model.
    sequence_length: int = refuse(64, "tokens per sample", low=1, stays_with_model=True)
    max_positions: Optional[int] = free(
        None,
        "rope: longest text, in tokens, that an export declares if it exceeds sequence_length; set by an import",
        low=1,
        stays_with_model=True,
    )
    sliding_window: Optional[int] = architecture(
        None, "number of latest tokens, including itself, to which a token attends (Mistral, Qwen); null: all", low=1
    )
    sliding_window_from: int = architecture(
        0, "index of the first layer with the sliding window; earlier layers attend to all tokens", low=0
    )
    export_family: Optional[str] = free(
        None,
        "model_type of a Hugging Face export; null: the first family that can represent the model; set by an import",
        choices=EXPORT_FAMILIES,
        stays_with_model=True,
    )
    config_json: Optional[str] = free(
        None,
        "JSON object with the unused entries of an imported config.json, for a later export; set by an import",
        stays_with_model=True,
    )
    vocab_size: Optional[int] = architecture(
        None, "vocabulary size in tokens; null: the tokenizer's; a layout may pad it, without effect on results", low=1
    )
    tie_embeddings: bool = architecture(True, "share one matrix between embedding and output layer")
    position_embedding: str = architecture(
        "rope", "position encoding: rotary, or a learned vector per position", choices=("rope", "learned")
    )
    rotary_base: float = architecture(10000.0, "base of the rotary frequencies", above=0)
    rotary_fraction: float = architecture(1.0, "fraction of each head's channels that are rotated", above=0, high=1)
    rotary_scaling: Any = architecture(
        None,
        "rope: scaling of the rotary frequencies for texts longer than those of pretraining, in Hugging Face's keys; "
        "rope_type: linear, llama3, yarn or longrope",
        form="a mapping such as {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}",
    )
    normalization: str = architecture("rmsnorm", "type of normalization", choices=("rmsnorm", "layernorm"))
    norm_epsilon: float = architecture(1e-5, "number added to the variance in a normalization", above=0)
    norm_position: str = architecture(
        "pre",
        "normalization before (pre) or after (post) each block; post only for bert, as in the original",
        choices=("pre", "post"),
    )
    qk_norm: bool = architecture(False, "normalize queries and keys")
    qk_norm_over: str = architecture(
        "head",
        "channels that qk_norm normalizes together; head: those of a head; all_heads: those of all heads (OLMoE; "
        "rmsnorm)",
        choices=("head", "all_heads"),
    )
    activation: str = architecture(
        "swiglu", "activation function of feed-forward layers and experts", choices=("swiglu", "gelu", "gelu_tanh")
    )
    linear_bias: bool = architecture(False, "add biases to all linear layers")
    qkv_bias: bool = architecture(False, "add biases to queries, keys and values; linear_bias includes them")
    hidden_dropout: float = say(0.0, "dropout of the residual branches and embeddings", low=0, below=1)
    attention_dropout: float = say(0.0, "dropout of the attention probabilities", low=0, below=1)
    init_std: float = free(0.02, "standard deviation of the initial weights", low=0)
    sentence_head: str = architecture(
        "none",
        "bert: additional task on pairs of texts, next_sentence (BERT) or sentence_order (ALBERT)",
        choices=("none", "next_sentence", "sentence_order"),
    )
    backend: str = free(
        "auto",
        "implementation of normalization and attention; auto: transformer_engine where it runs",
        choices=("auto", "portable", "transformer_engine"),
    )
    fusions: str = free(
        "auto", "fused kernels; auto: Megatron-core's where transformer_engine runs", choices=("auto", "off")
    )


PLACEMENT_POLICIES = ("static", "flex", "least_loaded", "solve", "auto")


@dataclass
class PlacementConfig:
    policy: str = free(
        "static",
        "static: each expert is computed on one rank only; other policies replicate experts of overloaded ranks: "
        "flex, like FlexMoE; least_loaded, like LLEP; solve: keep replicas for a step and add those that save time; "
        "auto: solve or static, depending on the last step's loads",
        choices=PLACEMENT_POLICIES,
    )
    costs: str = free(
        "assumed",
        "costs with which placements are planned; measured: once, at the run's first start; two runs may then differ "
        "in the order of sums",
        choices=("assumed", "measured"),
    )
    interval: int = free(
        100, "optimizer steps between migrations of primary experts, if the policy is not static; 0: never", low=0
    )
    bitwise: bool = free(
        False,
        "make results bitwise independent of the placement: experts compute in blocks and add their weight gradients "
        "in order",
    )
    block_rows: int = free(256, "bitwise: assignments (of one rank to one expert) per block", low=1)
    record: bool = free(
        False, "record every call's routing counts (routing.trace) and plan (placement_*.plans) in the run folder"
    )
    replay: Optional[str] = free(
        None, "folder with placement_*.plans of another run, whose plans the training calls repeat; null: plan anew"
    )
    max_load: Optional[float] = free(
        None,
        "solve: limit of a rank's assignments in a call, as a multiple of the mean over ranks; replicas are added even "
        "if they cost time; null: no limit",
        low=1.0,
    )
    over_limit: str = free(
        "warn",
        "response if no plan stays within max_load; warn: use the closest plan, print one warning and count such "
        "calls; stop: save after that step and end",
        choices=("warn", "stop"),
    )
    extra_slots: int = free(0, "most replicas of other ranks' experts that a rank stores per MoE layer", low=0, high=64)


@dataclass
class MoEConfig:
    num_experts: Optional[int] = architecture(None, "experts per MoE layer; null: a dense model", low=1, high=1 << 16)
    top_k: int = architecture(2, "experts per token", low=1)
    ffn_hidden_size: Optional[int] = architecture(None, "width of a routed expert; null: model.ffn_hidden_size", low=1)
    shared_expert_ffn_hidden_size: Optional[int] = architecture(
        None, "width of the shared expert, which processes every token; null: no shared expert", low=1
    )
    layers: Any = architecture(
        1,
        "n: every n-th layer is an MoE layer; or a list with 1 (MoE) or 0 (dense) for each layer",
        form="an integer of at least 1, or a list of 0 and 1",
    )
    router_score: str = architecture(
        "softmax", "function from router logits to expert scores", choices=("softmax", "sigmoid")
    )
    normalize_top_k: bool = architecture(
        True, "scale the weights of a token's experts so that they sum to 1; must be false for softmax with top_k=1"
    )
    routed_scaling_factor: Optional[float] = architecture(
        None, "factor on the weighted sum of the experts' outputs; null: none", above=0
    )
    aux_loss_coeff: float = say(
        0.0, "coefficient of the load-balancing loss over a micro-batch (Switch Transformer)", low=0
    )
    sequence_aux_loss_coeff: float = say(0.0, "coefficient of the load-balancing loss over each sequence", low=0)
    global_aux_loss_coeff: float = say(
        0.0,
        "coefficient of the load-balancing loss over the global batch, with the expert counts of the previous step",
        low=0,
    )
    z_loss_coeff: float = say(0.0, "coefficient of the router z-loss (ST-MoE)", low=0)
    expert_bias: bool = architecture(False, "aux-loss-free balancing (DeepSeek-V3); needs router_score=sigmoid")
    expert_bias_rate: float = say(1e-3, "change of an expert's bias per optimizer step", low=0)
    num_groups: Optional[int] = architecture(
        None, "group-limited routing: number of expert groups; null: no groups", low=1
    )
    group_top_k: Optional[int] = architecture(None, "group-limited routing: groups per token; null: no groups", low=1)
    group_score_top_k: Optional[int] = architecture(
        None,
        "group-limited routing: a group's score is the sum of this many best expert scores (DeepSeek-V2: 1, V3: 2); "
        "null: top_k / group_top_k",
        low=1,
    )
    capacity_factor: Optional[float] = say(
        None,
        "most tokens of a micro-batch per expert, as a multiple of an even share; null: no limit (dropless)",
        above=0,
    )
    drop_policy: str = say(
        "probs",
        "tokens that a full expert drops: the least probable (probs) or the last (position)",
        choices=("probs", "position"),
    )
    pipeline_degree: Any = free(
        1,
        "chunks into which an MoE layer cuts its tokens to overlap communication; auto: by measured costs",
        form="an integer of at least 1, or auto",
    )
    backward_pipeline_degree: Optional[int] = free(None, "chunks of the backward pass; null: pipeline_degree", low=1)
    token_budget: Optional[int] = free(
        None,
        "most tokens per chunk; raises the number of chunks above pipeline_degree if needed; null: no limit",
        low=1,
    )
    weight_lag: int = free(
        1,
        "number of chunks by which weight gradients lag behind input gradients in the backward pass; no effect with "
        "auto degrees",
        low=0,
    )
    memory_strategy: str = free(
        "keep",
        "how the backward pass obtains the activations of an MoE layer: kept, recomputed, communicated again or "
        "offloaded; auto: by measured costs",
        choices=(
            *("keep", "recompute", "communicate", "communicate_recompute"),
            *("offload", "offload_recompute", "communicate_offload", "auto"),
        ),
    )
    weights_device: str = free(
        "device",
        "offload target of the routed experts' weights between uses; auto: by predicted time",
        choices=("device", "host", "disk", "auto"),
    )
    weight_slots: int = free(
        2,
        "offloaded weights: number of MoE layers whose weights fit on the device at once; a larger number saves "
        "transfers between forward and backward pass",
        low=1,
    )
    shard_weights: bool = free(
        True, "offloaded weights: shard weights, gradients and optimizer state over the ranks with the same experts"
    )
    all_to_all: str = free(
        "flat",
        "token exchange; hierarchical: fewer, larger messages between nodes; auto: by measured costs",
        choices=("flat", "hierarchical", "auto"),
    )
    memory_budget: Optional[float] = free(
        None, "device memory, in MiB per rank, for MoE buffers, within which auto chooses; null: no limit", above=0
    )
    placement: PlacementConfig = field(default_factory=PlacementConfig)
