"""Tensors as files store them, and one function that fills any box of a logical tensor from them.

A logical tensor is treated as a matrix [rows, columns]; a vector has one column. Files hold it as blocks of rows, each
with its position in the logical matrix. Only the rows that a box needs are read. Blocks that are transposed, strided,
quantised or of another dtype pass through a scratch buffer of a few MiB, so that a tensor is never in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from base.errors import ConfigError
from memory.read_only_file import ReadOnlyFile, UnreadableFile
from models.weight_files.expected import Box

SCRATCH_BYTES = 4 * 2**20
SCALED_BYTES = 2**20  # of a band of fp8 numbers, which are fp32 in between
TILE_ROWS = 32  # transposed at once: several times as fast as a whole band, which no cache of a CPU holds
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types of equal size: numpy has no bf16

Source = ReadOnlyFile | Callable[[], torch.Tensor]  # a file, or a function that returns a mapped or held tensor


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """The location of a whole tensor in a file or in memory, as a row-major matrix; a vector has one column."""

    name: str  # for messages
    source: Source
    start: int  # byte of the file
    dtype: torch.dtype
    num_rows: int
    num_columns: int
    scale: BlockScale | None = None  # of quantised numbers

    @property
    def read_as(self) -> torch.dtype:
        """The dtype of the numbers after reading."""
        return self.dtype if self.scale is None else self.scale.dtype

    def rows_from(self, first: int, count: int) -> StoredMatrix:
        """Return `count` rows, starting at row `first`, as a matrix that refers to the same stored bytes."""
        assert self.scale is None and first + count <= self.num_rows
        source, columns = self.source, self.num_columns
        if isinstance(source, ReadOnlyFile):
            return replace(self, start=self.start + first * columns * self.dtype.itemsize, num_rows=count)
        held = source
        return replace(self, source=lambda: held().reshape(-1, columns)[first : first + count], num_rows=count)


@dataclass(frozen=True, eq=False)
class BlockScale:
    """The scales of a quantised matrix: each multiplies the numbers of one block. The last block of a row or column may
    be partial."""

    stored: StoredMatrix
    block: tuple[int, int] | None  # rows and columns; None: one scale for the whole matrix
    dtype: torch.dtype  # of the products

    def scaled(self, rows_NK: torch.Tensor, scales: torch.Tensor, first_row: int, first_column: int) -> torch.Tensor:
        """Multiply a part of the matrix that begins at `first_row` and `first_column` by the scale of each number's
        block, in fp32, rounded once. `scales` are those of the whole matrix."""
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


@dataclass(frozen=True)
class RowBlock:
    """Rows of a stored matrix, and their position in the logical matrix.

    Stored row `source_row + i` is logical row `target_row + i`. `runs` maps its columns: (first column of the stored
    row, first column of the logical row, length). In a transposed block, stored rows are logical columns.
    """

    stored: StoredMatrix
    source_row: int
    num_rows: int
    target_row: int
    runs: tuple[tuple[int, int, int], ...]
    transposed: bool = False

    def boxes(self) -> Iterator[Box]:
        """Yield the rectangles of the logical matrix that this block covers: first row, first column, end row, end
        column."""
        for _, first, length in self.runs:
            box = (self.target_row, first, self.target_row + self.num_rows, first + length)
            yield (box[1], box[0], box[3], box[2]) if self.transposed else box


@dataclass(frozen=True)
class _Overlap:
    """The numbers that a stored block and a requested part of a tensor share: stored rows [row, row + num_rows) are
    copied to `target` [num_rows, ...], with their columns mapped by `runs`."""

    stored: StoredMatrix
    row: int
    num_rows: int
    runs: tuple[tuple[int, int, int], ...]
    target: torch.Tensor


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor of this shape as a matrix; a vector has one column."""
    return (math.prod(shape), 1) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous host tensor."""
    dense = tensor.detach().as_strided((tensor.numel(),), (1,))  # one number may have any stride
    return memoryview(dense.view(torch.uint8).numpy())


def whole(stored: StoredMatrix) -> RowBlock:
    """Return the block with all rows of a stored matrix, for a logical matrix that is stored whole."""
    return RowBlock(stored, 0, stored.num_rows, 0, ((0, 0, stored.num_columns),))


def bands_of(stored: StoredMatrix) -> Iterator[torch.Tensor]:
    """Yield the rows of a matrix in bands of a few MiB. Each band overwrites the previous band. Raises ConfigError."""
    size = max(1, SCRATCH_BYTES // max(1, stored.num_columns * stored.read_as.itemsize))
    held = torch.empty(min(size, stored.num_rows), stored.num_columns, dtype=stored.read_as)
    for first in range(0, stored.num_rows, size):
        band = held[: stored.num_rows - first]
        fill(band, [whole(stored)], (first, 0))
        yield band


@torch.no_grad()
def fill(target: torch.Tensor, blocks: Iterable[RowBlock], at: tuple[int, int] = (0, 0)) -> None:
    """Fill `target`, a host matrix of any strides and dtype, with a part of the logical matrix. The part begins at row
    and column `at` and has the target's shape.

    Raises ConfigError, in one line with file and tensor, if a file cannot be read; ValueError if the blocks do not
    cover the part.
    """
    overlaps = [overlap for block in blocks if (overlap := _overlap(target, block, at)) is not None]
    found = sum(each.num_rows * sum(length for _, _, length in each.runs) for each in overlaps)
    if found != target.numel():
        raise ValueError(f"the files have only {found} of the {target.numel()} numbers of the region at {list(at)}")
    reader = _BandReader()
    for each in overlaps:
        try:
            reader.read(each)
        except UnreadableFile as error:
            raise ConfigError(f"tensor {each.stored.name}: {error}. Copy the file again.") from error


def _overlap(target: torch.Tensor, block: RowBlock, at: tuple[int, int]) -> _Overlap | None:
    view, (top, left) = (target.t(), (at[1], at[0])) if block.transposed else (target, at)
    first, last = max(block.target_row, top), min(block.target_row + block.num_rows, top + view.size(0))
    runs = []
    for source, column, length in block.runs:
        low, high = max(column, left), min(column + length, left + view.size(1))
        if low < high:
            runs.append((source + low - column, low - left, high - low))
    if first >= last or not runs:
        return None
    row = block.source_row + first - block.target_row
    return _Overlap(block.stored, row, last - first, tuple(runs), view[first - top : last - top])


class _BandReader:
    """Reader of the parts of stored tensors that a request needs. All reads share one scratch buffer."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scales: tuple[BlockScale, torch.Tensor] | None = None  # the scales that were read last

    def read(self, overlap: _Overlap) -> None:
        """Read the numbers that a stored block and a request share (`overlap`) into their target."""
        stored = overlap.stored
        if stored.scale is None and isinstance(stored.source, ReadOnlyFile) and len(overlap.runs) == 1:
            ((source, column, length),) = overlap.runs
            dest = overlap.target[:, column : column + length]
            is_one_run = overlap.num_rows == 1 or length == stored.num_columns
            if is_one_run and dest.dtype == stored.dtype and dest.is_contiguous():
                _read(stored, overlap.row, source, dest)
                return
        for band, columns in _bands(overlap):
            numbers = self._numbers(stored, band, columns)
            here = slice(band.start - overlap.row, band.stop - overlap.row)
            for source, column, length in overlap.runs:
                low, high = max(source, columns.start), min(source + length, columns.stop)
                if low < high:
                    to = column + low - source
                    band_part = numbers[:, low - columns.start : high - columns.start]
                    _copy_band(band_part, overlap.target[here, to : to + high - low])

    def _numbers(self, stored: StoredMatrix, band: range, columns: range) -> torch.Tensor:
        """Return some rows and columns of a stored matrix, dequantised. The next call may overwrite the result."""
        if isinstance(stored.source, ReadOnlyFile):
            # whole rows are adjacent in the file; a part of a row is read alone
            size = len(band) * len(columns) * stored.dtype.itemsize
            if self._scratch.numel() < size:
                self._scratch = torch.empty(max(size, min(SCRATCH_BYTES, 4 * size)), dtype=torch.uint8)
            numbers = self._scratch[:size].view(stored.dtype).view(len(band), len(columns))
            _read(stored, band.start, columns.start, numbers)
        else:
            held = stored.source().reshape(stored.num_rows, stored.num_columns)
            numbers = held[band.start : band.stop, columns.start : columns.stop]
        scale = stored.scale
        if scale is None:
            return numbers
        if self._scales is None or self._scales[0] is not scale:
            scales = torch.empty(scale.stored.num_rows, scale.stored.num_columns, dtype=scale.stored.dtype)
            fill(scales, [whole(scale.stored)])
            self._scales = (scale, scales)
        return scale.scaled(numbers, self._scales[1], band.start, columns.start)


def _copy_band(band: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a band of rows. Equal dtypes are copied with numpy in this thread: torch's threads would wait for each other
    longer than they copy, and slow down other threads that compute."""
    is_transposed = target.stride(0) == 1 and target.size(1) > 1
    if band.dtype != target.dtype and not is_transposed:
        target.copy_(band)
        return
    bits = BITS[target.dtype.itemsize]
    source, dest = band.to(target.dtype).view(bits).numpy(), target.view(bits).numpy()
    step = TILE_ROWS if is_transposed else len(band)
    for first in range(0, len(band), step):
        np.copyto(dest[first : first + step], source[first : first + step])


def _bands(overlap: _Overlap) -> Iterator[tuple[range, range]]:
    """Yield the rows and columns of the stored matrix to read at once: whole rows, or parts of a row that is longer
    than the scratch buffer."""
    stored = overlap.stored
    most = max(1, (SCRATCH_BYTES if stored.scale is None else SCALED_BYTES) // stored.dtype.itemsize)
    stored_rows = range(overlap.row, overlap.row + overlap.num_rows)
    if stored.num_columns <= most:
        size = max(1, most // stored.num_columns)
        for first in range(0, len(stored_rows), size):
            yield stored_rows[first : first + size], range(stored.num_columns)
        return
    for row in range(len(stored_rows)):
        for source, _, length in overlap.runs:
            for first in range(source, source + length, most):
                yield stored_rows[row : row + 1], range(first, min(first + most, source + length))


def _read(stored: StoredMatrix, row: int, column: int, target: torch.Tensor) -> None:
    assert isinstance(stored.source, ReadOnlyFile) and target.is_contiguous()
    if target.numel() == 0:
        return
    start = stored.start + (row * stored.num_columns + column) * stored.dtype.itemsize
    stored.source.read(start, as_bytes(target))
