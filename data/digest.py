"""Digests of files' contents in 32 hexadecimal digits; a file is read again only after a change.

The digest is XXH3 (128 bits, 10 GB/s on a core) over the digests of blocks of 64 MiB, which threads read in parallel.
It detects exchanged and damaged files, not forged ones. It is kept under data.cache_dir with the file's size, times and
inode; if any of them has changed, the file is read again.
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
from data import lock

BLOCK_BYTES = 1 << 26
READ_BYTES = 1 << 22
MAX_THREADS = 8
TRIES = 3
ANNOUNCED_BYTES = 4 << 30  # files of this size take long enough to read that a message is shown
# A file that is changed twice within one tick of its file system's clock has the same times after both changes. So the
# digest of a file that was changed less than this before it was read is not kept.
TICK_NS = 2_000_000_000


def file_digest(path: str | Path, cache: Path, timeout: float) -> str:
    """Return the digest of a file's current bytes; from `cache` if the file has not changed since.

    Of processes that call it at once one reads. timeout: seconds that the others wait. Raises ConfigError if the file
    cannot be read or changes meanwhile, TimeoutError.
    """
    path = Path(path).absolute()
    stored = cache / "digests" / f"{xxhash.xxh3_64(os.fsencode(path)).hexdigest()}.json"
    try:
        known = _kept(path, stored)
        if known is not None:
            return known
        with contextlib.ExitStack() as stack:
            try:
                stored.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.hold(stored.with_suffix(".lock"), timeout))
            except TimeoutError:
                raise
            except OSError:  # a cache that cannot be written: every process reads for itself
                return _read(path)[0]
            if (known := _kept(path, stored)) is not None:
                return known
            digest, fingerprint = _read(path)
            if time.time_ns() - fingerprint["ctime_ns"] > TICK_NS:
                temporary = stored.with_suffix(f".tmp{os.getpid()}")
                with contextlib.suppress(OSError):  # a full disk: the file is read again the next time
                    temporary.write_text(json.dumps({"path": str(path), **fingerprint, "digest": digest}))
                    temporary.rename(stored)
            return digest
    except TimeoutError:
        raise
    except OSError as error:
        raise ConfigError(f"data.corpus: cannot read {path}: {error.strerror or error}") from error


def _kept(path: Path, stored: Path) -> str | None:
    """Return the stored digest of a file that has not changed since; else None."""
    fingerprint = _fingerprint(os.stat(path))
    try:
        kept = json.loads(stored.read_text())
        digest = str(kept["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if kept == {"path": str(path), **fingerprint, "digest": digest} else None


def _fingerprint(stat: os.stat_result) -> dict[str, int]:
    """Return the attributes that change when a file is written or exchanged. (Not the device: its number differs
    between the nodes that share a file.)"""
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}


def _read(path: Path) -> tuple[str, dict[str, int]]:
    """Return the digest, and the fingerprint that the file had both before and after it was read."""
    for _ in range(TRIES):
        with open(path, "rb", buffering=0) as file:
            before = _fingerprint(os.fstat(file.fileno()))
            if before["size"] >= ANNOUNCED_BYTES:
                progress.begin(f"Reading {path} ({before['size'] / 1e9:.0f} GB), to know it by its content")
            starts = range(0, before["size"], BLOCK_BYTES)
            with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(starts)))) as threads:
                digests = list(threads.map(functools.partial(_block_digest, file.fileno()), starts))
        if _fingerprint(os.stat(path)) == before:
            return xxhash.xxh3_128(b"".join(digests)).hexdigest(), before
    raise ConfigError(f"data.corpus: {path} changes while it is read; start again when what writes it has ended")


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
    """Return the digest of any values that JSON can hold: 32 hexadecimal digits."""
    return xxhash.xxh3_128(json.dumps(items, sort_keys=True).encode()).hexdigest()
