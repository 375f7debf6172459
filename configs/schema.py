"""The typed configuration: every key with its default, meaning, choices or range, and the effect of a changed value on
a resumed run.

Hydra composes groups of YAML presets over these dataclasses, configs/rules checks the combinations of values, and
`derived.py` computes values that follow from them. Nothing heavy is imported here, so that a wrong configuration fails
within a second, before any rank allocates memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from configs.keys import Key, key, table
from configs.model_schema import ModelConfig, MoEConfig


@dataclass
class ParallelConfig:
    layout: str = key(
        "given",
        "given: the layout that these keys set; auto: first search for the fastest layout, without changing keys of "
        "the command line",
        "free",
        choices=("given", "auto"),
    )
    tensor: int = key(1, "ranks over which the matrices of attention and dense layers are sharded", "free", low=1)
    sequence: bool = key(
        False, "sequence parallelism: between these layers, shard activations over the tensor ranks, too", "free"
    )
    pipeline: int = key(1, "pipeline stages over which the layers are divided", "free", low=1)
    virtual_pipeline: Optional[int] = key(
        None, "model chunks per pipeline rank (interleaved schedule); null: plain 1F1B", "free", low=2
    )
    context: int = key(1, "ranks over which each sequence is sharded", "free", low=1)
    context_heads: Optional[int] = key(
        None,
        "context ranks per group; ranks of a group exchange heads for sequence rows, groups exchange keys and values; "
        "null: the number that sends the fewest bytes, or 1 with separate documents",
        "free",
        low=1,
    )
    expert: int = key(1, "ranks over which the experts are distributed", "free", low=1)
    expert_tensor: Optional[int] = key(
        None,
        "ranks over which each expert's matrices are sharded; null: tensor if expert is 1, else 1",
        "free",
        low=1,
    )
    overlap_grad_reduce: bool = key(True, "reduce gradients during the backward pass", "free")
    overlap_param_gather: bool = key(
        True,
        "gather weights during the forward pass; needs optimizer.distributed and overlap_grad_reduce",
        "free",
    )
    timeout_seconds: int = key(600, "seconds after which a collective that has not finished fails", "free", low=1)
    priority_exchanges: bool = key(
        True, "on a GPU: give exchanges of expert and pipeline parallelism priority over other kernels", "free"
    )
    exchange_sms: Optional[int] = key(
        None,
        "on a GPU: multiprocessors that the experts' matmuls leave free for concurrent exchanges; null: 20 if expert "
        "is above 1, else 0",
        "free",
        low=0,
    )
    early_communicators: bool = key(
        True,
        "on a GPU: create all NCCL communicators at the start by splitting one, instead of each at its first use",
        "free",
    )
    device_connections: Optional[int] = key(
        None,
        "on a GPU: hardware queues (CUDA_DEVICE_MAX_CONNECTIONS); null: 32 if expert is above 1, else 1 if tensor is "
        "above 1, else the driver's 8",
        "free",
        low=1,
        high=32,
    )


@dataclass
class DataConfig:
    corpus: Any = key(
        "stdlib",
        "training text: stdlib (Python's standard library), or files, folders, or a weighted blend of them",
        "refuse",
        form="stdlib, a path, or a list of paths or of {path: a path, weight: a number above 0}",
    )
    text_key: str = key(
        "text",
        "name of the text field in .jsonl, .ndjson and .json files and of the text column in .parquet files",
        "refuse",
    )
    documents_in_text: str = key(
        "file",
        "extent of a document in .txt, .raw and .tokens files: the file, the text between blank lines, or a line",
        "refuse",
        choices=("file", "blank_line", "line"),
    )
    documents: str = key(
        "joined",
        "gpt; joined: tokens attend to all documents of their sample; separate: only to their own document, in which "
        "positions start at 0",
        "say",
        choices=("joined", "separate"),
    )
    tokenizer: str = key(
        "sentencepiece",
        "sentencepiece: train a tokenizer on the corpus; else the path of a .model file or a Hugging Face folder",
        "refuse",
    )
    vocab_size: int = key(4096, "vocabulary size, in tokens, of a tokenizer trained on the corpus", "refuse", low=1)
    cache_dir: str = key("cache", "folder for trained tokenizers and token files; safe to delete", "free")
    validation_fraction: float = key(
        0.02,
        "fraction of the text held out for validation: documents chosen by a hash of their names, of which the last "
        "may be cut; 0: none",
        "refuse",
        low=0,
        below=1,
    )
    validation_corpora: Any = key(
        {},
        "additional texts for validation only, by name; each has its own reported loss",
        "refuse",
        form="a mapping of names (letters, digits, _ - .) to stdlib, a path, or a list of paths",
    )
    num_workers: Optional[int] = key(None, "processes that tokenize; null: one per core", "free", low=1)
    prefetch: int = key(4, "number of optimizer steps for which batches are prepared ahead", "free", low=1)
    mask_probability: float = key(0.15, "bert: fraction of the tokens that are predicted", "refuse", above=0, below=1)
    short_sequence_probability: float = key(
        0.1, "bert: fraction of the samples that are shortened", "refuse", low=0, below=1
    )
    timeout_seconds: int = key(
        3600, "seconds that a process waits while another process prepares the data", "free", low=1
    )


@dataclass
class OptimizerConfig:
    name: str = key("adamw", "the optimizer", "say", choices=("adamw",))
    lr: float = key(1e-3, "peak learning rate", "say", low=0)
    min_lr: float = key(1e-4, "learning rate at the end of the decay", "say", low=0)
    weight_decay: float = key(0.1, "decoupled weight decay of the matrices", "say", low=0)
    beta1: float = key(0.9, "decay rate of the first moment", "say", low=0, below=1)
    beta2: float = key(0.95, "decay rate of the second moment", "say", low=0, below=1)
    epsilon: float = key(1e-8, "number added to the square root of the second moment", "say", above=0)
    clip_grad: float = key(1.0, "gradient norm to which a step is clipped; 0: no clipping", "say", low=0)
    schedule: str = key(
        "cosine",
        "learning-rate schedule after the warm-up; wsd: constant, then a final decay",
        "say",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    warmup_steps: int = key(0, "optimizer steps of linear learning-rate warm-up", "say", low=0)
    decay_steps: Optional[int] = key(
        None, "optimizer step at which the learning rate reaches min_lr; null: training.steps", "say", low=1
    )
    wsd_decay_steps: int = key(0, "wsd: optimizer steps of the final decay", "say", low=0)
    distributed: bool = key(
        True, "shard optimizer state and master weights over the data-parallel ranks (ZeRO-1)", "free"
    )
    state_device: str = key(
        "device",
        "offload target of the optimizer state; auto: fill the device first, then the host, then the disk",
        "free",
        choices=("device", "host", "disk", "auto"),
    )
    engine: str = key(
        "auto",
        "with offloaded state: where weights are updated, on the device, on the host, or split over both; auto: by "
        "measured times",
        "free",
        choices=("auto", "device_stream", "host", "split"),
    )
    bucket_parameters: int = key(
        2**24,
        "with offloaded state: most parameters of a rank that are transferred and updated together; never more than an "
        "eighth of the rank's parameters",
        "free",
        low=4096,
    )
    early_update: str = key(
        "auto",
        "with offloaded state: update it during the backward pass, and again if the step is clipped; auto: while few "
        "steps are clipped",
        "free",
        choices=("auto", "always", "never"),
    )
    moment_dtype: str = key(
        "fp32",
        "precision of the stored first moment; the second moment is always fp32",
        "say",
        choices=("fp32", "bf16"),
    )


@dataclass
class MemoryConfig:
    host_budget: Optional[float] = key(
        None,
        "host memory per rank, in MiB, for offloaded optimizer state, activations and experts; null: the rank's share "
        "of 80% of the memory that is free",
        "free",
        above=0,
    )
    disk_budget: Optional[float] = key(
        None,
        "disk space per rank, in MiB, for optimizer state in disk_dir; null: the rank's share of 80% of the free space",
        "free",
        above=0,
    )
    disk_dir: Optional[str] = key(
        None, "folder on a local disk of the node for optimizer state; no file remains after the run", "free"
    )


@dataclass
class ProfileConfig:
    steps: list[int] = key([], "optimizer steps whose profiler traces are written to run_dir/traces", "free", low=1)
    ranks: Any = key("all", "ranks that write traces", "free", form="all, or a list of ranks")


@dataclass
class TrainingConfig:
    # The effect of a change depends on the learning-rate schedule: configs/changes.py.
    steps: int = key(20, "optimizer steps of the whole run, including those before a resume", "say", low=1)
    global_batch_size: int = key(8, "samples per optimizer step", "say", low=1)
    micro_batch_size: int = key(4, "samples per forward pass of one rank", "say", low=1)
    seed: int = key(
        1234, "random seed of the initial weights, the sample order and dropout", "refuse", low=0, high=2**31 - 1
    )
    precision: str = key(
        "fp32", "precision of the forward and backward pass", architecture=True, choices=("fp32", "bf16", "fp16")
    )
    initial_loss_scale: float = key(
        65536.0, "fp16: initial loss scale, which keeps small gradients from underflow", "free", above=0
    )
    recompute: str = key(
        "none",
        "activations that the backward pass recomputes: none, selective (attention "
        "scores and the wide tensors of dense layers) or full (all but layer inputs)",
        "free",
        choices=("none", "selective", "full"),
    )
    activation_offload: Any = key(
        "none",
        "layer inputs stored on the host until the backward pass, in MiB per rank; auto: as many as fit; needs "
        "recompute=full",
        "free",
        form="none, auto or a number greater than 0",
    )
    pass_order: str = key(
        "by_micro_batch",
        "schedule of a step's passes; by_layer: all micro-batches pass through a layer before the next layer starts, "
        "so that offloaded weights are loaded once; auto: by predicted time",
        "free",
        choices=("by_micro_batch", "by_layer", "auto"),
    )
    token_tile: Optional[int] = key(
        None,
        "tokens that the output layer and, with recompute=full, dense layers compute at once; null: the output layer "
        "up to 512 tokens, or 1/64 of more tokens (at least 128), and dense layers all tokens",
        "free",
        low=1,
    )
    memory_limit_gib: Optional[float] = key(
        None,
        "device memory, in GiB, for a rank's tensors; a run predicted to need more is refused; null: the GPU's memory",
        "free",
        above=0,
    )
    expandable_segments: bool = key(
        True, "on a GPU: let the allocator's segments grow, which reduces fragmentation if sizes vary", "free"
    )
    dry_run: Optional[bool] = key(
        None, "run a synthetic batch before the first step to detect a lack of memory; null: only on a GPU", "free"
    )
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    eval_interval: int = key(0, "optimizer steps between evaluations; 0: no evaluation", "free", low=0)
    eval_batches: int = key(8, "global batches per evaluation", "say", low=1)
    deterministic: bool = key(False, "use only operations whose results repeat bit for bit", "say")
    device: str = key(
        "auto", "device type of the ranks; auto: cuda if there is a GPU", "free", choices=("auto", "cpu", "cuda")
    )
    time_limit_minutes: Optional[float] = key(
        None,
        "minutes after which the run saves a checkpoint and ends with status 75, as on SIGTERM; null: no limit",
        "free",
        above=0,
    )
    nonfinite: str = key(
        "stop",
        "response to NaN or Inf in loss or gradients: stop, skip the batch, or roll back to the last good checkpoint "
        "and skip the batch",
        "say",
        choices=("stop", "skip", "rollback"),
    )
    spike_factor: Optional[float] = key(
        None,
        "a loss above this multiple of the median of the last 64 losses counts as a spike; null: no check",
        "say",
        above=1,
    )
    spike: str = key(
        "skip", "response to a spike, with the choices of nonfinite", "say", choices=("stop", "skip", "rollback")
    )
    straggler_factor: Optional[float] = key(
        1.5,
        "report a rank that is slower than the others of its stage by this factor; null: no report",
        "free",
        above=1,
    )
    elastic: bool = key(
        False, "if the number of ranks does not fit the layout, use as many as fit; the others stay idle", "free"
    )


@dataclass
class CheckpointConfig:
    interval: int = key(0, "optimizer steps between checkpoints; 0: only at the end", "free", low=0)
    keep: int = key(3, "number of newest checkpoints to keep; 0: all", "free", low=0)
    resume: str = key(
        "auto",
        "checkpoint to start from; auto: the run's newest valid one; never: none, start at step 0; or a path",
        "free",
    )
    accept_changes: list[str] = key(
        [], "keys that may differ from the checkpoint although a resume would otherwise refuse the change", "free"
    )
    at_end: bool = key(True, "write a checkpoint when the run ends", "free")
    weights: Optional[str] = key(
        None,
        "folder written by `python -m models.convert import`, whose weights a new run starts from; null: random "
        "weights",
        "free",
    )
    keep_every: int = key(0, "also keep checkpoints whose step is a multiple of this; 0: none", "free", low=0)
    async_save: bool = key(
        True,
        "write checkpoints while the next steps run, which needs host memory for the rank's shard of a checkpoint",
        "free",
    )


@dataclass
class LoggingConfig:
    progress: bool = key(True, "show a progress line", "free")
    tensorboard: bool = key(True, "write the metrics for TensorBoard", "free")
    wandb: str = key(
        "auto",
        "Weights & Biases; auto: online with an API key, else offline",
        "free",
        choices=("auto", "online", "offline", "off"),
    )
    wandb_project: str = key("mixtrain", "name of the Weights & Biases project", "free")
    peak_tflops: Optional[float] = key(
        None, "peak TFLOP/s of one device in this precision, to compute MFU; null: known GPUs only", "free", above=0
    )


@dataclass
class SampleConfig:
    prompts: list[str] = key([], "prompts that the trained model continues at the end of the run", "free")
    num_tokens: int = key(64, "tokens to generate per prompt", "free", low=0)
    temperature: float = key(0.8, "sampling temperature; 0: greedy decoding", "free", low=0)
    top_p: float = key(
        0.95,
        "nucleus sampling: sample from the likeliest tokens that together have this probability",
        "free",
        above=0,
        high=1,
    )


@dataclass
class Config:
    name: str = key("run", "name of the run", "free")
    run_dir: str = key("runs/${name}", "folder into which the run writes", "free")
    plan: Any = key(
        False,
        "true: print the predicted memory, traffic and time instead of running; json: the same as JSON; search: search "
        "for the fastest layout",
        "free",
        form="true, false, json or search",
    )
    plan_world_size: Optional[int] = key(
        None, "number of ranks to plan for; null: the started ranks, or the fewest that fit the layout", "free", low=1
    )
    hardware: Optional[str] = key(
        None,
        "hardware figures for predicted times: a name in configs/hardware or the path of a .yaml file; null: none, "
        "except in a search, which uses those of this machine",
        "free",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    # Before the optimizer, since the first wrong key is reported, and presets of the optimizer refer to the steps.
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


KEYS: dict[str, Key] = table(Config)  # by dotted name
