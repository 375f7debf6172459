"""A scratch file on this node's disk, read and written with direct I/O, which is deleted when its process ends.

The kernel's page cache would count as host memory, which the file is to save. It is not a memory map: there a failure
of the disk is a bus error instead of an exception.
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
from memory.host_memory import BLOCK, free_bytes, instead_of, padded

KEY = "memory.disk_dir"
GIB = 2**30
# File systems in host memory, by their magic number (statfs(2)).
IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of records in a file, followed by the file's length, in bytes."""
    return list(accumulate((padded(size) for size in sizes), initial=0))


def aligned(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Return an uninitialized uint8 host tensor for direct I/O, of `num_bytes` rounded up to whole blocks."""
    size = padded(num_bytes)
    if pinned:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        if (
            memory.data_ptr() % BLOCK == 0
        ):  # CUDA allocates whole pages, and might round a block more up to twice the size
            return memory
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % BLOCK
    return memory[start : start + size]


class Disk:
    """A file without a name of `num_bytes` in a folder, allocated in full. Several threads may read and write at once.

    Raises ConfigError where it cannot be allocated. instead: keys with which no disk is needed.
    """

    def __init__(self, folder: str, num_bytes: int, instead: str = "optimizer.state_device=host"):
        self.folder, self.num_bytes = folder, padded(num_bytes)
        self.num_read = self.num_written = 0  # bytes
        self._lock = threading.Lock()
        if not os.path.isdir(folder):
            raise ConfigError(f"{KEY} ({folder}) must be a folder that exists. Try {instead_of(KEY, folder)}")
        if (kind := IN_MEMORY.get(_file_system(folder))) is not None:
            raise ConfigError(
                f"{KEY} ({folder}) must be on a disk: {kind} is the host's memory. Try {instead}, or a folder on a disk"
            )
        try:
            self._file = tempfile.TemporaryFile(prefix=".mixtrain-", dir=folder, buffering=0)
        except OSError as error:
            raise ConfigError(
                f"{KEY} ({folder}) must be a folder that can be written: {error.strerror}. Try another one"
            ) from error
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(self.num_bytes, BLOCK))
            self.is_direct = self._enable_direct()  # false: the file system refuses it, and the page cache is used
        except OSError as error:
            self._file.close()
            if error.errno not in FULL:
                raise self._failed("allocated", error) from error
            raise ConfigError(
                f"{KEY} ({folder}) must have {self.num_bytes / GIB:.3g} GiB free for this rank, and has "
                f"{free_bytes(folder) / GIB:.3g}. Make room, or give a folder on another disk"
            ) from error

    def read_into(self, offset: int, tensor: torch.Tensor) -> None:
        """Fill a host tensor (uint8, whole blocks, `aligned`) from the bytes at `offset`, a multiple of BLOCK. Raises
        OSError."""
        self._transfer("read", lambda view, at: os.preadv(self._file.fileno(), [view], at), offset, tensor)
        with self._lock:
            self.num_read += tensor.numel()

    def write_from(self, offset: int, tensor: torch.Tensor) -> None:
        """Write such a tensor to the bytes at `offset`. Nothing is flushed, as only this process reads it. Raises
        OSError."""
        self._transfer("written", lambda view, at: os.pwrite(self._file.fileno(), view, at), offset, tensor)
        with self._lock:
            self.num_written += tensor.numel()

    def close(self) -> None:
        """Delete the file. It must not be read or written any more."""
        self._file.close()

    def _enable_direct(self) -> bool:
        fd = self._file.fileno()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(
                fd, memoryview(aligned(BLOCK, pinned=False).zero_().numpy()), 0
            )  # some file systems refuse only here
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
                raise self._failed(what, OSError(errno.EIO, f"{count} of {size - done} bytes"))
            done += count // BLOCK * BLOCK  # an incomplete block again: the next offset must be aligned

    def _failed(self, what: str, error: OSError) -> OSError:
        return DiskError(error.errno, f"{KEY} ({self.folder}) cannot be {what}: {error.strerror}")


class DiskError(OSError):
    """An error of the disk, in one line that names the folder."""

    def __str__(self) -> str:
        return str(self.strerror)


def _file_system(folder: str) -> int:
    """Return the magic number of a folder's file system; 0 where statfs fails."""
    answer = ctypes.create_string_buffer(256)  # struct statfs; the number is its first field
    if ctypes.CDLL(None).statfs(os.fsencode(folder), answer) != 0:
        return 0
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
