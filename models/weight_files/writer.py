"""Safetensors written as a stream: what will be written is known in front, so each file begins with its header, and
each tensor goes to its place as it comes. Memory holds one tensor; what was written leaves the kernel's cache."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from configs import progress
from configs.files import writing
from models.weight_files.choice import INDEX_NAME, SINGLE_NAME
from models.weight_files.stored import as_bytes
from parallel.dtypes import SAFETENSORS_NAMES

PART_BYTES = 2 * 1024**3
FLUSH_BYTES = 16 * 1024**2  # that are written before they go through to the disk


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def planned_parts(specs: Iterable[TensorSpec], part_bytes: int) -> list[list[TensorSpec]]:
    """The tensors of each file: in their order, as many as `part_bytes` hold, and at least one."""
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if parts[-1] and size + spec.num_bytes > part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(spec)
        size += spec.num_bytes
    return parts


class Writer:
    """Writes the tensors of `specs`, in any order, to model.safetensors of a folder, or to parts of at most
    `part_bytes` with an index; a tensor that is larger has a part to itself. Raises OSError."""

    def __init__(
        self, folder: Path, specs: Iterable[TensorSpec], part_bytes: int = PART_BYTES, shown: bool = False
    ) -> None:
        """`shown`: a bar on standard error."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = planned_parts(specs, part_bytes)
        self.folder = folder
        self._parts = [
            _PartFile(folder / _name(number, len(parts)), part) for number, part in enumerate(parts, start=1)
        ]
        self._part_of = {spec.name: part for part in self._parts for spec in part.specs.values()}
        assert len(self._part_of) == sum(len(part) for part in parts), "two tensors have one name"
        self._total_bytes = sum(spec.num_bytes for part in parts for spec in part)
        self._bar = progress.bar(self._total_bytes, f"writing {folder.name.partition('.partial-')[0]}", shown=shown)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, of any device and strides."""
        try:
            self._part_of.pop(name).write(name, tensor.detach().cpu().contiguous())
        except OSError:
            self._bar.close()  # so that what is said of it has a line of its own
            raise
        self._bar.update(tensor.nbytes)

    def close(self) -> None:
        """Write the index. All files are on the disk then."""
        assert not self._part_of, f"{min(self._part_of)} was promised, and never came"
        for part in self._parts:
            part.close()  # one without tensors
        self._bar.close()
        if len(self._parts) > 1:
            weight_map = {name: part.path.name for part in self._parts for name in part.specs}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class _PartFile:
    """One file, which is open from its first tensor to its last."""

    def __init__(self, path: Path, specs: list[TensorSpec]) -> None:
        # wide types first, so that all are aligned
        ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
        self.path, self.specs = path, {spec.name: spec for spec in ordered}
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
        """Write a tensor of the host to its place. Raises WriteError."""
        spec = self.specs[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), f"{name} is not as it was promised"
        with writing(_shown(self.path)):
            if self._descriptor < 0:
                self._open()
            start = len(self._header) + self._starts[name]
            if tensor.numel() > 0:
                self._write(as_bytes(tensor), start)
        self._left.remove(name)
        if not self._left:
            self.close()

    def close(self) -> None:
        """Bring what was written through to the disk. Raises WriteError."""
        with writing(_shown(self.path)):
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
            # a write to a disk that is almost full may be short
            count = os.pwrite(self._descriptor, content[:FLUSH_BYTES], at)
            self._unflushed += count
            content, at = content[count:], at + count
            if self._unflushed >= FLUSH_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Leave nothing in the kernel's cache: dirty pages of a model would fill a small cgroup."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # all of it: a page may hold two tensors
        self._unflushed = 0


def _name(number: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shown(path: Path) -> Path:
    """The path under the name that the folder will have: nobody can open the one that it has meanwhile."""
    return path.parent.with_name(path.parent.name.partition(".partial-")[0]) / path.name
