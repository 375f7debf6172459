"""A tensor as it is stored: where its numbers lie, of which type, and the scales of quantised ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from memory.read_only_file import ReadOnlyFile

Source = ReadOnlyFile | Callable[[], torch.Tensor]  # a file, or what gives a tensor that is in memory, or mapped


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A whole tensor, row after row; a vector has one column."""

    name: str  # for messages
    source: Source
    start: int  # byte of the file
    dtype: torch.dtype
    rows: int
    columns: int
    scale: BlockScale | None = None  # of quantised numbers

    @property
    def read_as(self) -> torch.dtype:
        """The type that its numbers have when they have been read."""
        return self.dtype if self.scale is None else self.scale.dtype

    def rows_from(self, first: int, count: int) -> StoredMatrix:
        """Cut `count` rows, from row `first` on, out as a matrix that is stored where they are."""
        assert self.scale is None and first + count <= self.rows
        source, columns = self.source, self.columns
        if isinstance(source, ReadOnlyFile):
            return replace(self, start=self.start + first * columns * self.dtype.itemsize, rows=count)
        held = source
        return replace(self, source=lambda: held().reshape(-1, columns)[first : first + count], rows=count)


@dataclass(frozen=True, eq=False)
class BlockScale:
    """The scales of a quantised matrix: one for each block of it, by which its numbers are multiplied. The last block
    of a row or column may be partial."""

    stored: StoredMatrix
    block: tuple[int, int] | None  # rows and columns; None: one scale for all
    dtype: torch.dtype  # that the products get

    def scaled(self, rows_NK: torch.Tensor, scales: torch.Tensor, first_row: int, first_column: int) -> torch.Tensor:
        """Rows of the matrix, which begin at `first_row` and `first_column` of it, times the scale of each number's
        block: the product in fp32, rounded once. `scales` are all of them."""
        num_rows, num_columns = rows_NK.shape
        grid = scales.to(torch.float32)
        if self.block is None:
            return (rows_NK.to(torch.float32) * grid.reshape(1, 1)).to(self.dtype)
        height, width = self.block
        of_rows = grid[torch.arange(first_row, first_row + num_rows) // height]
        first, last = first_column // width, -(-(first_column + num_columns) // width)
        of_blocks = of_rows[:, first:last].repeat_interleave(width, dim=1)
        of_columns = of_blocks.narrow(1, first_column - first * width, num_columns)
        return (rows_NK.to(torch.float32) * of_columns).to(self.dtype)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of any shape."""
    return (math.prod(shape), 1) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, without a copy."""
    dense = tensor.detach().as_strided((tensor.numel(),), (1,))  # one number may have any stride
    return memoryview(dense.view(torch.uint8).numpy())
