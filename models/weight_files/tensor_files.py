"""Readers for the two formats of weight files: safetensors, and files of torch.save (pytorch_model.bin).

From a file of torch.save only tensors are loaded: torch rejects anything else that a pickle could do. A file of torch
1.6 or later is memory-mapped, so that only the tensors in use take memory. An older file cannot be mapped: it is read
whole, and only one such file is in memory at a time.
"""

from __future__ import annotations

import os
import re
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from base.errors import ConfigError
from memory.read_only_file import BounceBuffers, ReadOnlyFile
from models.weight_files.header import read_header
from models.weight_files.stored_tensors import StoredMatrix, as_matrix
from parallel.dtypes import SAFETENSORS_NAMES

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
LFS_POINTER = b"version https://git-lfs"
Tensors = dict[str, torch.Tensor]


class TensorType(NamedTuple):
    """The type of a tensor's numbers, as safetensors spells it (F32, BF16, I64, ...), and the tensor's shape."""

    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """A safetensors file; `types` has the type and shape of every tensor. Raises ConfigError if the file is missing or
    damaged, or was written for another framework than torch."""

    def __init__(self, path: Path, bounce: BounceBuffers | None = None) -> None:
        _check_file(path)
        try:
            header = read_header(path)
            self._file = ReadOnlyFile(path, bounce)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is not a complete safetensors file ({one_line(error)}). Copy it again."
            ) from error
        written_by = header.metadata.get("format", "pt")
        if written_by not in ("pt", "mlx"):
            raise ConfigError(
                f"{path} has format ({written_by}) in its metadata: it must be pt, the format of torch models. Save "
                "the model again with PyTorch."
            )
        self._spans = header.tensors
        self.types = {name: TensorType(span.dtype, span.shape) for name, span in header.tensors.items()}

    def stored(self, name: str) -> StoredMatrix:
        """Return the location of a tensor in the file. Raises ConfigError if torch lacks its dtype."""
        span = self._spans[name]
        if span.dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"tensor {name} of {self._file.path} has type {span.dtype}, which torch does not have. Use files with "
                "BF16, F16 or F32 weights."
            )
        return StoredMatrix(name, self._file, span.start, TORCH_DTYPES[span.dtype], *as_matrix(span.shape))

    def close(self) -> None:
        """Close the file. Its tensors cannot be read afterwards."""
        self._file.close()


@dataclass
class HeldFile:
    """Cache for the tensors of a single file written before torch 1.6, which must be read whole."""

    path: Path | None = None
    tensors: Tensors = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class PickledFile:
    """A file of torch.save; `types` has the type and shape of every tensor. Raises ConfigError if the file is missing
    or damaged, or contains anything but tensors by name."""

    def __init__(self, path: Path, held: HeldFile) -> None:
        _check_file(path)
        self._path, self._held = path, held
        self._mapped = _load(path, mapped=True) if zipfile.is_zipfile(path) else None
        tensors = self._tensors()
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        kinds = {kind: SAFETENSORS_NAMES.get(kind, str(kind).removeprefix("torch.")) for kind in self._dtypes.values()}
        self.types = {name: TensorType(kinds[each.dtype], tuple(each.shape)) for name, each in tensors.items()}

    def stored(self, name: str) -> StoredMatrix:
        """Return the location of a tensor in memory; it may share memory with other tensors and have any strides."""
        return StoredMatrix(
            name, lambda: self._tensors()[name], 0, self._dtypes[name], *as_matrix(self.types[name].shape)
        )

    def close(self) -> None:
        """Drop the memory mapping. No tensor can be read afterwards."""
        self._mapped = {}

    def _tensors(self) -> Tensors:
        if self._mapped is not None:
            return self._mapped
        with self._held.lock:
            if self._held.path != self._path:
                self._held.path, self._held.tensors = None, {}  # frees the other file before this one is read
                self._held.tensors = _load(self._path, mapped=False)
                self._held.path = self._path
            return self._held.tensors


def _load(path: Path, mapped: bool) -> Tensors:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # of a broken file: RuntimeError, EOFError, ValueError, KeyError and others
        message = str(error)
        if type(error).__name__ != "UnpicklingError":  # by its name: nothing here imports pickle
            cause = f"{type(error).__name__}: {_first_sentence(message)}".removesuffix(": ")
            raise ConfigError(f"{path} is not a complete file of torch.save ({cause}). Copy it again.") from error
        called = re.search(r"GLOBAL (\S+)", message)
        if called is None:  # not a pickle, or one of another kind
            cause = _first_sentence(message.rpartition("WeightsUnpickler error: ")[2])
            raise ConfigError(
                f"{path} is not a complete file of torch.save that holds only tensors ({cause}). Copy it again."
            ) from error
        raise ConfigError(
            f"{path} was not read: its pickle calls {called[1]}, and code in a weight file is never run. "
            "Use the safetensors files of the model."
        ) from error
    rule = "it must hold tensors by name, as a state_dict does. Save the model's state_dict"
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: {rule}.")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{path} holds a {type(tensor).__name__} at {name!r:.80}: {rule}.")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ConfigError(f"tensor {name} of {path} must be neither sparse nor quantized. Save plain tensors.")
    return {name: tensor.detach() for name, tensor in content.items()}


def _first_sentence(message: str) -> str:
    """Return the first sentence of an error message, at most 120 characters. torch appends pages of advice."""
    return one_line(message).split(". ")[0].partition(" Check the documentation")[0][:120]


def _check_file(path: Path) -> None:
    """Raise ConfigError unless `path` is a readable file that is not a Git LFS pointer."""
    if not path.is_file():
        what = "is missing" if not os.path.lexists(path) else "is not a file"
        raise ConfigError(f"{path} {what}. Copy the folder again.")
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    if start == LFS_POINTER:
        raise ConfigError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder.")


def one_line(error: object) -> str:
    """Return the message of an error on one line, without a full stop at its end."""
    return " ".join(str(error).split()).removesuffix(".")
