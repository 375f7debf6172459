"""The typed configuration: every key with its default, its meaning, its choices or range, and what a change means on resume.

Hydra composes YAML groups over these dataclasses; `validate.py` then checks what goes with what, `derived.py` works out what
follows. Nothing heavy is imported here, so that a wrong config fails in a second, before any rank allocates memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from configs.keys import Key, key, table


class ConfigError(ValueError):
    """What a user can get wrong: the message names the field, its value, the rule and a value that would work."""


@dataclass
class ModelConfig:
    family: str = key("gpt", "the kind of model", architecture=True, choices=("gpt", "bert"))
    num_layers: int = key(2, "transformer layers", architecture=True, low=1, high=10_000)
    hidden_size: int = key(64, "channels of the hidden states", architecture=True, low=1)
    ffn_hidden_size: Optional[int] = key(None, "width of a dense layer's FFN; null: 4 * hidden_size", architecture=True, low=1)
    num_attention_heads: int = key(4, "query heads of a layer", architecture=True, low=1)
    num_query_groups: Optional[int] = key(
        None, "key and value heads; null: num_attention_heads (multi-head attention)", architecture=True, low=1
    )
    head_dim: Optional[int] = key(
        None,
        "channels of a head, in latent attention those of a key that do not rotate; null: hidden_size / num_attention_heads",
        architecture=True,
        low=1,
    )
    attention: str = key(
        "grouped",
        "grouped: multi-head and grouped-query; latent: MLA, DeepSeek-V2 and V3",
        architecture=True,
        choices=("grouped", "latent"),
    )
    q_lora_rank: Optional[int] = key(None, "latent: width that queries are compressed to; null: not compressed", architecture=True, low=1)
    kv_lora_rank: int = key(512, "latent: width that keys and values are compressed to", architecture=True, low=1)
    rotary_head_dim: int = key(64, "latent: channels that rotate, one key for all heads", architecture=True, low=1)
    value_head_dim: int = key(128, "latent: channels of a value", architecture=True, low=1)
    # Learned positions are weights: with them another length is another model.
    sequence_length: int = key(64, "tokens of a sample", "refuse", low=1)
    max_positions: Optional[int] = key(
        None, "rope: longest text that an exported model says it takes, if more than sequence_length; an import sets it", "free", low=1
    )
    vocab_size: Optional[int] = key(
        None, "tokens that the model knows; null: the tokenizer's. Storage is padded per layout, the maths is not", architecture=True, low=1
    )
    tie_embeddings: bool = key(True, "one matrix for the embedding and the output layer", architecture=True)
    position_embedding: str = key(
        "rope", "how positions enter: rotary, or a learned vector each", architecture=True, choices=("rope", "learned")
    )
    rotary_base: float = key(10000.0, "base of the rotary frequencies", architecture=True, above=0)
    rotary_fraction: float = key(1.0, "share of each head's channels that rotate", architecture=True, above=0, high=1)
    normalization: str = key("rmsnorm", "kind of norm", architecture=True, choices=("rmsnorm", "layernorm"))
    norm_epsilon: float = key(1e-5, "added to the variance in a norm", architecture=True, above=0)
    norm_position: str = key(
        "pre", "before or after each block; post is for bert: the original BERT", architecture=True, choices=("pre", "post")
    )
    qk_norm: bool = key(False, "a norm on queries and keys", architecture=True)
    qk_norm_over: str = key(
        "head",
        "head: each by itself; all_heads: over their channels together (OLMoE; rmsnorm)",
        architecture=True,
        choices=("head", "all_heads"),
    )
    activation: str = key("swiglu", "of the FFN and of the experts", architecture=True, choices=("swiglu", "gelu", "gelu_tanh"))
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


@dataclass
class PlacementConfig:
    policy: str = key("static", "static: each expert stays at its home rank", "free", needed_for="moving and copying experts")
    interval: int = key(100, "steps between decisions", "free", low=1)
    extra_slots: int = key(0, "expert copies a rank may hold beyond its own", "free", needed_for="moving and copying experts")


@dataclass
class MoEConfig:
    num_experts: Optional[int] = key(None, "experts of an MoE layer; null: a dense model", architecture=True, low=1)
    top_k: int = key(2, "experts that compute a token", architecture=True, low=1)
    ffn_hidden_size: Optional[int] = key(None, "width of an expert; null: model.ffn_hidden_size", architecture=True, low=1)
    shared_expert_ffn_hidden_size: Optional[int] = key(
        None, "width of an expert that computes every token; null: none", architecture=True, low=1
    )
    layers: Any = key(
        1,
        "n: every n-th layer is MoE; or a list of 0 and 1, one per layer",
        architecture=True,
        form="an integer of at least 1, or a list of 0 and 1",
    )
    router_score: str = key("softmax", "of the experts, from the router's logits", architecture=True, choices=("softmax", "sigmoid"))
    normalize_top_k: bool = key(True, "weights of the chosen experts sum to 1; must be false for softmax with top_k=1", architecture=True)
    routed_scaling_factor: Optional[float] = key(None, "of the experts' weighted sum; null: none", architecture=True, above=0)
    aux_loss_coeff: float = key(0.0, "load-balancing loss over a micro-batch (Switch Transformer)", "say", low=0)
    sequence_aux_loss_coeff: float = key(0.0, "the same loss over each sequence", "say", low=0)
    z_loss_coeff: float = key(0.0, "ST-MoE router z-loss", "say", low=0)
    expert_bias: bool = key(False, "aux-loss-free balancing (DeepSeek-V3); needs router_score=sigmoid", architecture=True)
    expert_bias_rate: float = key(1e-3, "what a step adds to, or takes from, an expert's bias", "say", low=0)
    num_groups: Optional[int] = key(None, "group-limited routing: groups of experts; null: no groups", architecture=True, low=1)
    group_top_k: Optional[int] = key(None, "groups that a token's experts come from; null: no groups", architecture=True, low=1)
    capacity_factor: Optional[float] = key(
        None, "tokens that an expert takes, in parts of an even share; null: all (dropless)", "say", above=0
    )
    drop_policy: str = key(
        "probs", "which tokens a full expert leaves out: the least probable, or the last", "say", choices=("probs", "position")
    )
    pipeline_degree: Any = key(
        1, "chunks that a layer's tokens are split into, or auto: by measured costs", "free", form="an integer of at least 1, or auto"
    )
    backward_pipeline_degree: Optional[int] = key(None, "chunks of the backward pass; null: pipeline_degree", "free", low=1)
    weight_lag: int = key(
        1,
        "chunks by which weight gradients follow input gradients in the backward pass; auto degrees choose their own",
        "free",
        low=0,
    )
    memory_strategy: str = key(
        "keep",
        "how the backward pass gets a layer's inputs back (moe/plan.py), or auto: by measured costs",
        "free",
        choices=(
            *("keep", "recompute", "communicate", "communicate_recompute"),
            *("offload", "offload_recompute", "communicate_offload", "auto"),
        ),
    )
    all_to_all: str = key(
        "flat",
        "hierarchical: fewer, larger messages between nodes; auto: by measured costs",
        "free",
        choices=("flat", "hierarchical", "auto"),
    )
    memory_budget: Optional[float] = key(None, "MiB of a rank's MoE buffers that auto choices must fit; null: no limit", "free", above=0)
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass
class ParallelConfig:
    tensor: int = key(1, "ranks that every matrix of attention and dense layers is split over", "free", low=1)
    sequence: bool = key(False, "split the activations between them too, over the tensor ranks", "free")
    pipeline: int = key(1, "ranks that the layers are split over", "free", low=1)
    virtual_pipeline: Optional[int] = key(None, "model chunks per pipeline rank; null: plain 1F1B", "free", low=2)
    context: int = key(1, "ranks that each sequence is split over", "free", needed_for="context parallelism")
    context_kind: str = key("none", "how attention reaches the other ranks' tokens", "free", needed_for="context parallelism")
    expert: int = key(1, "ranks that the experts are spread over", "free", low=1)
    expert_tensor: Optional[int] = key(
        None, "ranks that an expert's matrices are split over; null: tensor when expert is 1, else 1", "free", low=1
    )
    overlap_grad_reduce: bool = key(True, "reduce gradients while the backward pass goes on", "free")
    overlap_param_gather: bool = key(
        True, "gather weights while the forward pass goes on; needs optimizer.distributed and overlap_grad_reduce", "free"
    )
    timeout_seconds: int = key(600, "every collective ends, or fails, within this", "free", low=1)


@dataclass
class DataConfig:
    corpus: Any = key(
        "stdlib",
        "the text: Python's own standard library; or files, folders, or a weighted blend of them",
        "refuse",
        form="stdlib, a path, or a list of paths or of {path: a path, weight: a number above 0}",
    )
    text_key: str = key("text", "field of .jsonl and column of .parquet", "refuse")
    tokenizer: str = key("sentencepiece", "sentencepiece: trained on the corpus; or a .model file, or a Hugging Face folder", "refuse")
    vocab_size: int = key(4096, "tokens of a tokenizer trained here", "refuse", low=1)
    cache_dir: str = key("cache", "folder of tokenizers and token files; safe to delete", "free")
    validation_fraction: float = key(
        0.02, "share of the text for validation: whole documents by a hash of their names, the last one cut", "refuse", above=0, below=1
    )
    num_workers: Optional[int] = key(None, "processes that tokenize; null: all cores", "free", low=1)
    prefetch: int = key(4, "steps of batches made ahead", "free", low=1)
    mask_probability: float = key(0.15, "bert: share of the tokens that are predicted", "refuse", above=0, below=1)
    short_sequence_probability: float = key(0.1, "bert: share of the samples that are cut short", "refuse", low=0, below=1)
    timeout_seconds: int = key(3600, "how long a rank waits for another that prepares the data", "free", low=1)


@dataclass
class OptimizerConfig:
    name: str = key("adamw", "the optimizer", "say", choices=("adamw",))
    lr: float = key(1e-3, "peak learning rate", "say", low=0)
    min_lr: float = key(1e-4, "learning rate at the end of the decay", "say", low=0)
    weight_decay: float = key(0.1, "decoupled weight decay of the matrices", "say", low=0)
    beta1: float = key(0.9, "decay of the first moment", "say", low=0, below=1)
    beta2: float = key(0.95, "decay of the second moment", "say", low=0, below=1)
    epsilon: float = key(1e-8, "added to the root of the second moment", "say", above=0)
    clip_grad: float = key(1.0, "largest norm of a step's gradients; 0: off", "say", low=0)
    schedule: str = key("cosine", "of the learning rate after the warm-up", "say", choices=("cosine", "linear", "constant", "wsd"))
    warmup_steps: int = key(0, "steps in which the learning rate rises to its peak", "say", low=0)
    decay_steps: Optional[int] = key(None, "step at which the learning rate has reached min_lr; null: training.steps", "say", low=1)
    wsd_decay_steps: int = key(0, "length of the final decay of wsd", "say", low=0)
    distributed: bool = key(True, "shard state and master weights over data parallel ranks (ZeRO-1)", "free")
    state_device: str = key(
        "device",
        "where optimizer state lives",
        "free",
        needed_for="optimizer state outside the device's memory",
    )


@dataclass
class ProfileConfig:
    steps: list[int] = key([], "optimizer steps that are traced into run_dir/traces", "free", low=1)
    ranks: Any = key("all", "ranks that write traces", "free", form="all, or a list of ranks")


@dataclass
class TrainingConfig:
    # A schedule that decays until the last step moves with it: configs/changes.py.
    steps: int = key(20, "optimizer steps of the whole run", "say", low=1)
    global_batch_size: int = key(8, "samples per optimizer step", "say", low=1)
    micro_batch_size: int = key(4, "samples per forward pass of one rank", "say", low=1)
    seed: int = key(1234, "of the initial weights, the order of the samples and dropout", "refuse", low=0, high=2**31 - 1)
    precision: str = key("fp32", "of the forward and the backward pass", architecture=True, choices=("fp32", "bf16", "fp16"))
    initial_loss_scale: float = key(65536.0, "fp16: factor that keeps small gradients, at the start", "free", above=0)
    recompute: str = key("none", "what the backward pass computes again rather than keeps", "free", choices=("none", "selective", "full"))
    memory_limit_gib: Optional[float] = key(
        None, "of a rank's tensors; what the plan says cannot fit is refused. null: the GPU's memory", "free", above=0
    )
    dry_run: Optional[bool] = key(None, "run a made-up batch before the first step, to find out what does not fit; null: on a GPU", "free")
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    eval_interval: int = key(0, "steps between evaluations; 0: none", "free", low=0)
    eval_batches: int = key(8, "global batches per evaluation", "say", low=1)
    deterministic: bool = key(False, "only operations that repeat bit for bit", "say")
    device: str = key("auto", "what the ranks compute on", "free", choices=("auto", "cpu", "cuda"))
    time_limit_minutes: Optional[float] = key(
        None, "of wall time: then save and end with status 75, as on SIGTERM; null: none", "free", above=0
    )
    nonfinite: str = key(
        "stop",
        "on NaN or Inf in loss or gradients: stop, skip the batch, or roll back to the last good checkpoint and skip it",
        "say",
        choices=("stop", "skip", "rollback"),
    )
    spike_factor: Optional[float] = key(
        None, "a loss above so many times the median of the last 64 is a spike; null: none is", "say", above=1
    )
    spike: str = key("skip", "what a spike leads to, as for nonfinite", "say", choices=("stop", "skip", "rollback"))
    straggler_factor: Optional[float] = key(
        1.5, "a rank so many times slower than the others of its stage is named; null: none is", "free", above=1
    )
    elastic: bool = key(False, "started on a number of ranks that does not fit: use as many as do, the others stand by", "free")


@dataclass
class CheckpointConfig:
    interval: int = key(0, "steps between checkpoints; 0: only at the end", "free", low=0)
    keep: int = key(3, "newest checkpoints that stay; 0: all", "free", low=0)
    resume: str = key("auto", "where a run begins: auto: its newest good checkpoint; never: fresh; or a checkpoint's path", "free")
    accept_changes: list[str] = key([], "keys that may differ from the checkpoint's although a resume refuses it", "free")
    at_end: bool = key(True, "write a checkpoint when the run ends", "free")
    weights: Optional[str] = key(
        None, "folder of `python -m models.convert import` that a fresh run starts from; null: random weights", "free"
    )
    keep_every: int = key(0, "checkpoints of every so many steps stay as well; 0: none", "free", low=0)
    async_save: bool = key(True, "write while the next steps run; costs host memory for this rank's part of a checkpoint", "free")


@dataclass
class LoggingConfig:
    progress: bool = key(True, "show a line of progress", "free")
    tensorboard: bool = key(True, "write the metrics for TensorBoard", "free")
    wandb: str = key(
        "auto",
        "Weights & Biases; auto: online with an API key, else offline",
        "free",
        choices=("auto", "online", "offline", "off"),
    )
    wandb_project: str = key("mixtrain", "project of Weights & Biases", "free")
    peak_tflops: Optional[float] = key(None, "of one device in this precision; null: known GPUs only", "free", above=0)


@dataclass
class SampleConfig:
    prompts: list[str] = key([], "texts that the trained model continues when a run ends", "free")
    num_tokens: int = key(64, "tokens of a continuation", "free", low=0)
    temperature: float = key(0.8, "of the sampled continuation; 0: greedy", "free", low=0)
    top_p: float = key(0.95, "sample among the tokens that make up so much probability", "free", above=0, high=1)


@dataclass
class Config:
    name: str = key("run", "of the run", "free")
    run_dir: str = key("runs/${name}", "folder that the run writes into", "free")
    plan: Any = key(False, "true: print what the run needs, and do not run; json: the same for scripts", "free", form="true, false or json")
    plan_world_size: Optional[int] = key(
        None, "number of ranks that plan is for; null: those started, or the fewest that fit the layout", "free", low=1
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    # Before the optimizer: in presets its values follow the number of steps, and the first key that is wrong is the one named.
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


KEYS: dict[str, Key] = table(Config)  # dotted name -> what is known of the key
