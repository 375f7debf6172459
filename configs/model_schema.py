"""The sections `model` and `moe` of the typed configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from configs.keys import key

EXPORT_FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3"),
    *("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "kimi_k2", "deepseek_v2", "bert"),
)


@dataclass
class ModelConfig:
    family: str = key(
        "gpt", "model family: decoder (gpt) or masked encoder (bert)", architecture=True, choices=("gpt", "bert")
    )
    num_layers: int = key(2, "number of transformer layers", architecture=True, low=1, high=10_000)
    hidden_size: int = key(64, "width of the hidden states", architecture=True, low=1)
    ffn_hidden_size: Optional[int] = key(
        None, "width of a dense feed-forward layer; null: 4 * hidden_size", architecture=True, low=1
    )
    num_attention_heads: int = key(4, "number of query heads", architecture=True, low=1)
    num_query_groups: Optional[int] = key(
        None,
        "number of key and value heads; null: num_attention_heads (multi-head attention)",
        architecture=True,
        low=1,
    )
    head_dim: Optional[int] = key(
        None,
        "channels per head (with attention=latent: of the part of a key that is not rotated); null: hidden_size / "
        "num_attention_heads",
        architecture=True,
        low=1,
    )
    attention: str = key(
        "grouped",
        "grouped: multi-head and grouped-query attention; latent: MLA of DeepSeek-V2 and V3",
        architecture=True,
        choices=("grouped", "latent"),
    )
    q_lora_rank: Optional[int] = key(
        None, "latent: width of compressed queries; null: no compression", architecture=True, low=1
    )
    kv_lora_rank: int = key(512, "latent: width of compressed keys and values", architecture=True, low=1)
    rotary_head_dim: int = key(
        64, "latent: rotated channels of each query and of the key that all heads share", architecture=True, low=1
    )
    value_head_dim: int = key(128, "latent: channels of a value head", architecture=True, low=1)
    # Learned positions are weights, so with them a model of another length is another model.
    sequence_length: int = key(64, "tokens per sample", "refuse", low=1, stays_with_model=True)
    max_positions: Optional[int] = key(
        None,
        "rope: longest text, in tokens, that an export declares if it exceeds sequence_length; set by an import",
        "free",
        low=1,
        stays_with_model=True,
    )
    sliding_window: Optional[int] = key(
        None,
        "number of latest tokens, including itself, to which a token attends (Mistral, Qwen); null: all",
        architecture=True,
        low=1,
    )
    sliding_window_from: int = key(
        0,
        "index of the first layer with the sliding window; earlier layers attend to all tokens",
        architecture=True,
        low=0,
    )
    export_family: Optional[str] = key(
        None,
        "model_type of a Hugging Face export; null: the first family that can represent the model; set by an import",
        "free",
        choices=EXPORT_FAMILIES,
        stays_with_model=True,
    )
    config_json: Optional[str] = key(
        None,
        "JSON object with the unused entries of an imported config.json, for a later export; set by an import",
        "free",
        stays_with_model=True,
    )
    vocab_size: Optional[int] = key(
        None,
        "vocabulary size in tokens; null: the tokenizer's; a layout may pad it, without effect on results",
        architecture=True,
        low=1,
    )
    tie_embeddings: bool = key(True, "share one matrix between embedding and output layer", architecture=True)
    position_embedding: str = key(
        "rope",
        "position encoding: rotary, or a learned vector per position",
        architecture=True,
        choices=("rope", "learned"),
    )
    rotary_base: float = key(10000.0, "base of the rotary frequencies", architecture=True, above=0)
    rotary_fraction: float = key(
        1.0, "fraction of each head's channels that are rotated", architecture=True, above=0, high=1
    )
    rotary_scaling: Any = key(
        None,
        "rope: scaling of the rotary frequencies for texts longer than those of pretraining, in Hugging Face's keys; "
        "rope_type: linear, llama3, yarn or longrope",
        architecture=True,
        form="a mapping such as {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}",
    )
    normalization: str = key("rmsnorm", "type of normalization", architecture=True, choices=("rmsnorm", "layernorm"))
    norm_epsilon: float = key(1e-5, "number added to the variance in a normalization", architecture=True, above=0)
    norm_position: str = key(
        "pre",
        "normalization before (pre) or after (post) each block; post only for bert, as in the original",
        architecture=True,
        choices=("pre", "post"),
    )
    qk_norm: bool = key(False, "normalize queries and keys", architecture=True)
    qk_norm_over: str = key(
        "head",
        "channels that qk_norm normalizes together; head: those of a head; all_heads: those of all heads (OLMoE; "
        "rmsnorm)",
        architecture=True,
        choices=("head", "all_heads"),
    )
    activation: str = key(
        "swiglu",
        "activation function of feed-forward layers and experts",
        architecture=True,
        choices=("swiglu", "gelu", "gelu_tanh"),
    )
    linear_bias: bool = key(False, "add biases to all linear layers", architecture=True)
    qkv_bias: bool = key(False, "add biases to queries, keys and values; linear_bias includes them", architecture=True)
    hidden_dropout: float = key(0.0, "dropout of the residual branches and embeddings", "say", low=0, below=1)
    attention_dropout: float = key(0.0, "dropout of the attention probabilities", "say", low=0, below=1)
    init_std: float = key(0.02, "standard deviation of the initial weights", "free", low=0)
    sentence_head: str = key(
        "none",
        "bert: additional task on pairs of texts, next_sentence (BERT) or sentence_order (ALBERT)",
        architecture=True,
        choices=("none", "next_sentence", "sentence_order"),
    )
    backend: str = key(
        "auto",
        "implementation of normalization and attention; auto: transformer_engine where it runs",
        "free",
        choices=("auto", "portable", "transformer_engine"),
    )
    fusions: str = key(
        "auto",
        "fused kernels; auto: Megatron-core's where transformer_engine runs",
        "free",
        choices=("auto", "off"),
    )


PLACEMENT_POLICIES = ("static", "flex", "least_loaded", "solve", "auto")


@dataclass
class PlacementConfig:
    policy: str = key(
        "static",
        "static: each expert is computed on one rank only; other policies replicate experts of overloaded ranks: "
        "flex, like FlexMoE; least_loaded, like LLEP; solve: keep replicas for a step and add those that save time; "
        "auto: solve or static, depending on the last step's loads",
        "free",
        choices=PLACEMENT_POLICIES,
    )
    costs: str = key(
        "assumed",
        "costs with which placements are planned; measured: once, at the run's first start; two runs may then differ "
        "in the order of sums",
        "free",
        choices=("assumed", "measured"),
    )
    interval: int = key(
        100,
        "optimizer steps between migrations of primary experts, if the policy is not static; 0: never",
        "free",
        low=0,
    )
    bitwise: bool = key(
        False,
        "make results bitwise independent of the placement: experts compute in blocks and add their weight gradients "
        "in order",
        "free",
    )
    block_rows: int = key(256, "bitwise: assignments (of one rank to one expert) per block", "free", low=1)
    record: bool = key(
        False,
        "record every call's routing counts (routing.trace) and plan (placement_*.plans) in the run folder",
        "free",
    )
    replay: Optional[str] = key(
        None,
        "folder with placement_*.plans of another run, whose plans the training calls repeat; null: plan anew",
        "free",
    )
    max_load: Optional[float] = key(
        None,
        "solve: limit of a rank's assignments in a call, as a multiple of the mean over ranks; replicas are added even "
        "if they cost time; null: no limit",
        "free",
        low=1.0,
    )
    over_limit: str = key(
        "warn",
        "response if no plan stays within max_load; warn: use the closest plan, print one warning and count such "
        "calls; stop: save after that step and end",
        "free",
        choices=("warn", "stop"),
    )
    extra_slots: int = key(
        0, "most replicas of other ranks' experts that a rank stores per MoE layer", "free", low=0, high=64
    )


@dataclass
class MoEConfig:
    num_experts: Optional[int] = key(
        None, "experts per MoE layer; null: a dense model", architecture=True, low=1, high=1 << 16
    )
    top_k: int = key(2, "experts per token", architecture=True, low=1)
    ffn_hidden_size: Optional[int] = key(
        None, "width of a routed expert; null: model.ffn_hidden_size", architecture=True, low=1
    )
    shared_expert_ffn_hidden_size: Optional[int] = key(
        None,
        "width of the shared expert, which processes every token; null: no shared expert",
        architecture=True,
        low=1,
    )
    layers: Any = key(
        1,
        "n: every n-th layer is an MoE layer; or a list with 1 (MoE) or 0 (dense) for each layer",
        architecture=True,
        form="an integer of at least 1, or a list of 0 and 1",
    )
    router_score: str = key(
        "softmax", "function from router logits to expert scores", architecture=True, choices=("softmax", "sigmoid")
    )
    normalize_top_k: bool = key(
        True,
        "scale the weights of a token's experts so that they sum to 1; must be false for softmax with top_k=1",
        architecture=True,
    )
    routed_scaling_factor: Optional[float] = key(
        None, "factor on the weighted sum of the experts' outputs; null: none", architecture=True, above=0
    )
    aux_loss_coeff: float = key(
        0.0, "coefficient of the load-balancing loss over a micro-batch (Switch Transformer)", "say", low=0
    )
    sequence_aux_loss_coeff: float = key(0.0, "coefficient of the load-balancing loss over each sequence", "say", low=0)
    global_aux_loss_coeff: float = key(
        0.0,
        "coefficient of the load-balancing loss over the global batch, with the expert counts of the previous step",
        "say",
        low=0,
    )
    z_loss_coeff: float = key(0.0, "coefficient of the router z-loss (ST-MoE)", "say", low=0)
    expert_bias: bool = key(
        False, "aux-loss-free balancing (DeepSeek-V3); needs router_score=sigmoid", architecture=True
    )
    expert_bias_rate: float = key(1e-3, "change of an expert's bias per optimizer step", "say", low=0)
    num_groups: Optional[int] = key(
        None, "group-limited routing: number of expert groups; null: no groups", architecture=True, low=1
    )
    group_top_k: Optional[int] = key(
        None, "group-limited routing: groups per token; null: no groups", architecture=True, low=1
    )
    group_score_top_k: Optional[int] = key(
        None,
        "group-limited routing: a group's score is the sum of this many best expert scores (DeepSeek-V2: 1, V3: 2); "
        "null: top_k / group_top_k",
        architecture=True,
        low=1,
    )
    capacity_factor: Optional[float] = key(
        None,
        "most tokens of a micro-batch per expert, as a multiple of an even share; null: no limit (dropless)",
        "say",
        above=0,
    )
    drop_policy: str = key(
        "probs",
        "tokens that a full expert drops: the least probable (probs) or the last (position)",
        "say",
        choices=("probs", "position"),
    )
    pipeline_degree: Any = key(
        1,
        "chunks into which an MoE layer cuts its tokens to overlap communication; auto: by measured costs",
        "free",
        form="an integer of at least 1, or auto",
    )
    backward_pipeline_degree: Optional[int] = key(
        None, "chunks of the backward pass; null: pipeline_degree", "free", low=1
    )
    token_budget: Optional[int] = key(
        None,
        "most tokens per chunk; raises the number of chunks above pipeline_degree if needed; null: no limit",
        "free",
        low=1,
    )
    weight_lag: int = key(
        1,
        "number of chunks by which weight gradients lag behind input gradients in the backward pass; no effect with "
        "auto degrees",
        "free",
        low=0,
    )
    memory_strategy: str = key(
        "keep",
        "how the backward pass obtains the activations of an MoE layer: kept, recomputed, communicated again or "
        "offloaded; auto: by measured costs",
        "free",
        choices=(
            *("keep", "recompute", "communicate", "communicate_recompute"),
            *("offload", "offload_recompute", "communicate_offload", "auto"),
        ),
    )
    weights_device: str = key(
        "device",
        "offload target of the routed experts' weights between uses; auto: by predicted time",
        "free",
        choices=("device", "host", "disk", "auto"),
    )
    weight_slots: int = key(
        2,
        "offloaded weights: number of MoE layers whose weights fit on the device at once; a larger number saves "
        "transfers between forward and backward pass",
        "free",
        low=1,
    )
    shard_weights: bool = key(
        True,
        "offloaded weights: shard weights, gradients and optimizer state over the ranks with the same experts",
        "free",
    )
    all_to_all: str = key(
        "flat",
        "token exchange; hierarchical: fewer, larger messages between nodes; auto: by measured costs",
        "free",
        choices=("flat", "hierarchical", "auto"),
    )
    memory_budget: Optional[float] = key(
        None,
        "device memory, in MiB per rank, for MoE buffers, within which auto chooses; null: no limit",
        "free",
        above=0,
    )
    placement: PlacementConfig = field(default_factory=PlacementConfig)
