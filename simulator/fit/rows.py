"""Measured steps of other trainers: rows in the columns of vTrain's validation data (arXiv 2312.12391), as configs."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.compose import compose
from configs.schema import Config, ConfigError
from simulator.clock.hardware import Hardware
from simulator.clock.work import MIXTRAIN, Recipe

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
VOCABULARY = 50257
# Megatron-DeepSpeed as vTrain ran it: scores in memory, gradients in half precision, one reduction after the passes.
MEGATRON_DEEPSPEED = Recipe(
    fused_attention=False, gradient_bytes=2, reduces_beside=False, hides_tensor=False, early_loss_grads=False
)


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured: its config, on how many ranks, by which recipe, and its seconds."""

    name: str
    config: Config
    world_size: int
    vocab_size: int
    seconds: float
    recipe: Recipe = MIXTRAIN
    figures: tuple[tuple[str, float], ...] = ()  # of the hardware that were others for this step

    def on(self, hardware: Hardware) -> Hardware:
        """The hardware that it ran on."""
        return hardware.with_values(dict(self.figures), "of this step") if self.figures else hardware

    @property
    def group(self) -> tuple[Any, ...]:
        """What steps have in common whose layouts can be compared."""
        model = self.config.model
        return self.world_size, self.config.training.global_batch_size, model.hidden_size, model.num_layers


def read_rows(path: Path) -> list[MeasuredStep]:
    """The steps of a CSV file in these columns; other columns are passed over. Raises ConfigError, naming file, line
    and column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    missing = [name for name in COLUMNS if not lines or name not in lines[0]]
    if missing:
        raise ConfigError(f"{path} must be a CSV file with the columns {', '.join(COLUMNS)}; it lacks {missing[0]!r}.")
    return [_measured(path, number, line) for number, line in enumerate(lines, 2)]


def _measured(path: Path, number: int, line: dict[str, str]) -> MeasuredStep:
    values: dict[str, float] = {}
    for column, name in COLUMNS.items():
        try:
            values[name] = float(line[column])
        except (TypeError, ValueError):
            raise ConfigError(f"{path}, line {number}: {column} ({line[column]!r}) must be a number.") from None
        if not 0 < values[name] < float("inf") or name != "milliseconds" and values[name] != int(values[name]):
            kind = "a positive number" if name == "milliseconds" else "a whole number above 0"
            raise ConfigError(f"{path}, line {number}: {column} ({line[column]!r}) must be {kind}.")
    seconds = values.pop("milliseconds") / 1e3
    whole = {name: int(value) for name, value in values.items()}
    if problem := _problem(whole):
        raise ConfigError(f"{path}, line {number}: {problem}.")
    name = f"{path.name}:{number}"
    return MeasuredStep(name, _config(whole), whole["ranks"], VOCABULARY, seconds, MEGATRON_DEEPSPEED)


def _problem(row: dict[str, int]) -> str:
    product = row["tensor"] * row["data"] * row["pipeline"]
    if product != row["ranks"]:
        return f"tensor x data x pipeline parallelism ({product}) must be # GPUs ({row['ranks']})"
    if row["global_batch"] % (row["micro_batch"] * row["data"]):
        return (
            f"global batch ({row['global_batch']}) must be a multiple of micro batch x data parallelism "
            f"({row['micro_batch'] * row['data']})"
        )
    if row["layers"] % row["pipeline"]:
        return f"# layers ({row['layers']}) must be a multiple of pipeline parallelism ({row['pipeline']})"
    if row["hidden"] % row["heads"] or row["heads"] % row["tensor"]:
        return f"attention heads ({row['heads']}) must divide the hidden size and be a multiple of tensor parallelism"
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


def _config(row: dict[str, int]) -> Config:
    config = copy.deepcopy(_base())
    model, parallel, training = config.model, config.parallel, config.training
    model.hidden_size, model.num_layers = row["hidden"], row["layers"]
    model.num_attention_heads, model.sequence_length = row["heads"], row["sequence"]
    parallel.tensor, parallel.pipeline = row["tensor"], row["pipeline"]
    training.global_batch_size, training.micro_batch_size = row["global_batch"], row["micro_batch"]
    return config


def read_all(paths: Iterable[Path]) -> list[MeasuredStep]:
    """The steps of several files."""
    return [row for path in paths for row in read_rows(path)]
