"""What the global tensors of a checkpoint are called, and which logical weights they hold, whatever layout wrote them.
Without torch.

A global tensor may be a stack: of equal layers, which Megatron-core saves under one name; of a layer's routed experts;
or of both.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from checkpoint.safetensors_header import Entry
from models.weight_files.cover import Box, wrong_cover
from models.weight_files.header import ITEM_BYTES

# What weights are called in checkpoints, and by the model (models/specs.py and Megatron-core's MoE layer say why).
SPELLINGS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mlp.experts.experts.": "mlp.experts.",
}
EXPERTS = "mlp.experts."
# Whose rows each layout pads in its own way.
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
LAYER = re.compile(r"(?P<block>decoder|encoder)\.layers\.((?P<number>\d+)\.)?(?P<rest>\D.*)")


@dataclass(frozen=True)
class GlobalName:
    """What a global tensor's key stands for: a logical weight, with which axes in front that it has not."""

    prefix: str  # "decoder.layers."; the number of a layer, a point and `rest` follow
    rest: str
    has_layers: bool  # its first axis counts layers
    has_experts: bool  # its next axis counts experts

    @property
    def num_axes(self) -> int:
        """Axes in front."""
        return self.has_layers + self.has_experts

    def name(self, index: tuple[int, ...]) -> str:
        """The logical weight at an index of the axes in front."""
        rest = self.rest
        if self.has_experts:
            rest = f"{EXPERTS}{index[-1]}.{rest.removeprefix(EXPERTS)}"
        return f"{self.prefix}{index[0]}.{rest}" if self.has_layers else f"{self.prefix}{rest}"


def parse(key: str) -> GlobalName:
    """What a key of a checkpoint stands for, if it is that of a weight."""
    match = LAYER.fullmatch(key)
    if match is None:
        return GlobalName("", key, False, False)
    rest = match["rest"]
    for theirs, ours in SPELLINGS.items():
        if rest.startswith(theirs):
            rest = ours + rest.removeprefix(theirs)
    prefix, number = f"{match['block']}.layers.", match["number"]
    experts = rest.startswith(EXPERTS)
    return GlobalName(prefix if number is None else f"{prefix}{number}.", rest, number is None, experts)


@dataclass(frozen=True)
class WeightPart:
    """What a box holds of one logical weight: a matrix, row after row."""

    name: str
    shape: tuple[int, ...]  # of the whole, with the vocabulary's padding
    box: Box  # of the logical matrix
    start: int  # its first byte, from the box's


def parts_of(entry: Entry) -> Iterator[WeightPart]:
    """The parts of logical weights that a box is made of; none, where it is of something else."""
    known = parse(entry.key)
    axes = known.num_axes
    box = (1,) * (len(entry.global_shape) - len(entry.shape)) + entry.shape
    inner, offset, shape = box[axes:], entry.offset[axes:], entry.global_shape[axes:]
    if len(inner) not in (1, 2):
        return
    rows, columns = (inner[0], 1) if len(inner) == 1 else inner
    first = (offset[0], 0) if len(inner) == 1 else offset
    place = (first[0], first[1], first[0] + rows, first[1] + columns)
    size = math.prod(inner) * ITEM_BYTES[entry.dtype]
    for number, index in enumerate(itertools.product(*(range(n) for n in box[:axes]))):
        name = known.name(tuple(o + i for o, i in zip(entry.offset, index)))
        yield WeightPart(name, shape, place, number * size)


def without_padding(part: WeightPart, shape: tuple[int, ...]) -> WeightPart | None:
    """What a part holds of a weight of this shape: all of it, but for the rows that pad the vocabulary. Raises
    ValueError, in words, where it is of another shape."""
    if part.shape == shape:
        return part
    if part.name not in PADDED or part.shape[1:] != shape[1:] or part.shape[0] < shape[0]:
        raise ValueError(f"{part.name} in shape {list(part.shape)}, but its config calls for {list(shape)}")
    end = min(part.box[2], shape[0])
    return replace(part, box=(*part.box[:2], end, part.box[3])) if end > part.box[0] else None


def lacking_weights(entries: Iterable[Entry], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A line for each of a model's weights that the files of a checkpoint do not make up."""
    found: dict[str, list[Box]] = {}
    wrong: dict[str, str] = {}
    for part in (part for entry in entries for part in parts_of(entry) if part.name in shapes):
        try:
            kept = without_padding(part, shapes[part.name])
        except ValueError as error:
            wrong[part.name] = f"its files have {error}"
            continue
        found.setdefault(part.name, []).extend([] if kept is None else [kept.box])
    for name, shape in shapes.items():
        if name in wrong:
            continue
        rows, columns = (shape[0], 1) if len(shape) == 1 else shape
        problem = "it is not there" if name not in found else wrong_cover(found[name], rows, columns)
        if problem is not None:
            wrong[name] = f"its files lack the weight {name}: {problem}"
    return [wrong[name] for name in shapes if name in wrong]
