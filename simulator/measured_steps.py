"""Measured training steps with their configs: of other training frameworks, as CSV rows in the columns of vTrain's
validation data (arXiv 2312.12391), and of this project's runs."""

from __future__ import annotations

import copy
import csv
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from base.errors import ConfigError, reason_of
from configs.compose import compose, load
from configs.job import Job
from configs.schema import Config
from simulator.clock.hardware import Hardware
from simulator.clock.passes import MIXTRAIN, Recipe

COLUMNS = {
    "# GPUs": "ranks",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
    "iteration time (ms)": "milliseconds",
}
WAY_OUT = "Correct or remove the line."
VOCABULARY = 50257
CONFIG, PLAN, METRICS = "config.yaml", "plan.json", "metrics.jsonl"
FIRST_STEP = 3  # earlier steps include set-up and measurements
# Megatron-DeepSpeed in vTrain's measurements: stored scores, half precision gradients, one reduction after the passes.
MEGATRON_DEEPSPEED = Recipe(
    fused_attention=False, gradient_bytes=2, overlaps_reductions=False, hides_tensor=False, early_loss_grads=False
)


@dataclass(frozen=True)
class MeasuredStep:
    """A measured training step: its job, the properties of the framework that ran it, and its seconds."""

    name: str
    job: Job
    seconds: float
    recipe: Recipe = MIXTRAIN
    figures: tuple[tuple[str, float], ...] = ()  # figures of the hardware that had other values in this step

    def on(self, hardware: Hardware) -> Hardware:
        """Return a copy of the hardware with the values that some of its figures had during this step."""
        return hardware.with_values(dict(self.figures), "of this step") if self.figures else hardware

    @property
    def group(self) -> tuple[Any, ...]:
        """Number of ranks, global batch and model size; steps with the same values differ only in layout."""
        config = self.job.config
        return self.job.world_size, config.training.global_batch_size, config.model.hidden_size, config.model.num_layers


def read_rows(path: Path) -> list[MeasuredStep]:
    """Read measured steps from a CSV file with a line per step; columns other than COLUMNS are ignored.

    Raises ConfigError with file, line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            lines, columns = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}. Give a CSV file of steps or a run's folder.") from None
    if missing := [name for name in COLUMNS if name not in columns]:
        wanted = f"a CSV file with the columns {', '.join(COLUMNS)}"
        raise ConfigError(f"{path} must be {wanted}; it lacks {missing[0]!r}. Add the column.")
    if not lines:
        raise ConfigError(f"{path} has no lines below its header; expected one line per measured step. Add lines.")
    return [_measured(path, number, line) for number, line in enumerate(lines, 2)]


def _measured(path: Path, number: int, line: dict[str, str]) -> MeasuredStep:
    values: dict[str, float] = {}
    for column, name in COLUMNS.items():
        try:
            values[name] = float(line[column])
        except (TypeError, ValueError):
            raise ConfigError(
                f"{path}, line {number}: {column} ({line[column]!r}) must be a number. {WAY_OUT}"
            ) from None
        if not 0 < values[name] < float("inf") or name != "milliseconds" and values[name] != int(values[name]):
            kind = "a positive number" if name == "milliseconds" else "a whole number above 0"
            raise ConfigError(f"{path}, line {number}: {column} ({line[column]!r}) must be {kind}. {WAY_OUT}")
    seconds = values.pop("milliseconds") / 1e3
    whole = {name: int(value) for name, value in values.items()}
    if problem := _layout_problem(whole):
        raise ConfigError(f"{path}, line {number}: {problem}. {WAY_OUT}")
    config = copy.deepcopy(_base())
    model, parallel, training = config.model, config.parallel, config.training
    model.hidden_size, model.num_layers = whole["hidden"], whole["layers"]
    model.num_attention_heads, model.sequence_length = whole["heads"], whole["sequence"]
    parallel.tensor, parallel.pipeline = whole["tensor"], whole["pipeline"]
    training.global_batch_size, training.micro_batch_size = whole["global_batch"], whole["micro_batch"]
    job = Job(config, whole["ranks"], VOCABULARY, "cuda")
    return MeasuredStep(f"{path.name}:{number}", job, seconds, MEGATRON_DEEPSPEED)


def _layout_problem(row: dict[str, int]) -> str:
    product = row["tensor"] * row["data"] * row["pipeline"]
    if product != row["ranks"]:
        return f"tensor x data x pipeline parallelism ({product}) must equal # GPUs ({row['ranks']})"
    if row["global_batch"] % (row["micro_batch"] * row["data"]):
        return (
            f"global batch ({row['global_batch']}) must be a multiple of micro batch x data parallelism "
            f"({row['micro_batch'] * row['data']})"
        )
    if row["layers"] % row["pipeline"]:
        return f"# layers ({row['layers']}) must be a multiple of pipeline parallelism ({row['pipeline']})"
    if row["hidden"] % row["heads"] or row["heads"] % row["tensor"]:
        rule = f"divide the hidden size ({row['hidden']}) and be a multiple of tensor parallelism ({row['tensor']})"
        return f"attention heads ({row['heads']}) must {rule}"
    return ""


@cache
def _base() -> Config:
    return compose(
        [
            *("model=gpt_tiny", "training.device=cuda", "training.precision=fp16", "training.recompute=full"),
            *("optimizer.distributed=false", "parallel.overlap_grad_reduce=false"),
            *("parallel.overlap_param_gather=false", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
            *("model.activation=gelu", "model.normalization=layernorm", "model.position_embedding=learned"),
            *("model.linear_bias=true", "model.tie_embeddings=true", "model.ffn_hidden_size=null"),
            *("model.num_query_groups=null", "model.qkv_bias=true"),
        ]
    )


def read_run(run_dir: Path) -> MeasuredStep:
    """Read the folder of a run as one measured step: the median of its steps from the third (FIRST_STEP) on.

    Raises ConfigError if the folder lacks a file or such steps.
    """
    for name in (CONFIG, PLAN, METRICS):
        if not (run_dir / name).is_file():
            raise ConfigError(f"{run_dir} must be the folder of a run; it has no {name}. Give the run_dir of a run.")
    try:
        file = run_dir / PLAN
        plan = json.loads(file.read_text(encoding="utf-8"))
        world_size, vocab_size, device = int(plan["world_size"]), int(plan["vocab_size"]), str(plan["device"])
        file = run_dir / METRICS
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is damaged ({reason_of(error)}). Restore the file, or give a different run."
        ) from None
    seconds = [
        float(line["step_seconds"]) for line in lines if line.get("step", 0) >= FIRST_STEP and "step_seconds" in line
    ]
    if not seconds:
        rule = f"must have measured steps from step {FIRST_STEP} on; it has none"
        raise ConfigError(f"{run_dir} {rule}. Run it again with a larger training.steps.")
    job = Job(load(run_dir / CONFIG), world_size, vocab_size, device)
    return MeasuredStep(run_dir.name, job, statistics.median(seconds))


def read_steps(paths: Iterable[Path]) -> list[MeasuredStep]:
    """Return the measured steps of CSV files and of run folders. Raises ConfigError."""
    return [step for path in paths for step in ([read_run(path)] if path.is_dir() else read_rows(path))]
