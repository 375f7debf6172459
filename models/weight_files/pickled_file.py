"""A file of torch.save (pytorch_model.bin), read as tensors alone: what else a pickle could do is refused by torch.

A file of torch 1.6 or later is mapped, so that only what is used comes into memory. An older one cannot be: it is read
whole, and one of them is held at a time.
"""

from __future__ import annotations

import re
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from configs.schema import ConfigError
from models.weight_files.checks import check_file, one_line
from models.weight_files.stored import StoredMatrix, as_matrix
from parallel.dtypes import SAFETENSORS_NAMES

Tensors = dict[str, torch.Tensor]


@dataclass
class Held:
    """The one old file whose tensors are in memory."""

    path: Path | None = None
    tensors: Tensors = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class PickledFile:
    """Raises ConfigError where the file is missing or broken, or holds anything but tensors by name."""

    def __init__(self, path: Path, held: Held) -> None:
        check_file(path)
        self._path, self._held = path, held
        self._mapped = _load(path, mapped=True) if zipfile.is_zipfile(path) else None
        self._kinds = {name: (_dtype(tensor), tuple(tensor.shape)) for name, tensor in self._tensors().items()}
        self._dtypes = {name: tensor.dtype for name, tensor in self._tensors().items()}

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._kinds)

    def dtype(self, name: str) -> str:
        """The type of a tensor as safetensors calls it."""
        return self._kinds[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._kinds[name][1]

    def stored(self, name: str) -> StoredMatrix:
        """A tensor where it is mapped, or held. It may share its numbers with another, and lie in any order."""
        rows, columns = as_matrix(self.shape(name))
        return StoredMatrix(name, lambda: self._tensors()[name], 0, self._dtypes[name], rows, columns)

    def close(self) -> None:
        """Nothing is read any more."""
        self._mapped = {}

    def _tensors(self) -> Tensors:
        if self._mapped is not None:
            return self._mapped
        with self._held.lock:
            if self._held.path != self._path:
                self._held.path, self._held.tensors = None, {}  # before the next is read
                self._held.tensors = _load(self._path, mapped=False)
                self._held.path = self._path
            return self._held.tensors


def _load(path: Path, mapped: bool) -> Tensors:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # of a broken file: RuntimeError, EOFError, ValueError, KeyError and others
        if type(error).__name__ == "UnpicklingError":  # by its name: nothing here imports what unpickles
            raise ConfigError(_refusal(path, str(error))) from error
        cause = f"{type(error).__name__}: {_first(str(error))}".removesuffix(": ")
        raise ConfigError(f"{path} is no whole file of torch.save ({cause}); copy it again.") from error
    rule = "it must hold tensors by name, as a state_dict does"
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: {rule}.")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{path} holds a {type(tensor).__name__} at {name!r:.80}: {rule}.")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ConfigError(f"tensor {name} of {path} must be a plain one, neither sparse nor quantized.")
    return {name: tensor.detach() for name, tensor in content.items()}


def _refusal(path: Path, said: str) -> str:
    named = re.search(r"GLOBAL (\S+)", said)
    if named is None:  # no pickle at all, or one of another kind
        cause = _first(said.rpartition("WeightsUnpickler error: ")[2])
        return f"{path} is no whole file of torch.save, or not one of tensors alone ({cause}); copy it again."
    return (
        f"{path} is not read: its pickle calls {named[1]}, and code in a file of weights is never run. "
        "Take the model as safetensors."
    )


def _first(said: str) -> str:
    """The first sentence of an error: torch adds pages to it."""
    return one_line(said).split(". ")[0].partition(" Check the documentation")[0][:120]


def _dtype(tensor: torch.Tensor) -> str:
    return SAFETENSORS_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
