"""The description of a Hugging Face family: the keys of its config.json, and the rules that map its tensors to ours,
with layouts and shapes.

Each family has one table of keys and one of rules, which import and export both use. Imports neither transformers nor
torch, because the plan of a run needs families.
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
    """The attention heads of a model: n query heads, g key/value heads, d channels each."""

    n: int
    g: int
    d: int


Run = tuple[int, int, int]  # consecutive rows of one of their tensors: first row there, first row of ours, length
# (number of rows of each of their tensors, heads) -> the runs of each
Runs = Callable[[Sequence[int], Heads], list[list[Run]]]


def _concatenated(num_rows: Sequence[int], _: Heads) -> list[list[Run]]:
    firsts = itertools.accumulate(num_rows, initial=0)
    return [[(0, first, length)] for first, length in zip(firsts, num_rows)]


def _grouped(num_rows: Sequence[int], heads: Heads) -> list[list[Run]]:
    # Megatron stores the rows of a group together: its queries, its key, its value.
    sizes = [heads.n // heads.g * heads.d, heads.d, heads.d]
    of_group = sum(sizes)
    return [
        [(group * size, group * of_group + first, size) for group in range(heads.g)]
        for size, first in zip(sizes, itertools.accumulate(sizes, initial=0))
    ]


def _grouped_in_one(num_rows: Sequence[int], heads: Heads) -> list[list[Run]]:
    qkv = _grouped(num_rows, heads)
    firsts = itertools.accumulate((heads.n * heads.d, heads.g * heads.d), initial=0)
    return [[(first + there, here, size) for first, runs in zip(firsts, qkv) for there, here, size in runs]]


@dataclass(frozen=True)
class Layout:
    """The order in which rows of Hugging Face tensors form one of our weights. `transposed`: Hugging Face stores the
    transposed matrix, so that its columns are taken."""

    runs: Runs = _concatenated
    transposed: bool = False  # their tensors: "rows" of theirs are columns then


SAME = Layout()  # several of their tensors follow each other: the gate projection, then the up projection
TRANSPOSED = Layout(transposed=True)  # GPT-2's Conv1D keeps [inputs, outputs]
QKV = Layout(_grouped)
QKV_IN_ONE = Layout(_grouped_in_one)
QKV_IN_ONE_TRANSPOSED = Layout(_grouped_in_one, transposed=True)


def sizes(config: Config) -> dict[str, int]:
    """Return the dimensions of a model by the names that `Rule.shape` uses."""
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
        "two": 2,  # sentences of a pair, and answers to which of them is first
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
    """A mapping between tensor names: our weight `ours` consists of the Hugging Face tensors `theirs`, in the order of
    `layout`. In names, {l} is the number of a layer and {e} the number of an expert.

    `shape`: dimensions of their tensors by name, such as "ffn hidden"; one text for all tensors, or one for each.
    `only` limits a rule with {l} to "dense" or "moe" layers. `when` returns whether a model has the weight. An `unread`
    tensor is exported for other programs; an import ignores it.
    """

    ours: str
    theirs: tuple[str, ...]
    shape: str | tuple[str, ...]
    layout: Layout = SAME
    only: str = "all"
    when: Callable[[Config], bool] = lambda config: True
    unread: bool = False

    def shapes(self, lengths: dict[str, int]) -> list[tuple[int, ...]]:
        """Return the shape of each Hugging Face tensor of the rule. `lengths`: the length of every dimension by its
        name."""
        named = (self.shape,) * len(self.theirs) if isinstance(self.shape, str) else self.shape
        return [tuple(lengths[name] for name in shape.split()) for shape in named]


def weight_and_bias(
    ours: str, theirs: str, shape: str, layout: Layout = SAME, when: Callable[[Config], bool] = lambda config: True
) -> list[Rule]:
    """Return the rules for the weight and the bias of a linear layer or norm. `shape` is the weight's; the bias has the
    length of the outputs, which come first in the shape, or last in a transposed layout."""
    out = shape.split()[-1 if layout.transposed else 0]
    kinds = (("weight", shape, layout), ("bias", out, replace(layout, transposed=False)))
    return [
        Rule(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs.split()), dimensions, own_layout, when=when)
        for kind, dimensions, own_layout in kinds
    ]


@dataclass(frozen=True)
class Family:
    """A Hugging Face family (one `model_type`): the keys of its config.json and their translation in both directions,
    its tensor rules, and the extra tensors and alternative names that its files may have."""

    model_type: str
    keys: Keys
    read: Callable[[HfConfig], Overrides]  # takes the values of all keys of the table
    write: Callable[[Config], HfConfig]
    rules: tuple[Rule, ...]
    base_prefix: str  # of names; files of the bare model lack it
    # with tied embeddings, a file may hold the first too if it equals the second
    tied: tuple[tuple[str, str], ...]
    is_moe: bool = False
    leaves_as: str = ""  # the family to export as, if transformers has no class for this one
    # whether a tensor of this name does not belong to the model's weights, and is ignored
    carries_nothing: Callable[[str, Config, HfConfig], bool] = lambda name, config, hf: False
    other_names: tuple[tuple[str, str], ...] = ()  # (in this table, in other files)
    # pattern of the name of a tensor that no other family has, for old folders without a model_type
    telling: str | None = None
    # the class that has the heads of the folder's tensors; None if `architectures` names one that we know
    class_by_tensors: Callable[[HfConfig, Callable[[], set[str]]], str | None] | None = None

    @property
    def runs_as(self) -> str:
        """Model type of the transformers class that computes models of this family."""
        return self.leaves_as or self.model_type

    @property
    def spellings(self) -> set[str]:
        """All spellings of all config.json keys that the family knows."""
        return {spelling for key, row in self.keys.items() for spelling in (key, *row.also)}


def is_tied(config: Config) -> bool:
    """Return whether the output layer shares the weights of the embedding."""
    return config.model.tie_embeddings


def is_untied(config: Config) -> bool:
    """Return whether the output layer has its own weights."""
    return not config.model.tie_embeddings


def has_biases(config: Config) -> bool:
    """Return whether all linear layers have biases."""
    return config.model.linear_bias


def has_qkv_biases(config: Config) -> bool:
    """Return whether the projections to queries, keys and values have biases."""
    return config.model.qkv_bias or config.model.linear_bias


GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
GELU_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
