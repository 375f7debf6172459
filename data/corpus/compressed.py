"""Reading of files that are compressed as .gz, .zst, .xz or .bz2."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from base.errors import ConfigError
from data.corpus.file_kinds import refuse_pointer


def unpack(path: str, out: str, limit: int | None = None) -> None:
    """Decompress a file, or about the first `limit` bytes of its content, to the path `out`, atomically. The file's
    suffix determines the format. Raises ConfigError if the file is damaged."""
    temporary = f"{out}.tmp{os.getpid()}"
    written = 0
    try:
        with open(temporary, "wb") as target:
            for block in unpacked_blocks(path):
                target.write(block)
                written += len(block)
                if limit is not None and written >= limit:
                    break
        os.rename(temporary, out)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def unpacked_blocks(path: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks. Raises ConfigError if the file is damaged, or is a pointer
    (git-lfs, git-annex) to a file that was not fetched."""
    import zstandard

    refuse_pointer(path)
    try:
        with open(path, "rb") as source:
            yield from _blocks(path, source)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, lzma.LZMAError, _BadBzip2) as error:
        raise ConfigError(
            f"data.corpus: cannot decompress {path}: {error}. The file is damaged or truncated; download it again"
        ) from error


class _BadBzip2(Exception):
    """Damaged bzip2 data. The library raises an OSError without errno for damage, and with errno for a failing disk."""


def _blocks(path: str, source: BinaryIO) -> Iterator[bytes]:
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".zst":
        yield from _zstd_blocks(source)
        return
    opened: Any = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}[suffix]
    with opened(source) as stream:
        while True:
            try:
                block = stream.read(1 << 22)
            except OSError as error:
                if suffix != ".bz2" or error.errno is not None:
                    raise
                raise _BadBzip2(str(error)) from error
            if not block:
                return
            yield block


def _zstd_blocks(source: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed content of all frames of a zstd file. (The library's own file reader mistakes a truncated
    frame for the end of the file.)"""
    import zstandard

    decoder = zstandard.ZstdDecompressor().decompressobj()
    has_data = False
    while block := source.read(1 << 20):
        while block:
            if decoder.eof:
                decoder = zstandard.ZstdDecompressor().decompressobj()
            has_data = True
            yield decoder.decompress(block)
            block = decoder.unused_data if decoder.eof else b""
    if has_data and not decoder.eof:
        raise EOFError("the last frame ends early")
