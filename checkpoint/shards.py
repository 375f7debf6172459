"""A checkpoint's tensor files: a writer that first copies tensors to host memory, one file per rank, and a reader of
boxes.

Both take Megatron's ShardedTensors: views of this rank's tensors, each a box of a global tensor. The reader fills any
box from the boxes that were written, whatever the layouts. Offloaded state is not copied first: it is read bucket by
bucket while the file is written.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from base.checksums import CHUNK_BYTES, FileSum, new_buffer
from base.errors import ConfigError
from base.files import writing
from checkpoint import manifest, safetensors_header
from memory.copy_stream import SAVES
from memory.host_link import HostLink
from memory.read_only_file import ReadOnlyFile
from models.weight_files.tensor_files import TORCH_DTYPES
from optim.offload.records import StateSnapshot
from optim.state import StoredTensor
from parallel.dtypes import SAFETENSORS_NAMES

BAND_BYTES = 4 * 2**20  # of matrix rows that are read at once, if only some of their columns are needed


class SaveCancelled(Exception):
    """Raised in the writing thread when its save was cancelled."""


class NotFinite(Exception):
    """Raised with the name of a tensor that has NaN or Inf. Its checkpoint would replace usable checkpoints."""


class ShardWriter:
    """Writes a rank's file of a checkpoint. Tensors on the device are first copied to a host buffer that every save
    reuses; the copy takes longer if no pinned memory is left for the buffer. Offloaded state is read during writing."""

    def __init__(self, link: HostLink):
        self._link = link
        self.header = b""
        self.buffer = new_buffer()  # for reading files back, one at a time
        self._body, self._is_pinned = torch.empty(0, dtype=torch.uint8), False
        self._host_copies: list[tuple[str, int, torch.Tensor]] = []  # name, offset in the file's body, data
        self._stored: list[tuple[int, StoredTensor]] = []  # offset in the file's body, box
        self._offloaded: StateSnapshot | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the writer has allocated."""
        return self._body.numel()

    def take(self, tensors: Sequence[ShardedTensor], offloaded: StateSnapshot | None = None) -> None:
        """Copy the current values of the tensors to the host, so that the tensors may change afterwards. Offloaded
        state is not copied: the snapshot `offloaded` keeps it unchanged until it is written."""
        self._offloaded = offloaded
        # Wide elements first, so that each tensor starts at a multiple of its element size.
        order = sorted(tensors, key=lambda tensor: -tensor.data.element_size())
        ends = list(itertools.accumulate((tensor.data.nbytes for tensor in order), initial=0))
        self._copy_to_host([(each, start) for each, start in zip(order, ends) if not isinstance(each, StoredTensor)])
        self._stored = [(start, tensor) for tensor, start in zip(order, ends) if isinstance(tensor, StoredTensor)]
        self.header = safetensors_header.encode(
            safetensors_header.Entry(
                t.key,
                SAFETENSORS_NAMES[t.data.dtype],
                tuple(t.data.shape),
                tuple(t.global_shape),
                tuple(t.global_offset),
                start,
                end,
            )
            for t, start, end in zip(order, ends, ends[1:])
        )

    def _copy_to_host(self, tensors: list[tuple[ShardedTensor, int]]) -> None:
        ends = list(itertools.accumulate((tensor.data.nbytes for tensor, _ in tensors), initial=0))
        if self._body.numel() < ends[-1]:
            self._body = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            taken = self._link.take(ends[-1], "a checkpoint's snapshot") if self._link.pins else None
            self._body = torch.empty(ends[-1], dtype=torch.uint8) if taken is None else taken
            self._is_pinned = taken is not None
        self._host_copies = [
            (tensor.key, offset, self._body[start:end].view(tensor.data.dtype).view(tensor.data.shape))
            for (tensor, offset), start, end in zip(tensors, ends, ends[1:])
        ]

        def copy_all() -> None:
            for (tensor, _), (_, _, host_copy) in zip(tensors, self._host_copies, strict=True):
                host_copy.copy_(tensor.data.detach(), non_blocking=self._is_pinned)

        self._link.down.issue(copy_all, num_bytes=ends[-1], priority=SAVES).wait()

    def write(self, path: Path, cancelled: threading.Event) -> FileSum:
        """Write the file, fsync it and read it back. Raises NotFinite, SaveCancelled and OSError, also if the bytes
        that are read back differ."""
        sums: dict[int, tuple[int, int]] = {}  # offset in the file -> bytes and checksum of the chunk written there
        with writing(path), open(path, "wb", buffering=0) as stream:
            for offset, content in itertools.chain([(0, memoryview(self.header))], self._contents(cancelled)):
                for start in range(0, len(content), CHUNK_BYTES):
                    if cancelled.is_set():
                        raise SaveCancelled
                    chunk = content[start : start + CHUNK_BYTES]
                    at = offset + start
                    sums[at] = len(chunk), xxhash.xxh3_64_intdigest(chunk)
                    while chunk:  # a write to a disk that is almost full may be short
                        written = os.pwrite(stream.fileno(), chunk, at)
                        chunk, at = chunk[written:], at + written
            os.fsync(stream.fileno())
        return _read_back(path, sums, self.buffer)

    def _contents(self, cancelled: threading.Event) -> Iterator[tuple[int, memoryview]]:
        """Yield the offset in the file and the bytes of each tensor. The bytes are valid until the next tensor. Buckets
        of offloaded state are first, because updates wait for them."""

        def bucket_of(stored: tuple[int, StoredTensor]) -> int:
            return stored[1].bucket

        for bucket, boxes in itertools.groupby(sorted(self._stored, key=bucket_of), key=bucket_of):
            if cancelled.is_set():
                raise SaveCancelled
            assert self._offloaded is not None
            held = self._offloaded.read(bucket)
            for offset, box in boxes:
                yield len(self.header) + offset, _bytes_of(box.key, box.within(held))
            self._offloaded.release(bucket)
        for key, offset, host_copy in self._host_copies:
            yield len(self.header) + offset, _bytes_of(key, host_copy)


def _bytes_of(name: str, tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a host tensor; a copy only if the tensor is not contiguous. Raises NotFinite."""
    if tensor.dtype.is_floating_point and tensor.numel() > 0:
        low, high = tensor.aminmax()  # NaN if any is
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NotFinite(f"{name} must be finite, but contains NaN or infinity")
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _read_back(path: Path, sums: dict[int, tuple[int, int]], buffer: memoryview) -> FileSum:
    """Return the size and checksum of a file. Raises OSError if a chunk differs from its checksum in `sums`."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as stream:
        for offset, (length, expected) in sorted(sums.items()):
            chunk, filled = buffer[:length], 0
            while filled < length and (count := stream.readinto(chunk[filled:])):
                filled += count
            if offset != size or filled != length or xxhash.xxh3_64_intdigest(chunk) != expected:
                raise OSError(f"{path} does not read back the bytes that were written: check its disk")
            digest.update(chunk)
            size += length
        if stream.read(1):
            raise OSError(
                f"{path} has more than the {size} bytes that were written: check whether another program writes to it"
            )
    return FileSum(size, digest.hexdigest())


class ShardReader:
    """Reader that fills blocks of global tensors from the files of a checkpoint. Raises ConfigError if an element is
    missing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[Path, ReadOnlyFile] = {}
        self._bodies: dict[Path, int] = {}  # offset of the tensors in each file
        self._boxes: dict[str, list[tuple[Path, str, safetensors_header.Entry]]] = {}
        try:
            for path in (folder / name for name in manifest.read(folder) if name.endswith(safetensors_header.SUFFIX)):
                header, entries = safetensors_header.read_all(path)
                self._bodies[path] = header.body
                for name, entry in entries.items():
                    self._boxes.setdefault(entry.key, []).append((path, name, entry))
        except (OSError, ValueError) as error:
            raise ConfigError(f"checkpoint {folder} cannot be read: {error}. {manifest.ADVICE}.") from error

    def __contains__(self, key: str) -> bool:
        return key in self._boxes

    @torch.no_grad()
    def fill(self, tensor: ShardedTensor) -> None:
        """Read the box (block of a global tensor) that `tensor` describes into `tensor.data`, which may be strided and
        of a different dtype. Padding that depends on the layout (Megatron's allow_shape_mismatch) is filled with zeros
        if the files lack it."""
        boxes = self._boxes.get(tensor.key)
        if boxes is None:
            raise ConfigError(
                f"checkpoint {self.folder} has no tensor {tensor.key}: another model or version wrote it. Use the "
                f"model in its {manifest.CONFIG}, and the version of Mixtrain that wrote it."
            )
        theirs, ours = boxes[0][2].global_shape, tuple(tensor.global_shape)
        if len(theirs) != len(ours) or (theirs != ours and not tensor.allow_shape_mismatch):
            raise ConfigError(
                f"checkpoint {self.folder} has {tensor.key} in shape {list(theirs)}, but this model needs "
                f"{list(ours)}. Use the model in its {manifest.CONFIG}."
            )
        target = tensor.data[(None,) * (len(ours) - tensor.data.dim())]
        low = tuple(tensor.global_offset)
        high = tuple(min(o + n, g) for o, n, g in zip(low, target.shape, theirs))
        wanted = math.prod(max(h - o, 0) for o, h in zip(low, high))
        if wanted < target.numel():
            target.zero_()
        filled = 0
        for path, name, entry in boxes:
            start = tuple(max(a, b) for a, b in zip(low, entry.offset))
            end = tuple(min(h, o + n) for h, o, n in zip(high, entry.offset, entry.box_shape))
            if any(a >= b for a, b in zip(start, end)):
                continue
            inside = [slice(a - o, b - o) for a, b, o in zip(start, end, entry.offset)]
            found = self._get(path, name, entry, inside[len(ours) - len(entry.shape) :])
            target[tuple(slice(a - o, b - o) for a, b, o in zip(start, end, low))].copy_(
                found.reshape([b - a for a, b in zip(start, end)])
            )
            filled += found.numel()
        if filled != wanted:
            raise ConfigError(
                f"checkpoint {self.folder} holds only {filled} of the {wanted} elements of {tensor.key} that this rank "
                f"needs. {manifest.ADVICE}."
            )

    def _get(self, path: Path, name: str, entry: safetensors_header.Entry, inside: list[slice]) -> torch.Tensor:
        # Read, not mapped: a file may be larger than the kernel lets a process map.
        try:
            if path not in self._files:
                self._files[path] = ReadOnlyFile(path)
            found = torch.empty([each.stop - each.start for each in inside], dtype=TORCH_DTYPES[entry.dtype])
            if found.numel():
                start = self._bodies[path] + entry.start
                _read_box(self._files[path], start, entry.shape, inside, found)
            return found
        except (OSError, KeyError) as error:
            raise ConfigError(
                f"checkpoint {self.folder} cannot be read: {path.name}: {name}: {error}. {manifest.ADVICE}."
            ) from error


def _read_box(
    file: ReadOnlyFile, start: int, shape: Sequence[int], inside: Sequence[slice], found: torch.Tensor
) -> None:
    """Read the block `inside` (a slice per dimension) of a row-major tensor into the dense tensor `found`. The tensor
    has shape `shape`, and starts at byte `start` of the file."""
    size = found.element_size()
    if not shape or all(each == slice(0, n) for each, n in zip(inside[1:], shape[1:])):  # one run of bytes
        first = inside[0].start * math.prod(shape[1:]) if shape else 0
        file.read(start + first * size, _memory_of(found))
        return
    row = math.prod(shape[1:]) * size
    if len(shape) > 2 or row > BAND_BYTES:
        for index, inner in enumerate(found, start=inside[0].start):
            _read_box(file, start + index * row, shape[1:], inside[1:], inner)
        return
    at_once = BAND_BYTES // row  # whole matrix rows: else each would be a read of its own
    for index in range(0, len(found), at_once):
        target = found[index : index + at_once]
        band = torch.empty(len(target), shape[1], dtype=found.dtype)
        file.read(start + (inside[0].start + index) * row, _memory_of(band))
        target.copy_(band[:, inside[1]])


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
