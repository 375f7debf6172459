"""Boxes of a checkpoint's global tensors -> blocks of rows of the logical weights that they are parts of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checkpoint import manifest, safetensors_header
from checkpoint.logical.names import WeightPart, parts_of, without_padding
from configs.schema import ConfigError
from memory.read_only_file import BounceBuffers, ReadOnlyFile
from models.weight_files.logical import LogicalWeight
from models.weight_files.pieces import RowBlock
from models.weight_files.safetensors_file import TORCH_DTYPES
from models.weight_files.stored import StoredMatrix


class BoxFiles:
    """A checkpoint's files, and where the logical weights of `shapes` lie in them. Raises ConfigError."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], bounce: BounceBuffers | None) -> None:
        self._files: list[ReadOnlyFile] = []
        blocks: dict[str, list[RowBlock]] = {}
        try:
            for path in (folder / name for name in manifest.read(folder) if name.endswith(safetensors_header.SUFFIX)):
                header, entries = safetensors_header.read_all(path)
                held = [
                    (part, entry.dtype, header.body + entry.start + part.start)
                    for entry in entries.values()
                    for part in parts_of(entry)
                    if part.name in shapes
                ]
                if not held:
                    continue
                self._files.append(ReadOnlyFile(path, bounce))
                for part, dtype, start in held:
                    kept = without_padding(part, shapes[part.name])
                    if kept is not None:
                        blocks.setdefault(part.name, []).append(_block(kept, dtype, start, self._files[-1]))
        except (OSError, ValueError) as error:
            raise ConfigError(f"checkpoint {folder} cannot be read: {error}") from error
        self.weights: dict[str, LogicalWeight] = {}
        for name, shape in shapes.items():
            found = blocks.get(name, [])
            kinds = {block.stored.dtype for block in found}
            if len(kinds) > 1:
                raise ConfigError(f"checkpoint {folder} has {name} in several types: {sorted(map(str, kinds))}.")
            if found:
                self.weights[name] = LogicalWeight(shape, kinds.pop(), tuple(found))

    def close(self) -> None:
        """Nothing is read any more."""
        for file in self._files:
            file.close()


def _block(part: WeightPart, dtype: str, start: int, file: ReadOnlyFile) -> RowBlock:
    row, column, last_row, last_column = part.box
    rows, columns = last_row - row, last_column - column
    stored = StoredMatrix(part.name, file, start, TORCH_DTYPES[dtype], rows, columns)
    return RowBlock(stored, 0, rows, row, ((0, column, columns),))
