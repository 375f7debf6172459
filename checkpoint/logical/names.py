"""Map the names of a checkpoint's global tensors to the logical weights in them, for any layout. Without torch. A
global tensor may be a stack: of equal layers, which Megatron-core saves under one name; of a layer's routed experts; or
of both."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from checkpoint.safetensors_header import Entry
from models.weight_files.expected import Box, wrong_cover
from models.weight_files.header import ITEM_BYTES

# Names of weights in checkpoints -> in the model (models/specs.py and Megatron-core's MoE layer have the reasons).
SPELLINGS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mlp.experts.experts.": "mlp.experts.",
}
EXPERTS = "mlp.experts."
# Weights over the vocabulary, which each layout pads in its own way.
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
LAYER = re.compile(r"(?P<block>decoder|encoder)\.layers\.((?P<number>\d+)\.)?(?P<rest>\D.*)")


@dataclass(frozen=True)
class GlobalName:
    """The parsed name of a global tensor: one logical weight, or logical weights stacked along an axis of layers, of
    experts, or both."""

    prefix: str  # "decoder.layers."; the number of a layer, a point and `rest` follow
    rest: str
    has_layers: bool  # its first axis counts layers
    has_experts: bool  # its next axis counts experts

    @property
    def num_axes(self) -> int:
        """Number of leading axes, along which layers or experts are stacked."""
        return self.has_layers + self.has_experts

    def name(self, index: tuple[int, ...]) -> str:
        """Return the name of the logical weight at an index of the leading axes."""
        rest = self.rest
        if self.has_experts:
            rest = f"{EXPERTS}{index[-1]}.{rest.removeprefix(EXPERTS)}"
        return f"{self.prefix}{index[0]}.{rest}" if self.has_layers else f"{self.prefix}{rest}"


def parse(key: str) -> GlobalName:
    """Parse the name of a global tensor in a checkpoint, which is a logical weight or a stack of logical weights."""
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
class WeightBlock:
    """A block of a logical weight that a checkpoint stores as a row-major matrix. `start`: its byte offset in the
    stored tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole weight, with the vocabulary's padding
    box: Box  # of the logical matrix
    start: int  # its first byte, relative to the box's


def blocks_of(entry: Entry) -> Iterator[WeightBlock]:
    """Yield the blocks of logical weights (weights of one layer and one expert) that a stored tensor contains; none if
    the tensor is no weight."""
    known = parse(entry.key)
    axes, box = known.num_axes, entry.box_shape
    inner, offset, shape = box[axes:], entry.offset[axes:], entry.global_shape[axes:]
    if len(inner) not in (1, 2):
        return
    num_rows, num_columns = (inner[0], 1) if len(inner) == 1 else inner
    row, column = (offset[0], 0) if len(inner) == 1 else offset
    block = (row, column, row + num_rows, column + num_columns)
    size = math.prod(inner) * ITEM_BYTES[entry.dtype]
    for number, index in enumerate(itertools.product(*(range(n) for n in box[:axes]))):
        name = known.name(tuple(o + i for o, i in zip(entry.offset, index)))
        yield WeightBlock(name, shape, block, number * size)


def without_padding(block: WeightBlock, shape: tuple[int, ...]) -> WeightBlock | None:
    """Return a block without the rows that pad the vocabulary, or None if no row is left. `shape`: of the weight
    without padding. Raises ValueError with a message for users if the shapes do not fit."""
    if block.shape == shape:
        return block
    if block.name not in PADDED or block.shape[1:] != shape[1:] or block.shape[0] < shape[0]:
        raise ValueError(
            f"its files have {block.name} in shape {list(block.shape)}, but its config calls for {list(shape)}"
        )
    end = min(block.box[2], shape[0])
    return replace(block, box=(*block.box[:2], end, block.box[3])) if end > block.box[0] else None


def lacking_weights(entries: Iterable[Entry], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each of a model's weights that a checkpoint's files do not contain completely."""
    found: dict[str, list[Box]] = {}
    wrong: dict[str, str] = {}
    for block in (block for entry in entries for block in blocks_of(entry) if block.name in shapes):
        try:
            kept = without_padding(block, shapes[block.name])
        except ValueError as error:
            wrong[block.name] = str(error)
            continue
        found.setdefault(block.name, []).extend([] if kept is None else [kept.box])
    for name, shape in shapes.items():
        if name in wrong:
            continue
        num_rows, num_columns = (shape[0], 1) if len(shape) == 1 else shape
        if name not in found:
            wrong[name] = f"its files lack the weight {name}"
        elif (problem := wrong_cover(found[name], num_rows, num_columns)) is not None:
            wrong[name] = f"its files do not hold the weight {name} exactly once: {problem}"
    return [wrong[name] for name in shapes if name in wrong]
