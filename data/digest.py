"""Digests of files' contents, as 32 hexadecimal digits. A file is read again only after it has changed.

The digest is XXH3 (128 bits, 10 GB/s per core) over the digests of blocks of 64 MiB, which threads read in parallel. It
detects exchanged and damaged files, not forged ones. It is stored under data.cache_dir with the size, times and inode
of the file; if any of them differs later, the file is read again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from base import progress
from base.errors import ConfigError
from base.files import write_text
from data import lock
from data.read_errors import unreadable

BLOCK_BYTES = 1 << 26
READ_BYTES = 1 << 22
MAX_THREADS = 8
TRIES = 3
ANNOUNCED_BYTES = 4 << 30  # from this size on, a message announces that a file is read
# Two changes within one tick of the file system's clock leave the same times. So the digest of a file that changed
# less than this long before it was read is not stored.
TICK_NS = 2_000_000_000


def file_digest(path: str | Path, cache: Path, timeout: float) -> str:
    """Return the digest of a file's current content, from `cache` if the file has not changed since it was read.

    If several processes call this at once, one reads the file and the others wait, for at most `timeout` seconds.
    Raises ConfigError if the file cannot be read or changes while it is read, and TimeoutError.
    """
    path = Path(path).absolute()
    stored = cache / "digests" / f"{xxhash.xxh3_64(os.fsencode(path)).hexdigest()}.json"
    try:
        if (known := _kept(path, stored)) is not None:
            return known
        with lock.hold_in_cache(stored.with_suffix(".lock"), timeout):
            if (known := _kept(path, stored)) is not None:
                return known
            digest, fingerprint = _read(path)
            if time.time_ns() - fingerprint["ctime_ns"] > TICK_NS:
                with contextlib.suppress(OSError):  # a full disk: the file is read again the next time
                    write_text(stored, json.dumps({"path": str(path), **fingerprint, "digest": digest}))
            return digest
    except TimeoutError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def _kept(path: Path, stored: Path) -> str | None:
    """Return the stored digest of a file; None if none is stored, or the file has changed since then."""
    fingerprint = _fingerprint(os.stat(path))
    try:
        kept = json.loads(stored.read_text())
        digest = str(kept["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if kept == {"path": str(path), **fingerprint, "digest": digest} else None


def _fingerprint(stat: os.stat_result) -> dict[str, int]:
    """Return the attributes of a file that change when the file is written or replaced. (The device number is left out,
    because it differs between the nodes that share a file.)"""
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}


def _read(path: Path) -> tuple[str, dict[str, int]]:
    """Read a file, and return its digest and fingerprint. Raises ConfigError if the file changes while it is read."""
    for _ in range(TRIES):
        with open(path, "rb", buffering=0) as file:
            before = _fingerprint(os.fstat(file.fileno()))
            if before["size"] >= ANNOUNCED_BYTES:
                progress.begin(f"Reading {path} ({before['size'] / 1e9:.0f} GB) to compute the digest of its content")
            starts = range(0, before["size"], BLOCK_BYTES)
            with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(starts)))) as threads:
                digests = list(threads.map(functools.partial(_block_digest, file.fileno()), starts))
        if _fingerprint(os.stat(path)) == before:
            return xxhash.xxh3_128(b"".join(digests)).hexdigest(), before
    raise ConfigError(
        f"data.corpus: {path} changes while it is read. Start again when the program that writes the file has ended"
    )


def _block_digest(descriptor: int, start: int) -> bytes:
    digest, buffer = xxhash.xxh3_128(), bytearray(READ_BYTES)
    view = memoryview(buffer)
    stop = start + BLOCK_BYTES
    while start < stop:
        count = os.preadv(descriptor, [view[: stop - start]], start)
        if not count:
            break
        digest.update(view[:count])
        start += count
    return digest.digest()


def digest_of(*items: Any) -> str:
    """Return the digest of JSON-compatible values, as 32 hexadecimal digits."""
    return xxhash.xxh3_128(json.dumps(items, sort_keys=True).encode()).hexdigest()
