"""What a Hugging Face family is to us: how its config.json reads, and which of its tensors are which of ours, in what layout.

One table of rules per family; import and export read the same table in the two directions. Needs no transformers package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from configs.schema import Config, ConfigError

Overrides = dict[str, dict[str, Any]]
HfConfig = dict[str, Any]


@dataclass(frozen=True)
class Heads:
    """n query heads, g key/value heads, d channels each."""

    n: int
    g: int
    d: int


def _join_qkv(parts: list[torch.Tensor], heads: Heads) -> torch.Tensor:
    # Megatron keeps the rows of a group together: its queries, its key, its value.
    sizes = [heads.n // heads.g * heads.d, heads.d, heads.d]
    grouped = [part.reshape(heads.g, size, *part.shape[1:]) for part, size in zip(parts, sizes)]
    return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])


def _split_qkv(full: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    sizes = [heads.n // heads.g * heads.d, heads.d, heads.d]
    grouped = full.reshape(heads.g, sum(sizes), *full.shape[1:]).split(sizes, dim=1)
    return [part.reshape(-1, *full.shape[1:]) for part in grouped]


@dataclass(frozen=True)
class Layout:
    """How one logical tensor comes from Hugging Face's tensors, and back."""

    to_ours: Callable[[list[torch.Tensor], Heads], torch.Tensor]
    to_theirs: Callable[[torch.Tensor, Heads], list[torch.Tensor]]


SAME = Layout(lambda parts, _: parts[0], lambda full, _: [full])
TRANSPOSED = Layout(lambda parts, _: parts[0].t(), lambda full, _: [full.t()])  # GPT-2's Conv1D keeps [inputs, outputs]
QKV = Layout(_join_qkv, _split_qkv)
QKV_IN_ONE = Layout(
    lambda parts, heads: _join_qkv(list(parts[0].chunk(3)), heads), lambda full, heads: [torch.cat(_split_qkv(full, heads))]
)
QKV_IN_ONE_TRANSPOSED = Layout(
    lambda parts, heads: _join_qkv(list(parts[0].t().chunk(3)), heads), lambda full, heads: [torch.cat(_split_qkv(full, heads)).t()]
)
GATE_UP = Layout(lambda parts, _: torch.cat(parts), lambda full, _: list(full.chunk(2)))


@dataclass(frozen=True)
class Rule:
    """`ours` is the same weight as `theirs` in `layout`. {l} stands for every layer, {e} for every expert.

    `only` limits a rule with {l} to "dense" or "moe" layers; `when` to models that have such weights at all.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME
    only: str = "all"
    when: Callable[[Config], bool] = lambda config: True


def weight_and_bias(ours: str, theirs: str, layout: Layout = SAME, when: Callable[[Config], bool] = lambda config: True) -> list[Rule]:
    bias_layout = {TRANSPOSED: SAME, QKV_IN_ONE_TRANSPOSED: QKV_IN_ONE}.get(layout, layout)
    return [
        Rule(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs.split()), layout, when=when),
        Rule(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs.split()), bias_layout, when=when),
    ]


def _nothing(name: str, config: Config) -> bool:
    return False


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config in both directions, its rules, and what its files may hold besides or call otherwise."""

    model_type: str
    read: Callable[[HfConfig], Overrides]
    write: Callable[[Config], HfConfig]
    rules: tuple[Rule, ...]
    base_prefix: str  # files of the bare model lack it
    is_moe: bool = False
    carries_nothing: Callable[[str, Config], bool] = _nothing  # names of tensors that are no part of the model
    other_names: tuple[tuple[str, str], ...] = ()  # (now, in old files)


def expect(hf: HfConfig, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """The value of a key of config.json. Raises ConfigError unless it is one of `allowed`."""
    value = hf.get(key, default)
    if value not in allowed:
        raise ConfigError(f"config.json {key} ({value}) is not supported: it must be one of {', '.join(map(str, allowed))}.")
    return value


def is_untied(config: Config) -> bool:
    """Whether the output layer has weights of its own."""
    return not config.model.tie_embeddings


GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
GELU_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
