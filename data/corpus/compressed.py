"""Files that are compressed, as .gz or .zst."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from configs.schema import ConfigError


def unpack(path: str, out: str, limit: int | None = None) -> None:
    """Decompress a .gz or .zst file, or about its first `limit` bytes, to `out`, atomically.

    Raises ConfigError naming the file when it is damaged.
    """
    import zstandard

    temporary = f"{out}.tmp{os.getpid()}"
    written = 0
    try:
        with open(path, "rb") as source, open(temporary, "wb") as target:
            for block in _gzip_blocks(source) if path.endswith(".gz") else _zstd_blocks(source):
                target.write(block)
                written += len(block)
                if limit is not None and written >= limit:
                    break
        os.rename(temporary, out)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ConfigError(f"data.corpus: cannot unpack {path}: {error}; the file is damaged or truncated") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _gzip_blocks(source: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=source) as stream:
        while block := stream.read(1 << 22):
            yield block


def _zstd_blocks(source: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames. (The library's own file reader takes a truncated frame for the end of the file.)"""
    import zstandard

    decoder = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    while block := source.read(1 << 20):
        while block:
            if decoder.eof:
                decoder = zstandard.ZstdDecompressor().decompressobj()
            begun = True
            yield decoder.decompress(block)
            block = decoder.unused_data if decoder.eof else b""
    if begun and not decoder.eof:
        raise EOFError("the last frame ends early")
