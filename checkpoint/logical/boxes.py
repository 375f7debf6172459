"""Boxes of a checkpoint's global tensors -> the logical weights that they are parts of, whatever layout wrote them.

A global tensor may be a stack: of equal layers, which Megatron-core saves under one name; of a layer's routed experts;
or of both.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint import manifest, safetensors_header
from checkpoint.safetensors_header import Entry
from configs.schema import ConfigError
from memory.read_only_file import BounceBuffers, ReadOnlyFile
from models.weight_files.pieces import RowBlock
from models.weight_files.safetensors_file import TORCH_DTYPES
from models.weight_files.stored import StoredMatrix

# What weights are called in checkpoints, and by the model (models/specs.py and Megatron-core's MoE layer say why).
SPELLINGS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mlp.experts.experts.": "mlp.experts.",
}
EXPERTS = "mlp.experts."
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


def blocks_of(entry: Entry, file: ReadOnlyFile, body: int) -> Iterator[tuple[str, tuple[int, ...], RowBlock]]:
    """(logical name, shape of the global tensor without the axes in front, where the rows lie) of all that a box holds
    parts of. `body`: the byte of the file where its tensors begin."""
    known = parse(entry.key)
    axes = known.num_axes
    if len(entry.global_shape) < max(axes, 1) or entry.dtype not in TORCH_DTYPES:
        return
    box = (1,) * (len(entry.global_shape) - len(entry.shape)) + entry.shape
    inner, offset = box[axes:], entry.offset[axes:]
    if len(inner) > 2:
        return
    rows, columns = (inner[0], 1) if len(inner) == 1 else inner
    first = (offset[0], 0) if len(inner) == 1 else offset
    dtype = TORCH_DTYPES[entry.dtype]
    size = math.prod(inner) * dtype.itemsize
    for number, index in enumerate(itertools.product(*(range(n) for n in box[:axes]))):
        name = known.name(tuple(o + i for o, i in zip(entry.offset, index)))
        stored = StoredMatrix(name, file, body + entry.start + number * size, dtype, rows, columns)
        yield name, entry.global_shape[axes:], RowBlock(stored, 0, rows, first[0], ((0, first[1], columns),))


def read_boxes(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], bounce: BounceBuffers | None
) -> tuple[dict[str, list[RowBlock]], dict[str, tuple[int, ...]], list[ReadOnlyFile]]:
    """The blocks of each logical weight of `shapes` in a checkpoint, their global shapes, and the files that were
    opened. Raises ConfigError."""
    blocks: dict[str, list[RowBlock]] = {}
    found: dict[str, tuple[int, ...]] = {}
    files = []
    try:
        for path in (folder / name for name in manifest.read(folder) if name.endswith(safetensors_header.SUFFIX)):
            header, entries = safetensors_header.read_all(path)
            file: ReadOnlyFile | None = None
            for entry in entries.values():
                if not _is_of(parse(entry.key), shapes):
                    continue
                file = file or ReadOnlyFile(path, bounce)
                for name, shape, block in blocks_of(entry, file, header.body):
                    blocks.setdefault(name, []).append(block)
                    if found.setdefault(name, shape) != shape:
                        raise ConfigError(f"checkpoint {folder} has {name} in two shapes: {found[name]} and {shape}.")
            if file is not None:
                files.append(file)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"checkpoint {folder} cannot be read: {error}") from error
    return blocks, found, files


def _is_of(known: GlobalName, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a weight is the model's, by what one of a stack is called."""
    if not known.has_layers:
        return known.name((0,) * known.num_axes) in shapes
    return any(name.startswith(known.prefix) for name in shapes)


def clipped(block: RowBlock, rows: int) -> RowBlock | None:
    """A block without the rows that pad the vocabulary of its layout, of which the model has `rows`."""
    left = min(block.rows, rows - block.line)
    return replace(block, rows=left) if left > 0 else None
