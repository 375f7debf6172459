"""What a file holds, in 32 hexadecimal digits, without reading it again while it is as it was.

The digest is XXH3 (128 bits, 10 GB/s on a core) over the digests of pieces of 64 MiB, which threads read side by side.
It finds what was exchanged or damaged, not what was forged. It is kept under data.cache_dir with the file's size, times
and inode; any of them changed means that the file is read again.
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

from configs import progress
from configs.schema import ConfigError
from data import lock

PIECE_BYTES = 1 << 26
READ_BYTES = 1 << 22
MAX_THREADS = 8
TRIES = 3
SAID_BYTES = 4 << 30  # of a file whose reading may take long enough to be said
# A file that is changed twice within one tick of its file system's clock has the same times after both. So what was
# changed less than this before it was read is read again the next time.
TICK_NS = 2_000_000_000


def file_digest(path: str | Path, cache: Path, timeout: float) -> str:
    """The digest of a file's bytes as they are now; from `cache` where the file was not touched since.

    Processes that ask at once take turns, so that one reads. timeout: seconds for that.
    Raises ConfigError when the file cannot be read or does not hold still, TimeoutError.
    """
    path = Path(path).absolute()
    place = cache / "digests" / f"{xxhash.xxh3_64(os.fsencode(path)).hexdigest()}.json"
    try:
        known = _kept(path, place)
        if known is not None:
            return known
        with contextlib.ExitStack() as stack:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.hold(place.with_suffix(".lock"), timeout))
            except TimeoutError:
                raise
            except OSError:  # a cache that cannot be written: every process reads for itself
                return _read(path)[0]
            return _kept(path, place) or _keep(path, place)
    except TimeoutError:
        raise
    except OSError as error:
        raise ConfigError(f"data.corpus: cannot read {path}: {error.strerror or error}") from error


def _kept(path: Path, place: Path) -> str | None:
    """The digest that was kept of a file that has not been touched since."""
    fingerprint = _fingerprint(os.stat(path))
    try:
        kept = json.loads(place.read_text())
        digest = str(kept["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if kept == {"path": str(path), **fingerprint, "digest": digest} else None


def _keep(path: Path, place: Path) -> str:
    """Read a file's digest and keep it."""
    digest, fingerprint = _read(path)
    if time.time_ns() - fingerprint["ctime_ns"] > TICK_NS:
        temporary = place.with_suffix(f".tmp{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk: it is read again the next time
            temporary.write_text(json.dumps({"path": str(path), **fingerprint, "digest": digest}))
            temporary.rename(place)
    return digest


def _fingerprint(stat: os.stat_result) -> dict[str, int]:
    """What changes when a file is written or exchanged. (Not the device: its number differs between the nodes that
    share a file.)"""
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}


def _read(path: Path) -> tuple[str, dict[str, int]]:
    """The digest, and the fingerprint that the file had before and after it was read."""
    for _ in range(TRIES):
        with open(path, "rb", buffering=0) as file:
            before = _fingerprint(os.fstat(file.fileno()))
            if before["size"] >= SAID_BYTES:
                progress.begin(f"Reading {path} ({before['size'] / 1e9:.0f} GB), to know it by its content")
            starts = range(0, before["size"], PIECE_BYTES)
            with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(starts)))) as threads:
                pieces = list(threads.map(functools.partial(_piece, file.fileno()), starts))
        if _fingerprint(os.stat(path)) == before:
            return xxhash.xxh3_128(b"".join(pieces)).hexdigest(), before
    raise ConfigError(f"data.corpus: {path} changes while it is read; start again when what writes it has ended")


def _piece(descriptor: int, start: int) -> bytes:
    digest, buffer = xxhash.xxh3_128(), bytearray(READ_BYTES)
    view = memoryview(buffer)
    stop = start + PIECE_BYTES
    while start < stop:
        count = os.preadv(descriptor, [view[: stop - start]], start)
        if not count:
            break
        digest.update(view[:count])
        start += count
    return digest.digest()


def digest_of(*items: Any) -> str:
    """One digest of several, or of anything that JSON holds."""
    return xxhash.xxh3_128(json.dumps(items, sort_keys=True).encode()).hexdigest()
