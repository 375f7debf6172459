"""The typed configuration: every key, its default and its meaning.

Hydra composes YAML groups over these dataclasses; `validate.py` then checks what types alone cannot, `derived.py` works out
what follows. Nothing heavy is imported here, so that a wrong config fails in a second, before any rank allocates memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


class ConfigError(ValueError):
    """What a user can get wrong: the message names the field, its value, the rule and a value that would work."""


@dataclass
class ModelConfig:
    family: str = "gpt"  # gpt | bert
    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: Optional[int] = None  # null: 4 * hidden_size
    num_attention_heads: int = 4
    num_query_groups: Optional[int] = None  # null: num_attention_heads (multi-head attention)
    head_dim: Optional[int] = None  # null: hidden_size / num_attention_heads; latent attention: channels of a key that do not rotate
    attention: str = "grouped"  # grouped (multi-head and grouped-query) | latent (MLA, DeepSeek-V2 and V3)
    q_lora_rank: Optional[int] = None  # latent: width that queries are compressed to; null: not compressed
    kv_lora_rank: int = 512  # latent: width that keys and values are compressed to
    rotary_head_dim: int = 64  # latent: channels that rotate, one key for all heads
    value_head_dim: int = 128  # latent: channels of a value
    sequence_length: int = 64
    vocab_size: Optional[int] = None  # null: the tokenizer's; storage is padded per layout, the maths is not
    tie_embeddings: bool = True
    position_embedding: str = "rope"  # rope | learned
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0  # share of each head's channels that rotate
    normalization: str = "rmsnorm"  # rmsnorm | layernorm
    norm_epsilon: float = 1e-5
    norm_position: str = "pre"  # pre | post (bert only: the original BERT)
    qk_norm: bool = False  # RMSNorm or LayerNorm on queries and keys
    qk_norm_over: str = "head"  # head: each by itself | all_heads: over their channels together (OLMoE; rmsnorm)
    activation: str = "swiglu"  # swiglu | gelu | gelu_tanh
    linear_bias: bool = False
    qkv_bias: bool = False  # implied by linear_bias
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    sentence_head: str = "none"  # bert: none | next_sentence | sentence_order
    backend: str = "auto"  # auto | portable | transformer_engine


@dataclass
class PlacementConfig:
    policy: str = "static"  # static: each expert stays at its home rank
    interval: int = 100  # steps between decisions
    extra_slots: int = 0  # expert copies a rank may hold beyond its own


@dataclass
class MoEConfig:
    num_experts: Optional[int] = None  # null: a dense model
    top_k: int = 2
    ffn_hidden_size: Optional[int] = None  # per expert; null: model.ffn_hidden_size
    shared_expert_ffn_hidden_size: Optional[int] = None  # null: no shared expert
    layers: Any = 1  # n: every n-th layer is MoE; or a list of 0/1, one per layer
    router_score: str = "softmax"  # softmax | sigmoid
    normalize_top_k: bool = True  # weights of the chosen experts sum to 1; must be false for softmax with top_k=1
    routed_scaling_factor: Optional[float] = None
    aux_loss_coeff: float = 0.0  # load-balancing loss over a micro-batch (Switch Transformer)
    sequence_aux_loss_coeff: float = 0.0  # the same loss over each sequence
    z_loss_coeff: float = 0.0  # ST-MoE router z-loss
    expert_bias: bool = False  # aux-loss-free balancing (DeepSeek-V3); needs router_score=sigmoid
    expert_bias_rate: float = 1e-3
    num_groups: Optional[int] = None  # group-limited routing
    group_top_k: Optional[int] = None
    capacity_factor: Optional[float] = None  # null: dropless
    drop_policy: str = "probs"  # probs | position: which tokens go when an expert is full
    pipeline_degree: Any = 1  # number of chunks that a layer's tokens are split into, or auto
    backward_pipeline_degree: Optional[int] = None  # of the backward pass; null: pipeline_degree
    weight_lag: int = 1  # chunks by which weight gradients follow input gradients in the backward pass; auto degrees choose their own
    memory_strategy: str = "keep"  # how the backward pass gets a layer's inputs back: a name of moe/plan.py's STRATEGIES, or auto
    all_to_all: str = "flat"  # flat | hierarchical (fewer, larger messages between nodes) | auto: by measured costs
    memory_budget: Optional[float] = None  # MiB of a rank's MoE buffers that auto choices must fit; null: no limit
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass
class ParallelConfig:
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual_pipeline: Optional[int] = None  # model chunks per pipeline rank; null: plain 1F1B
    context: int = 1
    context_kind: str = "none"
    expert: int = 1
    expert_tensor: Optional[int] = None  # null: `tensor` when expert is 1, else 1
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True  # no effect without optimizer.distributed and overlap_grad_reduce
    timeout_seconds: int = 600  # every collective ends, or fails, within this


@dataclass
class DataConfig:
    corpus: Any = "stdlib"  # stdlib | a path | a list of paths or of {path, weight}
    text_key: str = "text"  # field of .jsonl and column of .parquet
    tokenizer: str = "sentencepiece"  # sentencepiece: trained on the corpus; or a .model file, or a Hugging Face folder
    vocab_size: int = 4096  # of a tokenizer trained here
    cache_dir: str = "cache"  # tokenizers and token files; safe to delete
    validation_fraction: float = 0.02  # of the documents, chosen by a hash of their names
    num_workers: Optional[int] = None  # processes that tokenize; null: all cores
    prefetch: int = 4  # steps of batches made ahead
    mask_probability: float = 0.15  # bert
    short_sequence_probability: float = 0.1  # bert
    timeout_seconds: int = 3600  # how long a rank waits for another that prepares the data


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-3
    min_lr: float = 1e-4
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad: float = 1.0  # 0: off
    schedule: str = "cosine"  # cosine | linear | constant | wsd
    warmup_steps: int = 0
    decay_steps: Optional[int] = None  # null: training.steps
    wsd_decay_steps: int = 0  # length of the final decay of wsd
    distributed: bool = True  # shard state and master weights over data parallel ranks (ZeRO-1)
    state_device: str = "device"  # where optimizer state lives


@dataclass
class ProfileConfig:
    steps: list[int] = field(default_factory=list)  # optimizer steps that are traced into run_dir/traces
    ranks: Any = "all"  # that write traces: all, or a list


@dataclass
class TrainingConfig:
    steps: int = 20
    global_batch_size: int = 8  # samples per optimizer step
    micro_batch_size: int = 4  # samples per forward pass of one rank
    seed: int = 1234
    precision: str = "fp32"  # fp32 | bf16 | fp16
    initial_loss_scale: float = 65536.0  # fp16
    recompute: str = "none"  # none | selective | full
    memory_limit_gib: Optional[float] = None  # of a rank's tensors; what the plan says cannot fit is refused. null: the GPU's memory
    dry_run: Optional[bool] = None  # run a made-up batch before the first step, to find out what does not fit; null: on a GPU
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    eval_interval: int = 0  # 0: no evaluation
    eval_batches: int = 8  # global batches per evaluation
    deterministic: bool = False
    device: str = "auto"  # auto | cpu | cuda
    time_limit_minutes: Optional[float] = None  # of wall time: then save and end with status 75, as on SIGTERM; null: none
    nonfinite: str = "stop"  # stop | skip the batch | rollback to the last good checkpoint and skip it: for NaN or Inf in loss or gradients
    spike_factor: Optional[float] = None  # a loss above so many times the median of the last 64 is a spike; null: none is
    spike: str = "skip"  # stop | skip | rollback, for a spike
    straggler_factor: Optional[float] = 1.5  # a rank so many times slower than the others of its stage is named; null: none is
    elastic: bool = False  # started on a number of ranks that does not fit: use as many as do, the others stand by


@dataclass
class CheckpointConfig:
    interval: int = 0  # 0: only at the end
    keep: int = 3  # newest checkpoints that stay; 0: all
    resume: str = "auto"  # auto | never | a path
    at_end: bool = True
    weights: Optional[str] = None  # a fresh run starts from this folder of `python -m models.convert import`
    keep_every: int = 0  # checkpoints of every so many steps stay as well; 0: none
    async_save: bool = True  # write while the next steps run; costs host memory for this rank's part of a checkpoint


@dataclass
class LoggingConfig:
    progress: bool = True
    tensorboard: bool = True
    wandb: str = "auto"  # auto: online with an API key, else offline; or online | offline | off
    wandb_project: str = "mixtrain"
    peak_tflops: Optional[float] = None  # of one device in this precision; null: known GPUs only


@dataclass
class SampleConfig:
    prompts: list[str] = field(default_factory=list)  # continued by the trained model when a run ends
    num_tokens: int = 64
    temperature: float = 0.8
    top_p: float = 0.95


@dataclass
class Config:
    name: str = "run"
    run_dir: str = "runs/${name}"
    plan: Any = False  # true: print what the run needs, and do not run; json: the same for scripts
    plan_world_size: Optional[int] = None  # number of ranks that plan is for; null: those started, or the fewest that fit the layout
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
