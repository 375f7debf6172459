"""A scratch file on this node's disk, read and written with direct I/O. It is deleted when the process ends.

Direct I/O keeps the file out of the kernel's page cache, which is host memory. The file is not memory-mapped: a failure
of the disk would then be a bus error instead of an exception.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from base.errors import ConfigError
from base.files import FULL
from base.units import GIB
from memory.host_memory import BLOCK, free_bytes, instead_of, padded

KEY = "memory.disk_dir"
# File systems in host memory, by their magic number (statfs(2)).
IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the byte offset of each record in a file, then the file's length. Records start at whole disk blocks."""
    return list(accumulate((padded(size) for size in sizes), initial=0))


def aligned(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Return an uninitialized uint8 host tensor for direct I/O: aligned to, and rounded up to, whole disk blocks."""
    size = padded(num_bytes)
    if pinned:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        if memory.data_ptr() % BLOCK == 0:  # usual: CUDA allocates whole pages, and rounds larger sizes up
            return memory
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % BLOCK
    return memory[start : start + size]


class Disk:
    """An unnamed scratch file of `num_bytes` in a folder, for several threads. Raises ConfigError if it cannot be
    allocated.

    instead: settings that need no disk, for the error message.
    """

    def __init__(self, folder: str, num_bytes: int, instead: str = "optimizer.state_device=host"):
        self.folder, self.num_bytes = folder, padded(num_bytes)
        self.num_read = self.num_written = 0  # bytes
        self._lock = threading.Lock()
        if not os.path.isdir(folder):
            raise ConfigError(f"{KEY} ({folder}) must be an existing folder. Try {instead_of(KEY, folder)}")
        if (kind := IN_MEMORY.get(_file_system(folder))) is not None:
            raise ConfigError(
                f"{KEY} ({folder}) must be on a disk, but {kind} stores files in host memory. "
                f"Try {instead}, or a folder on a disk"
            )
        try:
            self._file = tempfile.TemporaryFile(prefix=".mixtrain-", dir=folder, buffering=0)
        except OSError as error:
            raise ConfigError(
                f"{KEY} ({folder}) must be a writable folder: {error.strerror}. Try another folder"
            ) from error
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(self.num_bytes, BLOCK))
            self.is_direct = self._enable_direct()  # False: the file system does not support it; the page cache is used
        except OSError as error:
            self._file.close()
            if error.errno not in FULL:
                raise self._failed(f"used for a file of {self.num_bytes / GIB:.3g} GiB", error) from error
            raise ConfigError(
                f"{KEY} ({folder}) must have {self.num_bytes / GIB:.3g} GiB free for this rank, but has only "
                f"{free_bytes(folder) / GIB:.3g} GiB. Free some space, or use a folder on another disk"
            ) from error

    def read_into(self, offset: int, tensor: torch.Tensor) -> None:
        """Fill a block-aligned host tensor from the file, from byte `offset`, a multiple of BLOCK. Raises OSError."""
        self._transfer("read", lambda view, at: os.preadv(self._file.fileno(), [view], at), offset, tensor)
        with self._lock:
            self.num_read += tensor.numel()

    def write_from(self, offset: int, tensor: torch.Tensor) -> None:
        """Write a block-aligned host tensor to the file at byte `offset`, without flushing. Raises OSError."""
        self._transfer("written", lambda view, at: os.pwrite(self._file.fileno(), view, at), offset, tensor)
        with self._lock:
            self.num_written += tensor.numel()

    def close(self) -> None:
        """Close the scratch file, which deletes it. It cannot be read or written afterwards."""
        self._file.close()

    def _enable_direct(self) -> bool:
        fd = self._file.fileno()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some file systems report only at a write that they do not support it.
            os.pwrite(fd, memoryview(aligned(BLOCK, pinned=False).zero_().numpy()), 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            return False
        return True

    def _transfer(self, what: str, call: Callable[[memoryview, int], int], offset: int, tensor: torch.Tensor) -> None:
        size, done = tensor.numel(), 0
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
        assert offset % BLOCK == size % BLOCK == tensor.data_ptr() % BLOCK == 0 and offset + size <= self.num_bytes
        view = memoryview(tensor.numpy())
        while done < size:
            try:
                count = call(view[done:], offset + done)
            except OSError as error:
                raise self._failed(what, error) from error
            if count < BLOCK:
                raise self._failed(what, OSError(errno.EIO, f"only {count} of {size - done} bytes were transferred"))
            done += count // BLOCK * BLOCK  # an incomplete block is transferred again: offsets must be aligned

    def _failed(self, what: str, error: OSError) -> OSError:
        advice = "Check the disk, or use a folder on another disk"
        return DiskError(error.errno, f"{KEY} ({self.folder}) cannot be {what}: {error.strerror}. {advice}")


class DiskError(OSError):
    """An I/O error of the disk. Its text is one line that names the folder."""

    def __str__(self) -> str:
        return str(self.strerror)


def _file_system(folder: str) -> int:
    """Return the magic number of the file system of a folder, or 0 if statfs fails."""
    answer = ctypes.create_string_buffer(256)  # struct statfs; its first field is the magic number
    if ctypes.CDLL(None).statfs(os.fsencode(folder), answer) != 0:
        return 0
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
