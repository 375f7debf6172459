"""Files that are only read, at any byte offset. A file is opened once, so it can still be read after it was deleted.

Direct reads bypass the kernel's page cache, through aligned buffers. If a file system does not support direct reads,
the page cache is used, and its pages are dropped after they were read.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
import weakref
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from memory.host_memory import BLOCK, padded

NUM_THREADS = 2  # that read while the callers copy
CHUNK_BYTES = 4 * 2**20  # per read
DROP_BYTES = 8 * 2**20  # read before they are dropped from the page cache


class UnreadableFile(OSError):
    """The error for a file that cannot be read. Its text is one line with the path and the cause."""

    def __init__(self, path: Path, number: int | None, cause: str):
        super().__init__(number, cause)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.strerror}"


@dataclass(frozen=True)
class _QueuedRead:
    """A read that waits for a background thread: at least `needed` bytes of `file`, from byte `start`, into `chunk`."""

    done: Future[None]
    file: ReadOnlyFile
    start: int
    chunk: memoryview
    needed: int


def _read_queued(work: SimpleQueue[_QueuedRead | None]) -> None:
    while (item := work.get()) is not None:
        try:
            item.file.read_aligned(item.start, item.chunk, item.needed)
        except BaseException as error:  # raised where the read is waited for
            item.done.set_exception(error)
        else:
            item.done.set_result(None)
        del item  # an idle thread must not keep a file open


class BounceBuffers:
    """Aligned buffers for direct reads, two per thread: one is filled from disk while the other is copied out."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES):
        self.chunk_bytes = padded(chunk_bytes)
        self._of_thread = threading.local()
        self._work: SimpleQueue[_QueuedRead | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        for _ in range(NUM_THREADS):  # each None ends one thread
            weakref.finalize(self, self._work.put, None)

    def pair(self) -> tuple[memoryview, memoryview]:
        """Return the two buffers of the calling thread."""
        if not hasattr(self._of_thread, "pair"):
            one, other = (memoryview(mmap.mmap(-1, self.chunk_bytes)) for _ in range(2))  # whole pages
            self._of_thread.pair = (one, other)
        return self._of_thread.pair

    def issue(self, file: ReadOnlyFile, start: int, chunk: memoryview, needed: int) -> Future[None]:
        """Start reading at least `needed` bytes of a file from byte `start` into an aligned buffer, without waiting."""
        with self._lock:
            while len(self._threads) < NUM_THREADS:  # daemon threads, as a disk may never answer
                name = f"direct-read {len(self._threads)}"
                thread = threading.Thread(target=_read_queued, args=(self._work,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        done: Future[None] = Future()
        self._work.put(_QueuedRead(done, file, start, chunk, needed))
        return done


class ReadOnlyFile:
    """A file that several threads may read at once, at any offset. Raises UnreadableFile if it cannot be opened."""

    def __init__(self, path: Path, bounce: BounceBuffers | None = None):
        """Open the file for reading. bounce: buffers for direct reads, used if the file system supports them.

        Without them, reads use the page cache.
        """
        self.path = path
        self._bounce = bounce
        direct = None if bounce is None else _open_direct(path)
        self.is_direct = direct is not None
        self._descriptor = _open(path, os.O_RDONLY) if direct is None else direct
        if not self.is_direct:
            # No readahead, because its pages would not all be dropped.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self.size = os.fstat(self._descriptor).st_size  # bytes
        self._lock = threading.Lock()
        self._read: list[tuple[int, int]] = []  # ranges that our reads have put into the page cache
        self._num_read = 0

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. It cannot be read afterwards."""
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            if not self.is_direct:
                self._drop(descriptor)
            os.close(descriptor)

    def read(self, start: int, target: memoryview) -> None:
        """Fill a writable buffer from the file, starting at byte `start`. Raises UnreadableFile."""
        if start + len(target) > self.size:
            raise UnreadableFile(
                self.path, errno.EIO, f"it ends at byte {self.size}, but bytes up to {start + len(target)} are needed"
            )
        if self.is_direct:
            self._read_direct(start, target)
        else:
            for at in range(0, len(target), DROP_BYTES):
                chunk = target[at : at + DROP_BYTES]
                self._fill(start + at, chunk, len(chunk), 1)
                with self._lock:
                    self._read.append((start + at, start + at + len(chunk)))
                    self._num_read += len(chunk)
                    if self._num_read >= DROP_BYTES:
                        self._drop(self._descriptor)

    def read_aligned(self, start: int, chunk: memoryview, needed: int) -> None:
        """Fill an aligned buffer with at least `needed` bytes from `start`, a multiple of BLOCK. Raises
        UnreadableFile."""
        self._fill(start, chunk, needed, BLOCK)

    def _read_direct(self, start: int, target: memoryview) -> None:
        assert self._bounce is not None
        pair, size, end = self._bounce.pair(), self._bounce.chunk_bytes, start + len(target)
        starts = range(start // BLOCK * BLOCK, end, size)

        def read_of(number: int) -> tuple[int, memoryview, int]:
            needed = min(end - starts[number], size)
            return starts[number], pair[number % 2][: padded(needed)], needed

        if len(starts) == 1:
            self.read_aligned(*read_of(0))
            _copy_bytes(pair[0][start - starts[0] : end - starts[0]], target)
            return
        in_flight: Future[None] | None = None
        try:
            for number, at in enumerate(starts):
                if in_flight is None:
                    in_flight = self._bounce.issue(self, *read_of(number))
                in_flight.result()
                in_flight = None if number + 1 == len(starts) else self._bounce.issue(self, *read_of(number + 1))
                low, high = max(at, start), min(at + size, end)
                _copy_bytes(pair[number % 2][low - at : high - at], target[low - start : high - start])
        finally:
            if in_flight is not None:  # this thread's buffers must not be reused before the read has ended
                wait([in_flight])

    def _fill(self, start: int, chunk: memoryview, needed: int, block: int) -> None:
        done = 0
        while done < needed:
            try:
                count = os.preadv(self._descriptor, [chunk[done:]], start + done)
            except OSError as error:
                raise UnreadableFile(self.path, error.errno, error.strerror or str(error)) from error
            if done + count < needed and count < block:
                size = os.fstat(self._descriptor).st_size
                raise UnreadableFile(
                    self.path, errno.EIO, f"it was cut from {self.size} to {size} bytes while it was read"
                )
            done += count if done + count >= needed else count // block * block  # the next read must be aligned

    def _drop(self, descriptor: int) -> None:
        for start, end in self._read:  # the kernel drops only whole pages: include those that are read in part
            start, end = start // BLOCK * BLOCK, padded(end)
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
        self._read, self._num_read = [], 0


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # without the GIL


def _open(path: Path, flags: int) -> int:
    try:
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if error.errno != errno.EMFILE or soft == hard:
                raise
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a checkpoint may have one file per rank
            return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableFile(path, error.errno, error.strerror or str(error)) from error


def _open_direct(path: Path) -> int | None:
    """Open a file for direct reads. Returns None if its file system does not support them."""
    try:
        descriptor = _open(path, os.O_RDONLY | os.O_DIRECT)
    except UnreadableFile as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        os.preadv(descriptor, [mmap.mmap(-1, BLOCK)], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EINVAL:
            return None
        raise UnreadableFile(path, error.errno, error.strerror or str(error)) from error
    return descriptor
