"""A streaming writer of safetensors. All names and shapes are given first, so that each file begins with its header and
each tensor is written at its offset. Memory holds one tensor; written pages are dropped from the page cache."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from base import progress
from base.files import writing
from models.weight_files.choice import INDEX_NAME, SINGLE_NAME
from models.weight_files.stored_tensors import as_bytes
from parallel.dtypes import SAFETENSORS_NAMES

MAX_FILE_BYTES = 2 * 1024**3
FLUSH_BYTES = 16 * 1024**2  # written between two flushes to the disk


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Writer:
    """Writer of the tensors `specs`, in any order, to a folder's model.safetensors, or to several files of at most
    `max_file_bytes` with an index. A larger tensor gets its own file. Raises OSError."""

    def __init__(
        self, folder: Path, specs: Iterable[TensorSpec], max_file_bytes: int = MAX_FILE_BYTES, shown: bool = False
    ) -> None:
        """Plan the files of a folder, and create the folder. `shown`: show a progress bar on standard error."""
        folder.mkdir(parents=True, exist_ok=True)
        planned: list[list[TensorSpec]] = [[]]
        size = 0
        for spec in specs:
            if planned[-1] and size + spec.num_bytes > max_file_bytes:
                planned.append([])
                size = 0
            planned[-1].append(spec)
            size += spec.num_bytes
        self.folder = folder
        names = [SINGLE_NAME]
        if len(planned) > 1:
            names = [f"model-{number:05d}-of-{len(planned):05d}.safetensors" for number in range(1, len(planned) + 1)]
        self._files = [_StreamedFile(folder / name, held) for name, held in zip(names, planned, strict=True)]
        self._file_of = {spec.name: file for file in self._files for spec in file.specs.values()}
        assert len(self._file_of) == sum(map(len, planned)), "two tensors have one name"
        self._total_bytes = sum(spec.num_bytes for held in planned for spec in held)
        self._bar = progress.bar(self._total_bytes, f"writing {folder.name.partition('.partial-')[0]}", shown=shown)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, which may be on any device and have any strides."""
        try:
            self._file_of.pop(name).write(name, tensor.detach().cpu().contiguous())
        except OSError:
            self._bar.close()  # so that the error's message has a line of its own
            raise
        self._bar.update(tensor.nbytes)

    def close(self) -> None:
        """Write the index. All files are on disk afterwards."""
        assert not self._file_of, f"tensor {min(self._file_of)} was announced but never added"
        for file in self._files:
            file.close()  # for a file without tensors
        self._bar.close()
        if len(self._files) > 1:
            weight_map = {name: file.path.name for file in self._files for name in file.specs}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class _StreamedFile:
    """One safetensors file, which is open from its first tensor to its last."""

    def __init__(self, path: Path, specs: list[TensorSpec]) -> None:
        # wide types first, so that every tensor is aligned
        ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
        self.path, self.specs = path, {spec.name: spec for spec in ordered}
        # For messages: the path in the folder's final name, as the partial folder's means nothing to the user.
        self._shown = path.parent.with_name(path.parent.name.partition(".partial-")[0]) / path.name
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts, at = dict[str, int](), 0
        for spec in ordered:
            self._starts[spec.name], end = at, at + spec.num_bytes
            kind = SAFETENSORS_NAMES[spec.dtype]
            content[spec.name] = {"dtype": kind, "shape": list(spec.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text
        self._left, self._descriptor = set(self.specs), -1
        self._unflushed = 0  # bytes
        self._size = len(self._header) + at

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a host tensor at its offset. Raises WriteError."""
        spec = self.specs[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), (
            f"tensor {name} has another dtype or shape than announced"
        )
        with writing(self._shown):
            if self._descriptor < 0:
                self._open()
            start = len(self._header) + self._starts[name]
            if tensor.numel() > 0:
                self._write(as_bytes(tensor), start)
        self._left.remove(name)
        if not self._left:
            self.close()

    def close(self) -> None:
        """Flush the file to disk and close it. Raises WriteError."""
        with writing(self._shown):
            if self._descriptor < 0 and not self.specs:
                self._open()
            if self._descriptor >= 0:
                self._flush()
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._descriptor, self._size)
        self._write(memoryview(self._header), 0)

    def _write(self, content: memoryview, at: int) -> None:
        while content:
            # a write to an almost full disk may be short
            count = os.pwrite(self._descriptor, content[:FLUSH_BYTES], at)
            self._unflushed += count
            content, at = content[count:], at + count
            if self._unflushed >= FLUSH_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Flush the file to disk and drop its page cache: a model's dirty pages would fill a small cgroup."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the whole file: a page may hold two tensors
        self._unflushed = 0
