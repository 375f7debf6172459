"""A safetensors file: names, types and shapes are read from its header, tensors from where they lie."""

from __future__ import annotations

from pathlib import Path

from configs.schema import ConfigError
from memory.read_only_file import BounceBuffers, ReadOnlyFile
from models.weight_files.checks import check_file, one_line
from models.weight_files.header import read_header
from models.weight_files.stored import StoredMatrix, as_matrix
from parallel.dtypes import SAFETENSORS_NAMES

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


class SafetensorsFile:
    """Raises ConfigError where the file is missing, broken, or not of torch's models."""

    def __init__(self, path: Path, bounce: BounceBuffers | None = None) -> None:
        check_file(path)
        try:
            header = read_header(path)
            self._file = ReadOnlyFile(path, bounce)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no whole safetensors file ({one_line(error)}); copy it again.") from error
        written_by = header.metadata.get("format", "pt")
        if written_by not in ("pt", "mlx"):
            raise ConfigError(
                f"{path} has format ({written_by}) in its metadata: it must be pt, as torch's models are saved."
            )
        self._spans = header.tensors

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._spans)

    def dtype(self, name: str) -> str:
        """The type of a tensor as safetensors calls it."""
        return self._spans[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._spans[name].shape

    def stored(self, name: str) -> StoredMatrix:
        """Where a tensor lies. Raises ConfigError for a type that torch does not have."""
        span = self._spans[name]
        if span.dtype not in TORCH_DTYPES:
            raise ConfigError(f"tensor {name} of {self._file.path} has type {span.dtype}, which torch does not have.")
        return StoredMatrix(name, self._file, span.start, TORCH_DTYPES[span.dtype], *as_matrix(span.shape))

    def close(self) -> None:
        """Nothing is read any more."""
        self._file.close()
