"""Reads a model's logical weights from files: any box of a weight, by its name, without building the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from base.errors import ConfigError
from memory.read_only_file import ReadOnlyFile
from models.weight_files.expected import FP32_NAMES, wrong_cover
from models.weight_files.stored_tensors import RowBlock, as_matrix, fill


@dataclass(frozen=True)
class LogicalWeight:
    """A weight of a model: its shape, its dtype after reading, and the stored blocks that contain it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[RowBlock, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in memory, in the type to which reading converts it."""
        return math.prod(self.shape) * self.dtype.itemsize


class LogicalTensors:
    """Reader of a model's weights by their logical names (Megatron's names, as with one process). Several threads may
    read at once. Files stay open, so that a file that is deleted meanwhile can still be read."""

    def __init__(
        self, folder: Path, weights: Mapping[str, LogicalWeight], expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Check that the weights of a folder are those of its model. `expected`: the shape of every weight of the
        model. Raises ConfigError if a weight is missing, stored twice, incomplete, or of another shape."""
        self.folder = folder
        self._weights = weights
        for name in [*expected, *(name for name in weights if name not in expected)]:
            if name not in weights:
                raise ConfigError(f"{folder} has no tensor {name}, which its config calls for. Copy the folder again.")
            shape = weights[name].shape
            if shape != expected.get(name):
                wanted = f"calls for {list(expected[name])}" if name in expected else "has no such tensor"
                raise ConfigError(
                    f"tensor {name} of {folder} has shape {list(shape)}, but its config {wanted}. Copy it again."
                )
            boxes = (box for block in weights[name].blocks for box in block.boxes())
            problem = wrong_cover(boxes, *as_matrix(shape))
            if problem is not None:
                raise ConfigError(
                    f"tensor {name} of {folder} is not stored exactly once: {problem}. Copy the folder again."
                )

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most weight elements."""
        sizes: Counter[torch.dtype] = Counter()
        for weight in self._weights.values():
            sizes[weight.dtype] += math.prod(weight.shape)
        return max(sorted(sizes, key=str), key=lambda dtype: sizes[dtype])

    def names(self) -> tuple[str, ...]:
        """Return the logical names of all weights, in the order of Megatron-core's modules or of a family's rules."""
        return tuple(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return self._weights[name].shape

    def dtype(self, name: str, wanted: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype of a weight after reading and dequantisation. `wanted`: the dtype to which weights are
        converted; weights that stay fp32 in every precision keep their own dtype."""
        own = self._weights[name].dtype
        return own if wanted is None or name.endswith(FP32_NAMES) else wanted

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a weight in memory, in the type to which reading converts it."""
        return self._weights[name].num_bytes

    def file_of(self, name: str) -> Path:
        """Return the path of the file that holds a weight's first block; the folder if the block is in memory."""
        source = self._weights[name].blocks[0].stored.source
        return source.path if isinstance(source, ReadOnlyFile) else self.folder

    def fill(self, name: str, target: torch.Tensor, at: Sequence[int] | None = None) -> None:
        """Fill `target`, a host tensor of any strides and float dtype, with a part of a logical weight. The part begins
        at index `at` (None: the first number) and has the target's shape.

        Raises ConfigError, in one line with file and tensor, if a file cannot be read; ValueError if the part is
        outside the weight.
        """
        shape = self.shape(name)
        first = tuple(at) if at is not None else (0,) * len(shape)
        if not len(shape) == len(first) == target.dim() or not all(
            0 <= o and o + n <= size for o, n, size in zip(first, target.shape, shape)
        ):
            raise ValueError(f"a box {list(target.shape)} at {list(first)} is outside {name} {list(shape)}")
        matrix = target if target.dim() == 2 else target.unsqueeze(-1)
        fill(matrix, self._weights[name].blocks, (first[0], first[1] if len(first) == 2 else 0))

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a whole weight as `dtype` (None: its own dtype). Raises ConfigError."""
        result = torch.empty(self.shape(name), dtype=dtype or self.dtype(name))
        self.fill(name, result)
        return result
