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
    family: str = key("gpt", "the kind of model", architecture=True, choices=("gpt", "bert"))
    num_layers: int = key(2, "transformer layers", architecture=True, low=1, high=10_000)
    hidden_size: int = key(64, "channels of the hidden states", architecture=True, low=1)
    ffn_hidden_size: Optional[int] = key(
        None, "width of a dense layer's FFN; null: 4 * hidden_size", architecture=True, low=1
    )
    num_attention_heads: int = key(4, "query heads of a layer", architecture=True, low=1)
    num_query_groups: Optional[int] = key(
        None, "key and value heads; null: num_attention_heads (multi-head attention)", architecture=True, low=1
    )
    head_dim: Optional[int] = key(
        None,
        "channels of a head, in latent attention those of a key that do not rotate; null: hidden_size / "
        "num_attention_heads",
        architecture=True,
        low=1,
    )
    attention: str = key(
        "grouped",
        "grouped: multi-head and grouped-query; latent: MLA, DeepSeek-V2 and V3",
        architecture=True,
        choices=("grouped", "latent"),
    )
    q_lora_rank: Optional[int] = key(
        None, "latent: width that queries are compressed to; null: not compressed", architecture=True, low=1
    )
    kv_lora_rank: int = key(512, "latent: width that keys and values are compressed to", architecture=True, low=1)
    rotary_head_dim: int = key(64, "latent: channels that rotate, one key for all heads", architecture=True, low=1)
    value_head_dim: int = key(128, "latent: channels of a value", architecture=True, low=1)
    # Learned positions are weights: with them another length is another model.
    sequence_length: int = key(64, "tokens of a sample", "refuse", low=1, stays_with_model=True)
    max_positions: Optional[int] = key(
        None,
        "rope: longest text that an exported model says it takes, if more than sequence_length; an import sets it",
        "free",
        low=1,
        stays_with_model=True,
    )
    sliding_window: Optional[int] = key(
        None,
        "tokens that a token attends to, the last ones, itself among them (Mistral, Qwen); null: all",
        architecture=True,
        low=1,
    )
    sliding_window_from: int = key(
        0, "first layer with the sliding window; those before attend to all tokens", architecture=True, low=0
    )
    export_family: Optional[str] = key(
        None,
        "model_type that a Hugging Face export has; null: of the first family that holds the model. An import sets it",
        "free",
        choices=EXPORT_FAMILIES,
        stays_with_model=True,
    )
    config_json: Optional[str] = key(
        None,
        "a JSON object: what the config.json that the model came from says and nobody reads; an export writes it again",
        "free",
        stays_with_model=True,
    )
    vocab_size: Optional[int] = key(
        None,
        "tokens that the model knows; null: the tokenizer's. Storage is padded per layout, the maths is not",
        architecture=True,
        low=1,
    )
    tie_embeddings: bool = key(True, "one matrix for the embedding and the output layer", architecture=True)
    position_embedding: str = key(
        "rope", "how positions enter: rotary, or a learned vector each", architecture=True, choices=("rope", "learned")
    )
    rotary_base: float = key(10000.0, "base of the rotary frequencies", architecture=True, above=0)
    rotary_fraction: float = key(1.0, "share of each head's channels that rotate", architecture=True, above=0, high=1)
    rotary_scaling: Any = key(
        None,
        "rope: frequencies for texts beyond the length of a first training, in Hugging Face's names; rope_type: "
        "linear, llama3, yarn or longrope",
        architecture=True,
        form="a mapping such as {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}",
    )
    normalization: str = key("rmsnorm", "kind of norm", architecture=True, choices=("rmsnorm", "layernorm"))
    norm_epsilon: float = key(1e-5, "added to the variance in a norm", architecture=True, above=0)
    norm_position: str = key(
        "pre",
        "before or after each block; post is for bert: the original BERT",
        architecture=True,
        choices=("pre", "post"),
    )
    qk_norm: bool = key(False, "a norm on queries and keys", architecture=True)
    qk_norm_over: str = key(
        "head",
        "head: each by itself; all_heads: over their channels together (OLMoE; rmsnorm)",
        architecture=True,
        choices=("head", "all_heads"),
    )
    activation: str = key(
        "swiglu", "of the FFN and of the experts", architecture=True, choices=("swiglu", "gelu", "gelu_tanh")
    )
    linear_bias: bool = key(False, "biases in all linear layers", architecture=True)
    qkv_bias: bool = key(False, "biases of queries, keys and values; linear_bias brings them too", architecture=True)
    hidden_dropout: float = key(0.0, "dropout of the residual branches and embeddings", "say", low=0, below=1)
    attention_dropout: float = key(0.0, "dropout of the attention probabilities", "say", low=0, below=1)
    init_std: float = key(0.02, "standard deviation of the initial weights", "free", low=0)
    sentence_head: str = key(
        "none",
        "bert: a second task on pairs of texts (BERT's or ALBERT's)",
        architecture=True,
        choices=("none", "next_sentence", "sentence_order"),
    )
    backend: str = key(
        "auto",
        "who computes norms and attention; auto: transformer_engine where it runs",
        "free",
        choices=("auto", "portable", "transformer_engine"),
    )
    fusions: str = key(
        "auto",
        "kernels that do several operations at once; auto: Megatron-core's where transformer_engine runs",
        "free",
        choices=("auto", "off"),
    )


PLACEMENT_POLICIES = ("static", "flex", "least_loaded", "solve", "auto")


@dataclass
class PlacementConfig:
    policy: str = key(
        "static",
        "static: each expert is computed at its home. Others: where a rank gets more than others, copies on other "
        "ranks take part; flex: FlexMoE's, least_loaded: LLEP's, solve: ours, which keeps copies for "
        "the step and makes those that pay; auto: solve or static, by the last step's loads",
        "free",
        choices=PLACEMENT_POLICIES,
    )
    costs: str = key(
        "assumed",
        "what planners reckon with; measured: at the run's first start, kept in its checkpoints; two runs then differ "
        "in the order of sums",
        "free",
        choices=("assumed", "measured"),
    )
    interval: int = key(
        100, "steps between moves of experts' homes, where the policy is not static; 0: never", "free", low=0
    )
    bitwise: bool = key(
        False,
        "the same bits whatever the placement: experts compute blocks, whose weight gradients are added one by one",
        "free",
    )
    block_rows: int = key(
        256, "assignments of a rank and an expert that make a block of moe.placement.bitwise", "free", low=1
    )
    record: bool = key(
        False,
        "write every call's routing counts to routing.trace in the run folder, and its plan to placement_*.plans",
        "free",
    )
    replay: Optional[str] = key(
        None,
        "folder with another run's placement_*.plans: each training call is placed as there; null: planned",
        "free",
    )
    max_load: Optional[float] = key(
        None,
        "most assignments that a rank may compute in a call, by the mean rank's; null: no limit. Only solve keeps it, "
        "with copies that cost time where it must",
        "free",
        low=1.0,
    )
    over_limit: str = key(
        "warn",
        "where no plan keeps moe.placement.max_load; warn: the one that is least over it runs, said once and counted; "
        "stop: the run saves after that step, and ends",
        "free",
        choices=("warn", "stop"),
    )
    extra_slots: int = key(
        0, "copies of other ranks' experts that a rank may hold for each MoE layer", "free", low=0, high=64
    )


@dataclass
class MoEConfig:
    num_experts: Optional[int] = key(
        None, "experts of an MoE layer; null: a dense model", architecture=True, low=1, high=1 << 16
    )
    top_k: int = key(2, "experts that compute a token", architecture=True, low=1)
    ffn_hidden_size: Optional[int] = key(
        None, "width of an expert; null: model.ffn_hidden_size", architecture=True, low=1
    )
    shared_expert_ffn_hidden_size: Optional[int] = key(
        None, "width of an expert that computes every token; null: none", architecture=True, low=1
    )
    layers: Any = key(
        1,
        "n: every n-th layer is MoE; or a list of 0 and 1, one per layer",
        architecture=True,
        form="an integer of at least 1, or a list of 0 and 1",
    )
    router_score: str = key(
        "softmax", "of the experts, from the router's logits", architecture=True, choices=("softmax", "sigmoid")
    )
    normalize_top_k: bool = key(
        True, "weights of the chosen experts sum to 1; must be false for softmax with top_k=1", architecture=True
    )
    routed_scaling_factor: Optional[float] = key(
        None, "of the experts' weighted sum; null: none", architecture=True, above=0
    )
    aux_loss_coeff: float = key(0.0, "load-balancing loss over a micro-batch (Switch Transformer)", "say", low=0)
    sequence_aux_loss_coeff: float = key(0.0, "the same loss over each sequence", "say", low=0)
    global_aux_loss_coeff: float = key(
        0.0, "the same loss over the global batch, by the choices of the update before", "say", low=0
    )
    z_loss_coeff: float = key(0.0, "ST-MoE router z-loss", "say", low=0)
    expert_bias: bool = key(
        False, "aux-loss-free balancing (DeepSeek-V3); needs router_score=sigmoid", architecture=True
    )
    expert_bias_rate: float = key(1e-3, "what a step adds to, or takes from, an expert's bias", "say", low=0)
    num_groups: Optional[int] = key(
        None, "group-limited routing: groups of experts; null: no groups", architecture=True, low=1
    )
    group_top_k: Optional[int] = key(
        None, "groups that a token's experts come from; null: no groups", architecture=True, low=1
    )
    group_score_top_k: Optional[int] = key(
        None,
        "best experts of a group whose scores are summed to choose it (DeepSeek-V2: 1, V3: 2); null: top_k / "
        "group_top_k",
        architecture=True,
        low=1,
    )
    capacity_factor: Optional[float] = key(
        None,
        "tokens of a micro-batch that an expert takes, in parts of an even share; null: all (dropless)",
        "say",
        above=0,
    )
    drop_policy: str = key(
        "probs",
        "which tokens a full expert leaves out: the least probable, or the last",
        "say",
        choices=("probs", "position"),
    )
    pipeline_degree: Any = key(
        1,
        "chunks that a layer's tokens are split into, or auto: by measured costs",
        "free",
        form="an integer of at least 1, or auto",
    )
    backward_pipeline_degree: Optional[int] = key(
        None, "chunks of the backward pass; null: pipeline_degree", "free", low=1
    )
    token_budget: Optional[int] = key(
        None,
        "most tokens of a chunk: passes take more chunks than pipeline_degree where that is needed; null: none",
        "free",
        low=1,
    )
    weight_lag: int = key(
        1,
        "chunks by which weight gradients follow input gradients in the backward pass; auto degrees choose their own",
        "free",
        low=0,
    )
    memory_strategy: str = key(
        "keep",
        "how the backward pass gets a layer's inputs back (moe/chunk_plan.py), or auto: by measured costs",
        "free",
        choices=(
            *("keep", "recompute", "communicate", "communicate_recompute"),
            *("offload", "offload_recompute", "communicate_offload", "auto"),
        ),
    )
    weights_device: str = key(
        "device",
        "where the routed experts' weights lie between their uses; auto: by predicted time",
        "free",
        choices=("device", "host", "disk", "auto"),
    )
    weight_slots: int = key(
        2,
        "off the device: MoE layers whose weights a rank's device holds; more spare transfers where passes turn",
        "free",
        low=1,
    )
    shard_weights: bool = key(
        True,
        "off the device: ranks that hold the same experts keep a part each of weights, gradients and state",
        "free",
    )
    all_to_all: str = key(
        "flat",
        "hierarchical: fewer, larger messages between nodes; auto: by measured costs",
        "free",
        choices=("flat", "hierarchical", "auto"),
    )
    memory_budget: Optional[float] = key(
        None, "MiB of a rank's MoE buffers that auto choices must fit; null: no limit", "free", above=0
    )
    placement: PlacementConfig = field(default_factory=PlacementConfig)
