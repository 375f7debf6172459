"""Logical tensors where they lie: the model's weights under layout-free names, any box of each, without a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.schema import ConfigError
from memory.read_only_file import ReadOnlyFile
from models.weight_files.cover import wrong_cover
from models.weight_files.expected import FP32_NAMES
from models.weight_files.pieces import RowBlock, fill
from models.weight_files.stored import as_matrix


@dataclass(frozen=True)
class LogicalWeight:
    """One logical tensor: its shape, the type that it is read with, and where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[RowBlock, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers as they are read."""
        return math.prod(self.shape) * self.dtype.itemsize


class LogicalTensors:
    """A model's tensors by their logical names (models/weights.py). Several threads may read at once; files stay open,
    so that one that is deleted meanwhile still reads."""

    def __init__(
        self, folder: Path, weights: Mapping[str, LogicalWeight], expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`expected`: the shape of every weight that the model has. Raises ConfigError where one is missing, there
        twice, not whole, or of another shape."""
        self.folder = folder
        self._weights = weights
        for name in [*expected, *(name for name in weights if name not in expected)]:
            if name not in weights:
                raise ConfigError(f"{folder} has no tensor {name}, which its config calls for.")
            shape = weights[name].shape
            if shape != expected.get(name):
                wanted = f"calls for {list(expected[name])}" if name in expected else "has none"
                raise ConfigError(f"tensor {name} of {folder} has shape {list(shape)}, but its config {wanted}.")
            boxes = (box for block in weights[name].blocks for box in block.boxes())
            problem = wrong_cover(boxes, *as_matrix(shape))
            if problem is not None:
                raise ConfigError(f"tensor {name} of {folder} is not whole: {problem}.")

    @property
    def main_dtype(self) -> torch.dtype:
        """The type of most numbers."""
        sizes: Counter[torch.dtype] = Counter()
        for weight in self._weights.values():
            sizes[weight.dtype] += math.prod(weight.shape)
        return max(sorted(sizes, key=str), key=lambda dtype: sizes[dtype])

    def names(self) -> tuple[str, ...]:
        """The logical names of all tensors, in the order of Megatron-core's modules or of a family's rules."""
        return tuple(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._weights[name].shape

    def dtype(self, name: str, wanted: torch.dtype | None = None) -> torch.dtype:
        """The type that a tensor is read with; a quantised one is read as a plain one. `wanted`: the type that most
        shall have, for the type of this tensor then."""
        own = self._weights[name].dtype
        return own if wanted is None or name.endswith(FP32_NAMES) else wanted

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor of that type."""
        return self._weights[name].num_bytes

    def file_of(self, name: str) -> Path:
        """The file that a tensor lies in, or its first part; the folder where that is not known."""
        source = self._weights[name].blocks[0].stored.source
        return source.path if isinstance(source, ReadOnlyFile) else self.folder

    def fill(self, name: str, target: torch.Tensor, at: Sequence[int] | None = None) -> None:
        """Fill a tensor of the host, which may be strided and of any float type, with the box of the logical tensor
        that begins at `at` (its first number by default) and has the target's shape.

        Raises ConfigError, in a line with file and tensor, where a file cannot be read; ValueError for a box that does
        not lie inside.
        """
        shape = self.shape(name)
        first = tuple(at) if at is not None else (0,) * len(shape)
        if not len(shape) == len(first) == target.dim() or not all(
            0 <= o and o + n <= size for o, n, size in zip(first, target.shape, shape)
        ):
            raise ValueError(f"a box {list(target.shape)} at {list(first)} lies outside {name} {list(shape)}")
        matrix = target if target.dim() == 2 else target.unsqueeze(-1)
        fill(matrix, self._weights[name].blocks, (first[0], first[1] if len(first) == 2 else 0))

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor, as `dtype` (None: as it is read). Raises ConfigError."""
        result = torch.empty(self.shape(name), dtype=dtype or self.dtype(name))
        self.fill(name, result)
        return result
