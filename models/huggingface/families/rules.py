"""What a Hugging Face family is to us: its config.json's keys, and which of its tensors are which of ours, in what
layout and shape.

One table of keys and one of rules per family; import and export read the same tables in the two directions. Needs no
transformers package, and no torch: the plan of a run asks for families.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs import derived
from configs.schema import Config
from models.huggingface.families.keys import HfConfig, Keys

Overrides = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Heads:
    """n query heads, g key/value heads, d channels each."""

    n: int
    g: int
    d: int


Run = tuple[int, int, int]  # rows of one of theirs: first row there, first row of ours, length
# From the numbers of rows of each of theirs: the runs of each.
Runs = Callable[[Sequence[int], Heads], list[list[Run]]]


def _one_after_the_other(rows: Sequence[int], _: Heads) -> list[list[Run]]:
    firsts = itertools.accumulate(rows, initial=0)
    return [[(0, first, length)] for first, length in zip(firsts, rows)]


def _grouped(rows: Sequence[int], heads: Heads) -> list[list[Run]]:
    # Megatron keeps the rows of a group together: its queries, its key, its value.
    sizes = [heads.n // heads.g * heads.d, heads.d, heads.d]
    of_group = sum(sizes)
    return [
        [(group * size, group * of_group + first, size) for group in range(heads.g)]
        for size, first in zip(sizes, itertools.accumulate(sizes, initial=0))
    ]


def _grouped_in_one(rows: Sequence[int], heads: Heads) -> list[list[Run]]:
    parts = _grouped(rows, heads)
    firsts = itertools.accumulate((heads.n * heads.d, heads.g * heads.d), initial=0)
    return [[(first + there, here, size) for first, runs in zip(firsts, parts) for there, here, size in runs]]


@dataclass(frozen=True)
class Layout:
    """How one logical tensor lies in Hugging Face's tensors: which rows of theirs are which of ours. Both directions
    follow from it."""

    runs: Runs = _one_after_the_other
    transposed: bool = False  # theirs: what is called a row of theirs is a column of their tensor


SAME = GATE_UP = Layout()
TRANSPOSED = Layout(transposed=True)  # GPT-2's Conv1D keeps [inputs, outputs]
QKV = Layout(_grouped)
QKV_IN_ONE = Layout(_grouped_in_one)
QKV_IN_ONE_TRANSPOSED = Layout(_grouped_in_one, transposed=True)


def sizes(config: Config) -> dict[str, int]:
    """The lengths that rules call by name."""
    model, moe, heads = config.model, config.moe, config.model.num_attention_heads
    head, rotary, value = derived.head_dim(config), model.rotary_head_dim, model.value_head_dim
    return {
        "vocab": model.vocab_size or 0,
        "positions": model.sequence_length,
        "hidden": model.hidden_size,
        "ffn": derived.ffn_hidden_size(config),
        "gate_up": 2 * derived.ffn_hidden_size(config),
        "head": head,
        "queries": heads * head,
        "keys": derived.num_query_groups(config) * head,
        "qkv": (heads + 2 * derived.num_query_groups(config)) * head,
        "two": 2,  # sentences, and the answers to which comes first
        "experts": moe.num_experts or 0,
        "expert_ffn": derived.expert_ffn_hidden_size(config),
        "shared_ffn": moe.shared_expert_ffn_hidden_size or 0,
        "query_rank": model.q_lora_rank or 0,
        "key_rank": model.kv_lora_rank,
        "key_rank_rotary": model.kv_lora_rank + rotary,
        "latent_queries": heads * (head + rotary),
        "latent_keys_values": heads * (head + value),
        "latent_values": heads * value,
    }


@dataclass(frozen=True)
class Rule:
    """`ours` is the same weight as `theirs` in `layout`. {l} stands for every layer, {e} for every expert.

    `shape` is that of each of theirs, in names of `sizes`: one for all, or one for each. `only` limits a rule with {l}
    to "dense" or "moe" layers; `when` to models that have such weights at all. `unread` is written for other readers'
    sake, and never read.
    """

    ours: str
    theirs: tuple[str, ...]
    shape: str | tuple[str, ...]
    layout: Layout = SAME
    only: str = "all"
    when: Callable[[Config], bool] = lambda config: True
    unread: bool = False

    def shapes(self, lengths: dict[str, int]) -> list[tuple[int, ...]]:
        """The shape of each of theirs, with the lengths of `sizes`."""
        named = (self.shape,) * len(self.theirs) if isinstance(self.shape, str) else self.shape
        return [tuple(lengths[name] for name in shape.split()) for shape in named]


def weight_and_bias(
    ours: str, theirs: str, shape: str, layout: Layout = SAME, when: Callable[[Config], bool] = lambda config: True
) -> list[Rule]:
    """`shape` is the weight's. The bias has the length of what comes out: its first, or its last in a transposed
    layout."""
    out = shape.split()[-1 if layout.transposed else 0]
    return [
        Rule(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs.split()), shape, layout, when=when),
        Rule(
            f"{ours}.bias",
            tuple(f"{name}.bias" for name in theirs.split()),
            out,
            replace(layout, transposed=False),
            when=when,
        ),
    ]


def _nothing(name: str, config: Config, hf: HfConfig) -> bool:
    return False


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config's keys and their meaning in both directions, its rules, and what its files may hold
    besides or call otherwise."""

    model_type: str
    keys: Keys
    read: Callable[[HfConfig], Overrides]  # of all the keys
    write: Callable[[Config], HfConfig]
    rules: tuple[Rule, ...]
    base_prefix: str  # files of the bare model lack it
    # with tied embeddings, the first may stand in a file too if it is equal to the second
    tied: tuple[tuple[str, str], ...]
    is_moe: bool = False
    leaves_as: str = ""  # the family of an export, where it is another: one that transformers has a class for
    # names of tensors that are no part of the model
    carries_nothing: Callable[[str, Config, HfConfig], bool] = _nothing
    other_names: tuple[tuple[str, str], ...] = ()  # (in this table, in other files)
    # the name of a tensor that no other model has, for folders from before there was a model_type
    telling: str | None = None
    # which class has the heads that are there, where `architectures` names none of ours; None: it does
    class_by_tensors: Callable[[HfConfig, Callable[[], set[str]]], str | None] | None = None

    @property
    def runs_as(self) -> str:
        """The family whose class in transformers computes this model."""
        return self.leaves_as or self.model_type

    @property
    def spellings(self) -> set[str]:
        """The keys of a config.json that the table knows."""
        return {spelling for key, row in self.keys.items() for spelling in (key, *row.also)}


def is_tied(config: Config) -> bool:
    """Whether the output layer has the weights of the embedding."""
    return config.model.tie_embeddings


def is_untied(config: Config) -> bool:
    """Whether the output layer has weights of its own."""
    return not config.model.tie_embeddings


def has_biases(config: Config) -> bool:
    """Whether all linear layers have biases."""
    return config.model.linear_bias


def has_qkv_biases(config: Config) -> bool:
    """Whether queries, keys and values have biases."""
    return config.model.qkv_bias or config.model.linear_bias


GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
GELU_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
