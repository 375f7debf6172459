"""The typed configuration: every key with its default, meaning, choices or range, and the effect of a changed value on
a resumed run.

Hydra composes groups of YAML presets over these dataclasses, configs/rules checks the combinations of values, and
`derived.py` computes values that follow from them. The constructors `free`, `say`, `refuse` and `architecture`
state the effect of a changed value (configs/keys.py). Nothing heavy is imported here, so that a wrong configuration
fails within a second, before any rank allocates memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from configs.keys import Key, architecture, free, refuse, say, table
from configs.model_schema import ModelConfig, MoEConfig


@dataclass
class ParallelConfig:
    layout: str = free(
        "given",
        "given: the layout that these keys set; auto: first search for the fastest layout, without changing keys of "
        "the command line",
        choices=("given", "auto"),
    )
    tensor: int = free(1, "ranks over which the matrices of attention and dense layers are sharded", low=1)
    sequence: bool = free(
        False, "sequence parallelism: shard the activations between tensor-parallel layers over the tensor ranks"
    )
    pipeline: int = free(1, "pipeline stages over which the layers are divided", low=1)
    virtual_pipeline: Optional[int] = free(
        None, "model chunks per pipeline rank (interleaved schedule); null: plain 1F1B", low=2
    )
    context: int = free(1, "ranks over which each sequence is sharded", low=1)
    context_heads: Optional[int] = free(
        None,
        "context ranks per group; ranks of a group exchange heads for sequence rows, groups exchange keys and values; "
        "null: the number that sends the fewest bytes, or 1 with separate documents",
        low=1,
    )
    expert: int = free(1, "ranks over which the experts are distributed", low=1)
    expert_tensor: Optional[int] = free(
        None, "ranks over which each expert's matrices are sharded; null: tensor if expert is 1, else 1", low=1
    )
    overlap_grad_reduce: bool = free(True, "reduce gradients during the backward pass")
    overlap_param_gather: bool = free(
        True, "gather weights during the forward pass; needs optimizer.distributed and overlap_grad_reduce"
    )
    timeout_seconds: int = free(600, "seconds after which a collective that has not finished fails", low=1)
    priority_exchanges: bool = free(
        True, "on a GPU: give exchanges of expert and pipeline parallelism priority over other kernels"
    )
    exchange_sms: Optional[int] = free(
        None,
        "on a GPU: multiprocessors that the experts' matmuls leave free for concurrent exchanges; null: 20 if expert "
        "is above 1, else 0",
        low=0,
    )
    early_communicators: bool = free(
        True, "on a GPU: create all NCCL communicators at the start by splitting one, instead of each at its first use"
    )
    device_connections: Optional[int] = free(
        None,
        "on a GPU: hardware queues (CUDA_DEVICE_MAX_CONNECTIONS); null: 32 if expert is above 1, else 1 if tensor is "
        "above 1, else the driver's 8",
        low=1,
        high=32,
    )


@dataclass
class DataConfig:
    corpus: Any = refuse(
        "stdlib",
        "training text: stdlib (Python's standard library), or files, folders, or a weighted blend of them",
        form="stdlib, a path, or a list of paths or of {path: a path, weight: a number above 0}",
    )
    text_key: str = refuse(
        "text", "name of the text field in .jsonl, .ndjson and .json files and of the text column in .parquet files"
    )
    documents_in_text: str = refuse(
        "file",
        "extent of a document in .txt, .raw and .tokens files: the file, the text between blank lines, or a line",
        choices=("file", "blank_line", "line"),
    )
    documents: str = say(
        "joined",
        "gpt; joined: tokens attend to all documents of their sample; separate: only to their own document, in which "
        "positions start at 0",
        choices=("joined", "separate"),
    )
    tokenizer: str = refuse(
        "sentencepiece",
        "sentencepiece: train a tokenizer on the corpus; else the path of a .model file or a Hugging Face folder",
    )
    vocab_size: int = refuse(4096, "vocabulary size, in tokens, of a tokenizer trained on the corpus", low=1)
    cache_dir: str = free("cache", "folder for trained tokenizers and token files; safe to delete")
    validation_fraction: float = refuse(
        0.02,
        "fraction of the text held out for validation: documents chosen by a hash of their names, of which the last "
        "may be cut; 0: none",
        low=0,
        below=1,
    )
    validation_corpora: Any = refuse(
        {},
        "additional texts for validation only, by name; each has its own reported loss",
        form="a mapping of names (letters, digits, _ - .) to stdlib, a path, or a list of paths",
    )
    num_workers: Optional[int] = free(None, "processes that tokenize; null: one per core", low=1)
    prefetch: int = free(4, "number of optimizer steps for which batches are prepared ahead", low=1)
    mask_probability: float = refuse(0.15, "bert: fraction of the tokens that are predicted", above=0, below=1)
    short_sequence_probability: float = refuse(0.1, "bert: fraction of the samples that are shortened", low=0, below=1)
    timeout_seconds: int = free(3600, "seconds that a process waits while another process prepares the data", low=1)


@dataclass
class OptimizerConfig:
    name: str = say("adamw", "the optimizer", choices=("adamw",))
    lr: float = say(1e-3, "peak learning rate", low=0)
    min_lr: float = say(1e-4, "learning rate at the end of the decay", low=0)
    weight_decay: float = say(0.1, "decoupled weight decay of the matrices", low=0)
    beta1: float = say(0.9, "decay rate of the first moment", low=0, below=1)
    beta2: float = say(0.95, "decay rate of the second moment", low=0, below=1)
    epsilon: float = say(1e-8, "number added to the square root of the second moment", above=0)
    clip_grad: float = say(1.0, "gradient norm above which gradients are scaled down to it; 0: no clipping", low=0)
    schedule: str = say(
        "cosine",
        "learning-rate schedule after the warm-up; wsd: constant, then a final decay",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    warmup_steps: int = say(0, "optimizer steps of linear learning-rate warm-up", low=0)
    decay_steps: Optional[int] = say(
        None, "optimizer step at which the learning rate reaches min_lr; null: training.steps", low=1
    )
    wsd_decay_steps: int = say(0, "wsd: optimizer steps of the final decay", low=0)
    distributed: bool = free(True, "shard optimizer state and master weights over the data-parallel ranks (ZeRO-1)")
    state_device: str = free(
        "device",
        "offload target of the optimizer state; auto: fill the device first, then the host, then the disk",
        choices=("device", "host", "disk", "auto"),
    )
    engine: str = free(
        "auto",
        "with offloaded state: where weights are updated, on the device, on the host, or split over both; auto: by "
        "measured times",
        choices=("auto", "device_stream", "host", "split"),
    )
    bucket_parameters: int = free(
        2**24,
        "with offloaded state: most parameters of a rank that are transferred and updated together; never more than an "
        "eighth of the rank's parameters",
        low=4096,
    )
    early_update: str = free(
        "auto",
        "with offloaded state: update it during the backward pass, and again if the step is clipped; auto: while few "
        "steps are clipped",
        choices=("auto", "always", "never"),
    )
    moment_dtype: str = say(
        "fp32", "precision of the stored first moment; the second moment is always fp32", choices=("fp32", "bf16")
    )


@dataclass
class MemoryConfig:
    host_budget: Optional[float] = free(
        None,
        "host memory per rank, in MiB, for offloaded optimizer state, activations and experts; null: the rank's share "
        "of 80% of the memory that is free",
        above=0,
    )
    disk_budget: Optional[float] = free(
        None,
        "disk space per rank, in MiB, for optimizer state in disk_dir; null: the rank's share of 80% of the free space",
        above=0,
    )
    disk_dir: Optional[str] = free(
        None, "folder on a local disk of the node for optimizer state; no file remains after the run"
    )


@dataclass
class ProfileConfig:
    steps: list[int] = free([], "optimizer steps whose profiler traces are written to run_dir/traces", low=1)
    ranks: Any = free("all", "ranks that write traces", form="all, or a list of ranks")


@dataclass
class TrainingConfig:
    # The effect of a change depends on the learning-rate schedule: configs/changes.py.
    steps: int = say(20, "optimizer steps of the whole run, including those before a resume", low=1)
    global_batch_size: int = say(8, "samples per optimizer step", low=1)
    micro_batch_size: int = say(4, "samples per forward pass of one rank", low=1)
    seed: int = refuse(1234, "random seed of the initial weights, the sample order and dropout", low=0, high=2**31 - 1)
    precision: str = architecture(
        "fp32", "precision of the forward and backward pass", choices=("fp32", "bf16", "fp16")
    )
    initial_loss_scale: float = free(
        65536.0, "fp16: initial loss scale, which keeps small gradients from underflow", above=0
    )
    recompute: str = free(
        "none",
        "activations that the backward pass recomputes: none, selective (attention "
        "scores and the wide tensors of dense layers) or full (all but layer inputs)",
        choices=("none", "selective", "full"),
    )
    activation_offload: Any = free(
        "none",
        "layer inputs stored on the host until the backward pass, in MiB per rank; auto: as many as fit; needs "
        "recompute=full",
        form="none, auto or a number greater than 0",
    )
    pass_order: str = free(
        "by_micro_batch",
        "schedule of a step's passes; by_layer: all micro-batches pass through a layer before the next layer starts, "
        "so that offloaded weights are loaded once; auto: by predicted time",
        choices=("by_micro_batch", "by_layer", "auto"),
    )
    token_tile: Optional[int] = free(
        None,
        "tokens that the output layer and, with recompute=full, dense layers compute at once; null: the output layer "
        "up to 512 tokens, or 1/64 of more tokens (at least 128), and dense layers all tokens",
        low=1,
    )
    memory_limit_gib: Optional[float] = free(
        None,
        "device memory, in GiB, for a rank's tensors; a run predicted to need more is refused; null: the GPU's memory",
        above=0,
    )
    expandable_segments: bool = free(
        True, "on a GPU: let the allocator's segments grow, which reduces fragmentation if sizes vary"
    )
    dry_run: Optional[bool] = free(
        None, "run a synthetic batch before the first step to detect a lack of memory; null: only on a GPU"
    )
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    eval_interval: int = free(0, "optimizer steps between evaluations; 0: no evaluation", low=0)
    eval_batches: int = say(8, "global batches per evaluation", low=1)
    deterministic: bool = say(False, "use only operations whose results repeat bit for bit")
    device: str = free(
        "auto", "device type of the ranks; auto: cuda if there is a GPU", choices=("auto", "cpu", "cuda")
    )
    time_limit_minutes: Optional[float] = free(
        None,
        "minutes after which the run saves a checkpoint and ends with status 75, as on SIGTERM; null: no limit",
        above=0,
    )
    nonfinite: str = say(
        "stop",
        "response to NaN or Inf in loss or gradients: stop, skip the batch, or roll back to the last good checkpoint "
        "and skip the batch",
        choices=("stop", "skip", "rollback"),
    )
    spike_factor: Optional[float] = say(
        None,
        "a loss above this multiple of the median of the last 64 losses counts as a spike; null: no check",
        above=1,
    )
    spike: str = say("skip", "response to a spike, with the choices of nonfinite", choices=("stop", "skip", "rollback"))
    straggler_factor: Optional[float] = free(
        1.5, "report a rank that is slower than the others of its stage by this factor; null: no report", above=1
    )
    elastic: bool = free(
        False, "if the number of ranks does not fit the layout, use as many as fit; the others stay idle"
    )


@dataclass
class CheckpointConfig:
    interval: int = free(0, "optimizer steps between checkpoints; 0: only at the end", low=0)
    keep: int = free(3, "number of newest checkpoints to keep; 0: all", low=0)
    resume: str = free(
        "auto", "checkpoint to start from; auto: the run's newest valid one; never: none, start at step 0; or a path"
    )
    accept_changes: list[str] = free([], "keys whose changes a resume accepts although it would otherwise refuse them")
    at_end: bool = free(True, "write a checkpoint when the run ends")
    weights: Optional[str] = free(
        None,
        "folder written by `python -m models.convert import`, whose weights a new run starts from; null: random "
        "weights",
    )
    keep_every: int = free(0, "also keep checkpoints whose step is a multiple of this; 0: none", low=0)
    async_save: bool = free(
        True, "write checkpoints while the next steps run, which needs host memory for the rank's shard of a checkpoint"
    )


@dataclass
class LoggingConfig:
    progress: bool = free(True, "show a progress line")
    tensorboard: bool = free(True, "write the metrics for TensorBoard")
    wandb: str = free(
        "auto",
        "Weights & Biases; auto: online with an API key, else offline",
        choices=("auto", "online", "offline", "off"),
    )
    wandb_project: str = free("mixtrain", "name of the Weights & Biases project")
    peak_tflops: Optional[float] = free(
        None, "peak TFLOP/s of one device in this precision, to compute MFU; null: known GPUs only", above=0
    )


@dataclass
class SampleConfig:
    prompts: list[str] = free([], "prompts that the trained model continues at the end of the run")
    num_tokens: int = free(64, "tokens to generate per prompt", low=0)
    temperature: float = free(0.8, "sampling temperature; 0: greedy decoding", low=0)
    top_p: float = free(
        0.95, "nucleus sampling: sample from the likeliest tokens that together have this probability", above=0, high=1
    )


@dataclass
class Config:
    name: str = free("run", "name of the run")
    run_dir: str = free("runs/${name}", "folder into which the run writes")
    plan: Any = free(
        False,
        "true: print the predicted memory, traffic and time instead of running; json: the same as JSON; search: search "
        "for the fastest layout",
        form="true, false, json or search",
    )
    plan_world_size: Optional[int] = free(
        None, "number of ranks to plan for; null: the started ranks, or the fewest that fit the layout", low=1
    )
    hardware: Optional[str] = free(
        None,
        "hardware figures for predicted times: a name in configs/hardware or the path of a .yaml file; null: none, "
        "except in a search, which uses those of this machine",
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
