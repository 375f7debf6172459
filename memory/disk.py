"""A scratch file on this node's disk: read and written past the page cache, and gone with the process that made it.

The kernel's cache would hold what the disk is there to hold, and count as the host's memory. No memory map: a disk that
fails under one is a bus error, and not an exception.
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

from configs.files import FULL
from configs.schema import ConfigError
from memory.host_memory import BLOCK, free_bytes, instead_of, padded

KEY = "memory.disk_dir"
GIB = 2**30
# Of statfs(2): file systems that are the host's memory.
IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each of several records begins in a file, and at last how long that is."""
    return list(accumulate((padded(size) for size in sizes), initial=0))


def aligned(num_bytes: int, pinned: bool) -> torch.Tensor:
    """An uninitialized uint8 host tensor of so many bytes, rounded up to whole blocks, for a disk to read into."""
    size = padded(num_bytes)
    if pinned:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        if memory.data_ptr() % BLOCK == 0:  # CUDA's are whole pages, and a block more might be rounded up to twice that
            return memory
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % BLOCK
    return memory[start : start + size]


class Disk:
    """`num_bytes` of scratch in a folder, allocated in full; the file has no name. Several threads may read and write
    at once.

    Raises ConfigError where the folder cannot hold it. instead: keys that do without a disk.
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
            self.is_direct = self._go_direct()  # false: the file system refuses it, and the kernel's cache is used
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
        self._transfer("read", lambda part, at: os.preadv(self._file.fileno(), [part], at), offset, tensor)
        with self._lock:
            self.num_read += tensor.numel()

    def write_from(self, offset: int, tensor: torch.Tensor) -> None:
        """Write such a tensor to the bytes at `offset`. Nothing is flushed: it is read back by this process alone.
        Raises OSError."""
        self._transfer("written", lambda part, at: os.pwrite(self._file.fileno(), part, at), offset, tensor)
        with self._lock:
            self.num_written += tensor.numel()

    def close(self) -> None:
        """Give the room back. Nobody may read or write any more."""
        self._file.close()

    def _go_direct(self) -> bool:
        fd = self._file.fileno()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(fd, memoryview(aligned(BLOCK, pinned=False).zero_().numpy()), 0)  # some refuse only now
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
            done += count // BLOCK * BLOCK  # the rest of a block once more: what follows must stay aligned

    def _failed(self, what: str, error: OSError) -> OSError:
        return DiskError(error.errno, f"{KEY} ({self.folder}) cannot be {what}: {error.strerror}")


class DiskError(OSError):
    """What the disk answered, in one line that names the folder."""

    def __str__(self) -> str:
        return str(self.strerror)


def _file_system(folder: str) -> int:
    """The magic number of a folder's file system; 0 where the C library does not say."""
    answer = ctypes.create_string_buffer(256)  # struct statfs, which begins with it
    if ctypes.CDLL(None).statfs(os.fsencode(folder), answer) != 0:
        return 0
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
