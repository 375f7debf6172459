"""A safetensors file: names, types and shapes are read from its header, tensors one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from configs.schema import ConfigError
from models.weight_files.checks import check_file, one_line


class SafetensorsFile:
    """Raises ConfigError where the file is missing, broken, or not of torch's models."""

    def __init__(self, path: Path) -> None:
        check_file(path)
        try:
            self._file: Any = safe_open(path, framework="pt")
        except Exception as error:  # safetensors raises its own SafetensorError and OSError, with the path in neither
            raise ConfigError(f"{path} is no whole safetensors file ({one_line(error)}); copy it again.") from error
        written_by = (self._file.metadata() or {}).get("format", "pt")
        if written_by not in ("pt", "mlx"):
            raise ConfigError(
                f"{path} has format ({written_by}) in its metadata: it must be pt, as torch's models are saved."
            )

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file.keys())

    def dtype(self, name: str) -> str:
        """The type of a tensor as safetensors calls it."""
        return str(self._file.get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._file.get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """A tensor, on the host."""
        return self._file.get_tensor(name)
