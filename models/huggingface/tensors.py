"""Maps the tensors of a Hugging Face folder to our logical weights and back, by the rules of the model's family.

transformers 5 stores the experts of a layer in one tensor, and writes it so with
save_pretrained(save_original_format=False): X.experts.gate_up_proj [E, 2F, H] has each expert's gate projection above
its up projection, X.experts.down_proj [E, H, F] its down projection (E experts, F their width, H hidden size).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from base.errors import ConfigError
from configs import derived
from configs.keys import get
from configs.rules import first_problem
from configs.schema import Config
from configs.show import show
from configs.weights import config_from
from memory.read_only_file import BounceBuffers
from models.blueprint import weights, whole_model
from models.folder import WEIGHT_DTYPES, Reader, read_json
from models.huggingface import translate
from models.huggingface.families.keys import HfConfig
from models.huggingface.families.keys import show as show_key
from models.huggingface.families.rules import Family, Heads, Layout, Rule, Run, sizes
from models.huggingface.quantized import open_weights, read_quantization
from models.weight_files.expected import logical_shapes
from models.weight_files.logical import LogicalWeight
from models.weight_files.stored_tensors import RowBlock, StoredMatrix, as_matrix, fill

FUSED = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.\w+\.experts\.(?P<projection>gate_up_proj|down_proj)")
HEAD = ("lm_head.", "output_layer.")  # prefixes of the logical names of the weights after the last layer
FillBox = Callable[[str, torch.Tensor, tuple[int, ...]], None]
DrawWeight = Callable[[str, torch.dtype], torch.Tensor]


def new_head(config: Config, seed: int) -> DrawWeight:
    """Return a function that draws a weight of a random output layer by its logical name, with the initial values of a
    training with `training.seed` = `seed`."""
    config = copy.deepcopy(config)
    config.training.seed = seed
    assert config.model.vocab_size is not None
    by_name = dict(weights(config, config.model.vocab_size, whole_model(config)))

    def draw(name: str, dtype: torch.dtype) -> torch.Tensor:
        from models.initial_weights import initial_weight  # imports Megatron-core, which takes seconds

        return initial_weight(name, by_name[name], config).to(dtype)

    return draw


@dataclass(frozen=True)
class HfFolder:
    """An open Hugging Face folder, whose config.json and tensor names and shapes have been checked."""

    family: Family
    stated: HfConfig  # config.json, with its model_type
    config: Config
    dtype: torch.dtype  # of most weights
    notes: tuple[str, ...]  # for the user
    reader: Reader  # of the folder's tensors
    _sources: dict[str, tuple[Rule, list[str]]]  # logical name -> its rule, and the tensors' names in this folder
    _shapes: dict[str, tuple[int, ...]]  # of the logical weights
    _new_head: DrawWeight | None  # draws the weights that have no tensors in the folder

    def names(self) -> Iterator[str]:
        """Return the logical names of all weights."""
        return iter(self._sources)

    def weight(self, name: str) -> LogicalWeight:
        """Return the location of a logical weight in the files; it has no blocks if it belongs to a new output layer.
        Its dtype is the widest dtype of its tensors."""
        rule, found = self._sources[name]
        if not found:
            return LogicalWeight(self._shapes[name], self.dtype, ())
        kinds = [WEIGHT_DTYPES[self.reader.dtype(theirs)] for theirs in found]
        blocks = logical_blocks(rule.layout, [self.reader.stored(theirs) for theirs in found], _heads(self.config))
        return LogicalWeight(self._shapes[name], functools.reduce(torch.promote_types, kinds), tuple(blocks))

    def get(self, name: str) -> torch.Tensor:
        """Read a logical weight into host memory, or draw it at random if it belongs to a new output layer."""
        weight = self.weight(name)
        if self._new_head is not None and not weight.blocks:
            return self._new_head(name, self.dtype)
        result = torch.empty(weight.shape, dtype=weight.dtype)
        fill(result.view(as_matrix(result.shape)), weight.blocks)
        return result


def logical_blocks(layout: Layout, stored: Sequence[StoredMatrix], heads: Heads) -> list[RowBlock]:
    """Return the row blocks of Hugging Face tensors that make up one logical tensor."""
    if layout.transposed:
        return [
            RowBlock(each, 0, each.num_rows, 0, tuple(runs), transposed=True)
            for each, runs in zip(stored, layout.runs([each.num_columns for each in stored], heads), strict=True)
        ]
    return [
        RowBlock(each, there, length, ours, ((0, 0, each.num_columns),))
        for each, runs in zip(stored, layout.runs([each.num_rows for each in stored], heads), strict=True)
        for there, ours, length in runs
    ]


def open_folder(path: Path, head_seed: int | None = None, bounce: BounceBuffers | None = None) -> HfFolder:
    """Check a Hugging Face folder and open it. The check reads no weights, except tied weights that are stored twice.
    With `head_seed`, a model without an output layer gets a random one. `bounce`: buffers for direct reads that bypass
    the page cache. Raises ConfigError."""
    if not (path / "config.json").exists():
        old = path / "bert_config.json"
        action = f"Rename {old.name} to config.json" if old.is_file() else "Copy the file into the folder"
        raise ConfigError(
            f"folder {path} must hold a config.json, as Hugging Face's save_pretrained writes it. {action}."
        )
    stated = read_json(path / "config.json")
    hf, notes = translate.identify(stated, lambda: Reader(path, pickled=True).names())
    family, keys, overrides = translate.read_config(hf)
    quantization = read_quantization(hf)
    config = config_from(overrides)
    config.data.tokenizer = "given"  # no rule about a tokenizer trained here applies
    problem = first_problem(config, world_size=1)
    if problem is not None:
        value = show(get(config, problem.key))
        raise ConfigError(
            f"{path / 'config.json'} describes a model that is not supported: {problem.key} ({value}) {problem.rule}. "
            "Choose a different model."
        )
    reader = open_weights(path, quantization, keys["dtype"], bounce)
    split_fused_experts(reader, family, config)
    sources, found, left_out = _match(family, config, keys, reader)
    head = [
        name for rule, there in sources.values() if rule.ours.startswith(HEAD) and not there for name in rule.theirs
    ]
    if head and head_seed is None:
        tied = " If it is the embedding, set tie_word_embeddings to true." if len(head) == 1 else ""
        raise ConfigError(
            f"the Hugging Face folder has no tensor {head[0]} and no other tensor of an output layer; a model saved as "
            f"{show_key(stated.get('architectures'))} may lack one.{tied} `python -m models.convert import FOLDER OUT "
            "--new-head SEED` draws a new output layer."
        )
    if head_seed is not None and not head:
        raise ConfigError(
            f"--new-head ({head_seed}) is for a model without an output layer, but {path} has one. Leave it out."
        )
    if head:
        notes.append(f"{path} has no output layer: {', '.join(head)} are new, drawn with seed {head_seed}")
    if left_out:
        notes.append(f"tensors of a head for another task are left out: {', '.join(left_out)}")
    dtype = reader.main_dtype(found)
    kind = str(dtype).removeprefix("torch.")
    if keys["dtype"] not in (None, kind):
        spelling = "dtype" if "dtype" in hf else "torch_dtype"
        raise ConfigError(
            f"config.json {spelling} ({keys['dtype']}) is not the type of the weights ({kind}): correct or remove it."
        )
    shapes = logical_shapes(config, keys["vocab_size"])
    draw = None if head_seed is None else new_head(config, head_seed)
    return HfFolder(family, hf, config, dtype, (*notes, *reader.notes), reader, sources, shapes, draw)


def split_fused_experts(reader: Reader, family: Family, config: Config) -> None:
    """Split tensors that hold all experts of a layer into tensors of single experts, named as in the family's rules.
    Raises ConfigError if a tensor does not have the shape that this model needs."""
    rules: dict[str, Rule] = {
        "gate_up_proj" if len(rule.theirs) == 2 else "down_proj": rule for rule in family.rules if "{e}" in rule.ours
    }
    lengths = sizes(config)
    for name in sorted(reader.names()):
        match = FUSED.fullmatch(name)
        if match is None or match["projection"] not in rules:
            continue
        rule = rules[match["projection"]]
        shapes = rule.shapes(lengths)
        (columns,) = {shape[1] for shape in shapes}
        _check_shape(reader, name, (lengths["experts"], sum(shape[0] for shape in shapes), columns))
        named_shapes = [
            (theirs.format(l=match["layer"], e=expert), shape)
            for expert in range(lengths["experts"])
            for theirs, shape in zip(rule.theirs, shapes, strict=True)
        ]
        reader.split_rows(name, named_shapes)


def _check_shape(reader: Reader, name: str, expected: tuple[int, ...]) -> None:
    shape = reader.shape(name)
    if shape != expected:
        raise ConfigError(
            f"{reader.folder}: tensor {name} has shape {list(shape)}, but config.json calls for {list(expected)}. Copy "
            "the folder again."
        )


def expand_rules(family: Family, config: Config) -> Iterator[Rule]:
    """Yield the family's tensor rules for every layer and expert of this model."""
    pattern = derived.moe_layer_pattern(config)
    for rule in family.rules:
        if not rule.when(config):
            continue
        layers = range(config.model.num_layers) if "{l}" in rule.ours else [0]
        for layer in layers:
            if rule.only != "all" and (rule.only == "moe") != bool(pattern[layer]):
                continue
            for expert in range(config.moe.num_experts or 0) if "{e}" in rule.ours else [0]:
                numbers = {"l": layer, "e": expert}
                theirs = tuple(name.format(**numbers) for name in rule.theirs)
                yield replace(rule, ours=rule.ours.format(**numbers), theirs=theirs)


def _match(
    family: Family, config: Config, keys: HfConfig, reader: Reader
) -> tuple[dict[str, tuple[Rule, list[str]]], set[str], list[str]]:
    """Match a folder's tensors to logical weights: return each weight's rule and tensors, the set of all matched
    tensors, and the tensors that belong to other tasks' heads. Weights of a missing output layer have no tensors.

    Raises ConfigError with the name of a tensor that is missing, stored twice, left over, or not of the shape that
    config.json requires.
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
    has_head = any(found for ours, (_, found) in sources.items() if ours.startswith(HEAD))
    for rule, name in missing:
        if has_head or not rule.ours.startswith(HEAD):
            raise ConfigError(
                f"{reader.folder} has no tensor {name}, which config.json calls for. Copy the folder again."
            )
    for twin, original in family.tied if config.model.tie_embeddings else ():
        one, other = _find(family, twin, names), _find(family, original, names)
        if one is not None and other is not None:
            shapes[one] = shapes[other]
            twins.append((one, other))
    left = sorted(name for name in names - shapes.keys() if not family.carries_nothing(name, config, keys))
    of_others = [name for name in left if translate.OTHER_HEADS.fullmatch(name)]
    left = [name for name in left if name not in of_others]
    if left:
        raise ConfigError(
            f"{len(left)} tensors of the Hugging Face folder do not belong to the {family.model_type} model "
            f"that config.json describes; the first is {left[0]}. Copy config.json and the weights of one model."
        )
    for name, shape in shapes.items():
        _check_shape(reader, name, shape)
    for one, other in twins:
        if not reader.equal(one, other):
            raise ConfigError(
                f"config.json tie_word_embeddings (true) requires that tensors {one} and {other} are equal, but they "
                "differ. Set it to false if they are two weights."
            )
    return sources, set(shapes), of_others


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to export to a Hugging Face folder, which consists of rows of a logical weight."""

    name: str
    shape: tuple[int, ...]
    ours: str  # the logical weight
    layout: Layout
    runs: list[Run]

    def make(self, fill_box: FillBox, dtype: torch.dtype) -> torch.Tensor:
        """Assemble the tensor to export, as `dtype`, with calls of `fill_box(logical name, target, index of its first
        number)`."""
        result = torch.empty(self.shape, dtype=dtype)
        matrix_rows = result.t() if self.layout.transposed else result
        for there, ours, length in self.runs:
            fill_box(self.ours, matrix_rows[there : there + length], (ours, *(0 for _ in self.shape[1:])))
        return result


def export_plan(family: Family, config: Config) -> Iterator[ExportedTensor]:
    """Yield every tensor of a model's Hugging Face folder, in the order of the family's rules."""
    heads, lengths = _heads(config), sizes(config)
    for rule in expand_rules(family, config):
        shapes = rule.shapes(lengths)
        runs = rule.layout.runs([shape[-1 if rule.layout.transposed else 0] for shape in shapes], heads)
        for name, shape, own_runs in zip(rule.theirs, shapes, runs, strict=True):
            yield ExportedTensor(name, shape, rule.ours, rule.layout, own_runs)


def _heads(config: Config) -> Heads:
    return Heads(config.model.num_attention_heads, derived.num_query_groups(config), derived.head_dim(config))


def _find(family: Family, name: str, names: set[str]) -> str | None:
    """Return the name under which a folder stores the tensor that our rules call `name`; None if it is missing.
    `names`: all tensors of the folder. Raises ConfigError if it is stored twice."""
    candidates = [name] + [name.replace(now, before) for now, before in family.other_names if name.endswith(now)]
    candidates += [candidate.removeprefix(family.base_prefix) for candidate in candidates]
    found = [candidate for candidate in dict.fromkeys(candidates) if candidate in names]
    if len(found) > 1:
        raise ConfigError(
            f"the Hugging Face folder has tensor {name} twice: as {found[0]} and as {found[1]}. Remove one."
        )
    return found[0] if found else None
