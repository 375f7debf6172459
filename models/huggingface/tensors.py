"""The tensors of a Hugging Face folder <-> our logical weights: which of them make each weight, by the rules of its
family."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from configs import derived
from configs.keys import get
from configs.rules import first_problem
from configs.schema import Config, ConfigError
from configs.show import show
from configs.weights import config_from
from memory.read_only_file import BounceBuffers
from models.folder import WEIGHT_DTYPES, Reader, read_json
from models.huggingface import translate
from models.huggingface.families.keys import HfConfig
from models.huggingface.families.keys import show as show_key
from models.huggingface.families.rules import Family, Heads, Layout, Rule, Run, sizes
from models.huggingface.fused_experts import split_fused_experts
from models.huggingface.identity import OTHER_HEADS, identify
from models.huggingface.new_head import NewHead, is_of_head, new_head
from models.huggingface.quantized import open_weights, read_quantization
from models.weight_files.expected import logical_shapes
from models.weight_files.logical import LogicalWeight
from models.weight_files.pieces import RowBlock, fill
from models.weight_files.stored import StoredMatrix, as_matrix

FillBox = Callable[[str, torch.Tensor, tuple[int, ...]], None]


@dataclass(frozen=True)
class HfFolder:
    """An open Hugging Face folder, in which every key and every tensor has been checked."""

    family: Family
    stated: HfConfig  # config.json, with its model_type
    config: Config
    dtype: torch.dtype  # of most weights
    notes: tuple[str, ...]  # what the user should know of it
    reader: Reader  # of the tensors as they are
    _sources: dict[str, tuple[Rule, list[str]]]  # logical name -> its rule, and the tensors' names in this folder
    _shapes: dict[str, tuple[int, ...]]  # of the logical weights
    _new_head: NewHead | None  # draws weights of the head, for which there are no names

    def names(self) -> Iterator[str]:
        """The logical names of all weights."""
        return iter(self._sources)

    def weight(self, name: str) -> LogicalWeight:
        """Where a logical weight lies; nowhere, where it is one of a new output layer. Its type is the widest of those
        that make it."""
        rule, found = self._sources[name]
        if not found:
            return LogicalWeight(self._shapes[name], self.dtype, ())
        kinds = [WEIGHT_DTYPES[self.reader.dtype(theirs)] for theirs in found]
        blocks = placed(rule.layout, [self.reader.stored(theirs) for theirs in found], _heads(self.config))
        return LogicalWeight(self._shapes[name], functools.reduce(torch.promote_types, kinds), tuple(blocks))

    def get(self, name: str) -> torch.Tensor:
        """The logical weight called `name`, on the host."""
        weight = self.weight(name)
        if self._new_head is not None and not weight.blocks:
            return self._new_head.get(name, self.dtype)
        result = torch.empty(weight.shape, dtype=weight.dtype)
        fill(result.view(as_matrix(result.shape)), weight.blocks)
        return result


def placed(layout: Layout, stored: Sequence[StoredMatrix], heads: Heads) -> list[RowBlock]:
    """Where the rows of Hugging Face's tensors go in the logical one that they make."""
    if layout.transposed:
        return [
            RowBlock(each, 0, each.rows, 0, tuple(runs), transposed=True)
            for each, runs in zip(stored, layout.runs([each.columns for each in stored], heads), strict=True)
        ]
    return [
        RowBlock(each, there, length, ours, ((0, 0, each.columns),))
        for each, runs in zip(stored, layout.runs([each.rows for each in stored], heads), strict=True)
        for there, ours, length in runs
    ]


def open_folder(path: Path, head_seed: int | None = None, bounce: BounceBuffers | None = None) -> HfFolder:
    """Check a Hugging Face folder and open it; only tied weights that stand there twice are read for that. With a
    `head_seed` a folder without an output layer gets a new one. `bounce`: read past the kernel's cache, through these.
    Raises ConfigError."""
    if not (path / "config.json").exists():
        old = path / "bert_config.json"
        rename = f" {old.name} is read under that name: rename it." if old.is_file() else ""
        raise ConfigError(
            f"folder {path} must hold a config.json, as Hugging Face's save_pretrained writes it.{rename}"
        )
    stated = read_json(path / "config.json")
    hf, notes = identify(stated, lambda: Reader(path, pickled=True).names(), translate.FAMILIES)
    family, keys, overrides = translate.read_all(hf)
    quantization = read_quantization(hf)
    config = config_from(overrides)
    config.data.tokenizer = "given"  # what the rules say of one trained here is not asked
    problem = first_problem(config, world_size=1)
    if problem is not None:
        value = show(get(config, problem.key))
        raise ConfigError(
            f"{path / 'config.json'} is of a model that is not supported: {problem.key} ({value}) {problem.rule}."
        )
    reader = open_weights(path, quantization, keys["dtype"], bounce)
    split_fused_experts(reader, family, config)
    sources, found, left_out = _match(family, config, keys, reader)
    head = [name for rule, there in sources.values() if is_of_head(rule.ours) and not there for name in rule.theirs]
    if head and head_seed is None:
        tied = "if it is the embedding, set tie_word_embeddings to true; " if len(head) == 1 else ""
        raise ConfigError(
            f"the Hugging Face folder has no tensor {head[0]} nor any other of an output layer, as a model saved as "
            f"{show_key(stated.get('architectures'))} may have none: {tied}`python -m models.convert import FOLDER OUT "
            "--new-head SEED` draws a new one."
        )
    if head_seed is not None and not head:
        raise ConfigError(f"--new-head ({head_seed}) is for a model without an output layer, but {path} has one.")
    if head:
        notes.append(f"{path} has no output layer: {', '.join(head)} are new, drawn with seed {head_seed}")
    if left_out:
        notes.append(f"left out, as of a head for another task: {', '.join(left_out)}")
    dtype = reader.main_dtype(found)
    kind = str(dtype).removeprefix("torch.")
    if keys["dtype"] not in (None, kind):
        spelling = "dtype" if "dtype" in hf else "torch_dtype"
        raise ConfigError(
            f"config.json {spelling} ({keys['dtype']}) is not that of the weights ({kind}): correct it, or remove it."
        )
    return HfFolder(
        family,
        hf,
        config,
        dtype,
        (*notes, *reader.notes),
        reader,
        sources,
        logical_shapes(config, keys["vocab_size"]),
        None if head_seed is None else new_head(config, head_seed),
    )


def expand_rules(family: Family, config: Config) -> Iterator[Rule]:
    """The family's rules with every layer and expert of this model filled in."""
    pattern = derived.moe_layer_pattern(config)
    for rule in family.rules:
        if not rule.when(config):
            continue
        layers = range(config.model.num_layers) if "{l}" in rule.ours else [0]
        for layer in layers:
            if rule.only != "all" and (rule.only == "moe") != bool(pattern[layer]):
                continue
            for expert in range(config.moe.num_experts or 0) if "{e}" in rule.ours else [0]:
                fill = {"l": layer, "e": expert}
                theirs = tuple(name.format(**fill) for name in rule.theirs)
                yield replace(rule, ours=rule.ours.format(**fill), theirs=theirs)


def _match(
    family: Family, config: Config, keys: HfConfig, reader: Reader
) -> tuple[dict[str, tuple[Rule, list[str]]], set[str], list[str]]:
    """Which of a folder's tensors make each logical weight, all that do, and which are of other tasks' heads. A weight
    of an output layer that is not there at all has none.

    Raises ConfigError, by the tensor's name, for one that is missing, twice, left over, or of a shape that config.json
    does not call for.
    """
    names, lengths = reader.names(), sizes(config)
    sources: dict[str, tuple[Rule, list[str]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    twins: list[tuple[str, str]] = []
    missing: list[tuple[Rule, str]] = []
    for rule in expand_rules(family, config):
        found = [_find(family, name, names) for name in rule.theirs]
        for name, there, shape in zip(rule.theirs, found, rule.shapes(lengths), strict=True):
            if there is not None:
                shapes[there] = shape
            elif not rule.unread:
                missing.append((rule, name))
        if not rule.unread:
            sources[rule.ours] = (rule, [name for name in found if name is not None])
    has_head = any(found for ours, (_, found) in sources.items() if is_of_head(ours))
    for rule, name in missing:
        if has_head or not is_of_head(rule.ours):
            raise ConfigError(f"{reader.folder} has no tensor {name}, which config.json calls for.")
    for twin, original in family.tied if config.model.tie_embeddings else ():
        one, other = _find(family, twin, names), _find(family, original, names)
        if one is not None and other is not None:
            shapes[one] = shapes[other]
            twins.append((one, other))
    left = sorted(name for name in names - shapes.keys() if not family.carries_nothing(name, config, keys))
    of_others = [name for name in left if OTHER_HEADS.fullmatch(name)]
    left = [name for name in left if name not in of_others]
    if left:
        raise ConfigError(
            f"{len(left)} tensors of the Hugging Face folder have no place in a {family.model_type} model as "
            f"config.json describes it, the first: {left[0]}."
        )
    for name, shape in shapes.items():
        if reader.shape(name) != shape:
            raise ConfigError(
                f"{reader.folder}: tensor {name} has shape {list(reader.shape(name))}, but config.json calls for "
                f"{list(shape)}."
            )
    for one, other in twins:
        if not reader.equal(one, other):
            raise ConfigError(
                f"config.json tie_word_embeddings (true) says that tensors {one} and {other} are one, but they differ."
            )
    return sources, set(shapes), of_others


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of a Hugging Face folder that is made of rows of a logical weight."""

    name: str
    shape: tuple[int, ...]
    ours: str  # the logical weight
    layout: Layout
    runs: list[Run]

    def make(self, fill_box: FillBox, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, as `dtype`, from `fill_box(logical name, target, where the target's first number lies)`."""
        result = torch.empty(self.shape, dtype=dtype)
        rows = result.t() if self.layout.transposed else result
        for there, ours, length in self.runs:
            fill_box(self.ours, rows[there : there + length], (ours, *(0 for _ in self.shape[1:])))
        return result


def export_plan(family: Family, config: Config) -> Iterator[ExportedTensor]:
    """Every tensor of the Hugging Face folder of a model of a family, in the order of the family's rules."""
    heads, lengths = _heads(config), sizes(config)
    for rule in expand_rules(family, config):
        shapes = rule.shapes(lengths)
        runs = rule.layout.runs([shape[-1 if rule.layout.transposed else 0] for shape in shapes], heads)
        for name, shape, of_it in zip(rule.theirs, shapes, runs, strict=True):
            yield ExportedTensor(name, shape, rule.ours, rule.layout, of_it)


def _heads(config: Config) -> Heads:
    return Heads(config.model.num_attention_heads, derived.num_query_groups(config), derived.head_dim(config))


def _find(family: Family, name: str, names: set[str]) -> str | None:
    """What a tensor is called in this folder, if it is there. Raises ConfigError where it is there under two names."""
    candidates = [name] + [name.replace(now, before) for now, before in family.other_names if name.endswith(now)]
    candidates += [candidate.removeprefix(family.base_prefix) for candidate in candidates]
    found = [candidate for candidate in dict.fromkeys(candidates) if candidate in names]
    if len(found) > 1:
        raise ConfigError(f"the Hugging Face folder has tensor {name} twice: as {found[0]} and as {found[1]}.")
    return found[0] if found else None
