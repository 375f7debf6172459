"""The typed configuration: every key with its default, its meaning, its choices or range, and what a change means on
resume.

Hydra composes YAML groups over these dataclasses; the rules then say what goes with what, `derived.py` works out what
follows. Nothing heavy is imported here, so that a wrong config fails in a second, before any rank allocates memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from configs.keys import Key, key, table
from configs.model_schema import ModelConfig, MoEConfig


class ConfigError(ValueError):
    """What a user can get wrong: the message names the field, its value, the rule and a value that would work."""


@dataclass
class ParallelConfig:
    layout: str = key(
        "given",
        "who chooses the layout; auto: a search before the run, which keeps what the command line says",
        "free",
        choices=("given", "auto"),
    )
    tensor: int = key(1, "ranks that every matrix of attention and dense layers is split over", "free", low=1)
    sequence: bool = key(False, "split the activations between them too, over the tensor ranks", "free")
    pipeline: int = key(1, "ranks that the layers are split over", "free", low=1)
    virtual_pipeline: Optional[int] = key(None, "model chunks per pipeline rank; null: plain 1F1B", "free", low=2)
    context: int = key(1, "ranks that each sequence is spread over", "free", low=1)
    context_heads: Optional[int] = key(
        None,
        "of the context ranks, how many exchange heads for rows; the others exchange keys and values; null: chosen",
        "free",
        low=1,
    )
    expert: int = key(1, "ranks that the experts are spread over", "free", low=1)
    expert_tensor: Optional[int] = key(
        None, "ranks that an expert's matrices are split over; null: tensor when expert is 1, else 1", "free", low=1
    )
    overlap_grad_reduce: bool = key(True, "reduce gradients while the backward pass goes on", "free")
    overlap_param_gather: bool = key(
        True,
        "gather weights while the forward pass goes on; needs optimizer.distributed and overlap_grad_reduce",
        "free",
    )
    timeout_seconds: int = key(600, "every collective ends, or fails, within this", "free", low=1)
    priority_exchanges: bool = key(
        True, "on a GPU: exchanges of experts and of pipeline stages go before other waiting work", "free"
    )
    exchange_sms: Optional[int] = key(
        None,
        "on a GPU: multiprocessors that the experts' products leave to exchanges beside them; null: 20 where experts "
        "are spread over ranks",
        "free",
        low=0,
    )
    early_communicators: bool = key(
        True, "on a GPU: set NCCL's communicators up at the start, all from one, and not at their first use", "free"
    )
    device_connections: Optional[int] = key(
        None,
        "on a GPU: hardware queues, as CUDA_DEVICE_MAX_CONNECTIONS; null: 32 with experts over ranks, 1 with tensor "
        "above 1, else the driver's 8",
        "free",
        low=1,
        high=32,
    )


@dataclass
class DataConfig:
    corpus: Any = key(
        "stdlib",
        "the text: Python's own standard library; or files, folders, or a weighted blend of them",
        "refuse",
        form="stdlib, a path, or a list of paths or of {path: a path, weight: a number above 0}",
    )
    text_key: str = key("text", "field of .jsonl, .ndjson and .json, and column of .parquet", "refuse")
    documents_in_text: str = key(
        "file",
        "what a document is in a .txt, .raw or .tokens: the file, what lies between empty lines, or a line",
        "refuse",
        choices=("file", "blank_line", "line"),
    )
    documents: str = key(
        "joined",
        "gpt: whether a sample's documents attend to each other (joined), or each only to itself, with positions of "
        "its own (separate)",
        "say",
        choices=("joined", "separate"),
    )
    tokenizer: str = key(
        "sentencepiece", "sentencepiece: trained on the corpus; or a .model file, or a Hugging Face folder", "refuse"
    )
    vocab_size: int = key(4096, "tokens of a tokenizer trained here", "refuse", low=1)
    cache_dir: str = key("cache", "folder of tokenizers and token files; safe to delete", "free")
    validation_fraction: float = key(
        0.02,
        "share of the text for validation: whole documents by a hash of their names, the last one cut; 0: none",
        "refuse",
        low=0,
        below=1,
    )
    validation_corpora: Any = key(
        {},
        "further texts for validation, by name, none of which is trained on; each has a loss of its own",
        "refuse",
        form="a mapping of names (letters, digits, _ - .) to stdlib, a path, or a list of paths",
    )
    num_workers: Optional[int] = key(None, "processes that tokenize; null: all cores", "free", low=1)
    prefetch: int = key(4, "steps of batches made ahead", "free", low=1)
    mask_probability: float = key(0.15, "bert: share of the tokens that are predicted", "refuse", above=0, below=1)
    short_sequence_probability: float = key(
        0.1, "bert: share of the samples that are cut short", "refuse", low=0, below=1
    )
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
    schedule: str = key(
        "cosine", "of the learning rate after the warm-up", "say", choices=("cosine", "linear", "constant", "wsd")
    )
    warmup_steps: int = key(0, "steps in which the learning rate rises to its peak", "say", low=0)
    decay_steps: Optional[int] = key(
        None, "step at which the learning rate has reached min_lr; null: training.steps", "say", low=1
    )
    wsd_decay_steps: int = key(0, "length of the final decay of wsd", "say", low=0)
    distributed: bool = key(True, "shard state and master weights over data parallel ranks (ZeRO-1)", "free")
    state_device: str = key(
        "device",
        "where optimizer state lives; auto: the device first, then the host, then the disk, as far as each has room",
        "free",
        choices=("device", "host", "disk", "auto"),
    )
    engine: str = key(
        "auto",
        "what updates the weights whose state is not on the device: the device, the host, or both; auto: as measured",
        "free",
        choices=("auto", "device_stream", "host", "split"),
    )
    bucket_parameters: int = key(
        2**24,
        "parameters of a rank whose state moves and is updated as one, at most; an eighth of them all where that is "
        "less",
        "free",
        low=4096,
    )
    early_update: str = key(
        "auto",
        "update state off the device while the backward pass goes on, again where the step was clipped; auto: where "
        "few are",
        "free",
        choices=("auto", "always", "never"),
    )
    moment_dtype: str = key(
        "fp32", "what the first moment is kept in; the second stays fp32", "say", choices=("fp32", "bf16")
    )


@dataclass
class MemoryConfig:
    host_budget: Optional[float] = key(
        None,
        "MiB of host memory for a rank's optimizer state, activations and experts' offloads; null: a rank's share of "
        "80% of what is free",
        "free",
        above=0,
    )
    disk_budget: Optional[float] = key(
        None,
        "MiB of disk_dir for a rank's optimizer state; null: a rank's share of 80% of what is free",
        "free",
        above=0,
    )
    disk_dir: Optional[str] = key(
        None, "folder on a disk of this node, for optimizer state; nothing is left in it", "free"
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
    seed: int = key(
        1234, "of the initial weights, the order of the samples and dropout", "refuse", low=0, high=2**31 - 1
    )
    precision: str = key(
        "fp32", "of the forward and the backward pass", architecture=True, choices=("fp32", "bf16", "fp16")
    )
    initial_loss_scale: float = key(65536.0, "fp16: factor that keeps small gradients, at the start", "free", above=0)
    recompute: str = key(
        "none", "what the backward pass computes again rather than keeps", "free", choices=("none", "selective", "full")
    )
    activation_offload: Any = key(
        "none",
        "inputs of layers that the host keeps until the backward pass, in MiB a rank; needs recompute=full",
        "free",
        form="none, auto or a number greater than 0",
    )
    pass_order: str = key(
        "by_micro_batch",
        "which of a step's passes come first; by_layer: all micro-batches go through a layer before the next, so that "
        "its weights come once; auto: by predicted time",
        "free",
        choices=("by_micro_batch", "by_layer", "auto"),
    )
    token_tile: Optional[int] = key(
        None,
        "tokens whose logits are there at once; with recompute=full also those that a dense layer takes at once. null: "
        "logits of all of up to 512, else at most 1/64 or 128; dense layers take all",
        "free",
        low=1,
    )
    memory_limit_gib: Optional[float] = key(
        None, "of a rank's tensors; what the plan says cannot fit is refused. null: the GPU's memory", "free", above=0
    )
    expandable_segments: bool = key(
        True, "on a GPU: let blocks of its memory grow, which leaves fewer gaps where sizes change", "free"
    )
    dry_run: Optional[bool] = key(
        None, "run a made-up batch before the first step, to find out what does not fit; null: on a GPU", "free"
    )
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
        "on NaN or Inf in loss or gradients: stop, skip the batch, or roll back to the last good checkpoint and skip "
        "it",
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
    elastic: bool = key(
        False, "started on a number of ranks that does not fit: use as many as do, the others stand by", "free"
    )


@dataclass
class CheckpointConfig:
    interval: int = key(0, "steps between checkpoints; 0: only at the end", "free", low=0)
    keep: int = key(3, "newest checkpoints that stay; 0: all", "free", low=0)
    resume: str = key(
        "auto", "where a run begins: auto: its newest good checkpoint; never: fresh; or a checkpoint's path", "free"
    )
    accept_changes: list[str] = key(
        [], "keys that may differ from the checkpoint's although a resume refuses it", "free"
    )
    at_end: bool = key(True, "write a checkpoint when the run ends", "free")
    weights: Optional[str] = key(
        None, "folder of `python -m models.convert import` that a fresh run starts from; null: random weights", "free"
    )
    keep_every: int = key(0, "checkpoints of every so many steps stay as well; 0: none", "free", low=0)
    async_save: bool = key(
        True, "write while the next steps run; costs host memory for this rank's part of a checkpoint", "free"
    )


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
    plan: Any = key(
        False,
        "true: print what the run needs, and do not run; json: the same for scripts; search: the fastest layout",
        "free",
        form="true, false, json or search",
    )
    plan_world_size: Optional[int] = key(
        None, "number of ranks that plan is for; null: those started, or the fewest that fit the layout", "free", low=1
    )
    hardware: Optional[str] = key(
        None,
        "file of configs/hardware, or path of another, whose figures predict a step; null: none, or for a search that "
        "of this machine",
        "free",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    # Before the optimizer: in presets its values follow the number of steps, and the first key that is wrong is the one
    # named.
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


KEYS: dict[str, Key] = table(Config)  # dotted name -> what is known of the key
