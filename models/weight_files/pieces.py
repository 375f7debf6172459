"""How a logical tensor lies in files: blocks of rows, each with its place in it, and one function that fills any box of
it from them.

A logical tensor is taken as a matrix [rows, columns]; a vector has one column. Only the rows that a box needs are read.
What is of another type, transposed, strided or quantised goes through a scratch of a few MiB: there is never a second
whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from configs.schema import ConfigError
from memory.read_only_file import ReadOnlyFile, UnreadableFile
from models.weight_files.cover import Box
from models.weight_files.stored import BlockScale, StoredMatrix, as_bytes

SCRATCH_BYTES = 4 * 2**20
SCALED_BYTES = 2**20  # of a band of fp8 numbers, which are fp32 between
TILE_ROWS = 32  # that are transposed at once: several times as fast as a band, which no cache of a CPU holds
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes: numpy has no bf16


@dataclass(frozen=True)
class RowBlock:
    """Rows of a stored matrix, and where they go.

    Row `source_row + i` goes to row `line + i` of the logical matrix, and its columns there by `runs`: (first column of
    the stored row, first column of the logical one, length). Where it is transposed, rows go to columns.
    """

    stored: StoredMatrix
    source_row: int
    rows: int
    line: int
    runs: tuple[tuple[int, int, int], ...]
    transposed: bool = False

    def boxes(self) -> Iterator[Box]:
        """What it covers of the logical matrix."""
        for _, first, length in self.runs:
            box = (self.line, first, self.line + self.rows, first + length)
            yield (box[1], box[0], box[3], box[2]) if self.transposed else box


@dataclass(frozen=True)
class _BlockPart:
    """What a box takes of a block: rows [row, row + rows) of the stored matrix go to those of `target` [rows, ...], its
    columns by `runs`."""

    stored: StoredMatrix
    row: int
    rows: int
    runs: tuple[tuple[int, int, int], ...]
    target: torch.Tensor


def whole(stored: StoredMatrix) -> RowBlock:
    """All of a stored matrix as the logical one."""
    return RowBlock(stored, 0, stored.rows, 0, ((0, 0, stored.columns),))


def bands_of(stored: StoredMatrix) -> Iterator[torch.Tensor]:
    """The rows of a matrix as they are read, a few MiB of them at a time, each in the memory of the one before. Raises
    ConfigError."""
    size = max(1, SCRATCH_BYTES // max(1, stored.columns * stored.read_as.itemsize))
    held = torch.empty(min(size, stored.rows), stored.columns, dtype=stored.read_as)
    for first in range(0, stored.rows, size):
        band = held[: stored.rows - first]
        fill(band, [whole(stored)], (first, 0))
        yield band


@torch.no_grad()
def fill(target: torch.Tensor, blocks: Iterable[RowBlock], at: tuple[int, int] = (0, 0)) -> None:
    """Fill a matrix of the host, which may be strided and of another type, with the box of the logical matrix that
    begins at `at` and has its shape.

    Raises ConfigError, in a line with file and tensor, where a file cannot be read; ValueError where the blocks do not
    cover the box.
    """
    parts = [part for block in blocks if (part := _part(target, block, at)) is not None]
    found = sum(part.rows * sum(length for _, _, length in part.runs) for part in parts)
    if found != target.numel():
        raise ValueError(f"{found} of the {target.numel()} numbers of the box at {list(at)} are there")
    reader = _BandReader()
    for part in parts:
        try:
            reader.take(part)
        except UnreadableFile as error:
            raise ConfigError(f"tensor {part.stored.name}: {error}. Copy the file again.") from error


def _part(target: torch.Tensor, block: RowBlock, at: tuple[int, int]) -> _BlockPart | None:
    view, (line, column) = (target.t(), (at[1], at[0])) if block.transposed else (target, at)
    first, last = max(block.line, line), min(block.line + block.rows, line + view.size(0))
    runs = []
    for source, place, length in block.runs:
        low, high = max(place, column), min(place + length, column + view.size(1))
        if low < high:
            runs.append((source + low - place, low - column, high - low))
    if first >= last or not runs:
        return None
    row = block.source_row + first - block.line
    return _BlockPart(block.stored, row, last - first, tuple(runs), view[first - line : last - line])


class _BandReader:
    """Reads parts, with one scratch for all of them."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scales: tuple[BlockScale, torch.Tensor] | None = None  # the last ones that were read

    def take(self, part: _BlockPart) -> None:
        """Read a part into its target."""
        stored = part.stored
        if stored.scale is None and isinstance(stored.source, ReadOnlyFile) and len(part.runs) == 1:
            ((source, place, length),) = part.runs
            dest = part.target[:, place : place + length]
            is_one_run = part.rows == 1 or length == stored.columns
            if is_one_run and dest.dtype == stored.dtype and dest.is_contiguous():
                _read(stored, part.row, source, dest)
                return
        for band, columns in _bands(part):
            rows = self._rows(stored, band, columns)
            for source, place, length in part.runs:
                low, high = max(source, columns.start), min(source + length, columns.stop)
                if low < high:
                    to = place + low - source
                    here = slice(band.start - part.row, band.stop - part.row)
                    _copy(rows[:, low - columns.start : high - columns.start], part.target[here, to : to + high - low])

    def _rows(self, stored: StoredMatrix, band: range, columns: range) -> torch.Tensor:
        if isinstance(stored.source, ReadOnlyFile):
            # whole rows lie one after the other; of parts of rows there is one
            size = len(band) * len(columns) * stored.dtype.itemsize
            if self._scratch.numel() < size:
                self._scratch = torch.empty(max(size, min(SCRATCH_BYTES, 4 * size)), dtype=torch.uint8)
            rows = self._scratch[:size].view(stored.dtype).view(len(band), len(columns))
            _read(stored, band.start, columns.start, rows)
        else:
            held = stored.source().reshape(stored.rows, stored.columns)
            rows = held[band.start : band.stop, columns.start : columns.stop]
        if stored.scale is None:
            return rows
        if self._scales is None or self._scales[0] is not stored.scale:
            self._scales = (stored.scale, _scales(stored.scale))
        return stored.scale.scaled(rows, self._scales[1], band.start, columns.start)


def _copy(rows: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a band. Equal types go through numpy, on this thread alone: torch's threads would wait for each other more
    than they copy, and for those that compute meanwhile."""
    is_transposed = target.stride(0) == 1 and target.size(1) > 1
    if rows.dtype != target.dtype and not is_transposed:
        target.copy_(rows)
        return
    bits = BITS[target.dtype.itemsize]
    source, dest = rows.to(target.dtype).view(bits).numpy(), target.view(bits).numpy()
    step = TILE_ROWS if is_transposed else len(rows)
    for first in range(0, len(rows), step):
        np.copyto(dest[first : first + step], source[first : first + step])


def _bands(part: _BlockPart) -> Iterator[tuple[range, range]]:
    """Rows and columns of the stored matrix that are read at once: whole rows, or where one is longer than the scratch,
    parts of a row."""
    stored = part.stored
    most = max(1, (SCRATCH_BYTES if stored.scale is None else SCALED_BYTES) // stored.dtype.itemsize)
    rows = range(part.row, part.row + part.rows)
    if stored.columns <= most:
        size = max(1, most // stored.columns)
        for first in range(0, len(rows), size):
            yield rows[first : first + size], range(stored.columns)
        return
    for row in range(len(rows)):
        for source, _, length in part.runs:
            for first in range(source, source + length, most):
                yield rows[row : row + 1], range(first, min(first + most, source + length))


def _scales(scale: BlockScale) -> torch.Tensor:
    """All scales of a matrix."""
    result = torch.empty(scale.stored.rows, scale.stored.columns, dtype=scale.stored.dtype)
    fill(result, [whole(scale.stored)])
    return result


def _read(stored: StoredMatrix, row: int, column: int, target: torch.Tensor) -> None:
    assert isinstance(stored.source, ReadOnlyFile) and target.is_contiguous()
    if target.numel() == 0:
        return
    start = stored.start + (row * stored.columns + column) * stored.dtype.itemsize
    stored.source.read(start, as_bytes(target))
