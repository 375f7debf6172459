"""Megatron's token files: `<prefix>.bin` contains the tokens; `<prefix>.idx` contains the length and offset of each
sequence, and the bounds of the documents.

The format is that of megatron/core/datasets/indexed_dataset.py (megatron-core 0.16.1). This module reads and writes it
without importing Megatron, because the import takes seconds in each process that tokenizes. A test checks that both
stay compatible.
"""

from __future__ import annotations

import errno
import os
import resource
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from base.errors import ConfigError
from data.read_errors import unreadable

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(HEADER) + 8 + 1 + 8 + 8  # magic, version, dtype code, number of sequences, number of document bounds
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
UINT16_VOCAB_LIMIT = 65500  # Megatron's rule: smaller vocabularies are stored as uint16
REBUILD = "Restore it; if it is in data.cache_dir, run `python -m data.prepare` with the same data settings instead"


def token_dtype(vocab_size: int) -> type[np.generic]:
    """Return the dtype in which Megatron stores the tokens of a vocabulary of this size."""
    return np.uint16 if vocab_size < UINT16_VOCAB_LIMIT else np.int32


def write_index(path: Path, dtype: type[np.generic], sequence_lengths: np.ndarray, document_bounds: np.ndarray) -> None:
    """Write an .idx file. sequence_lengths [n]: in tokens. document_bounds [d + 1]: the number of each document's first
    sequence, then n."""
    code = next(code for code, known in DTYPES.items() if known is dtype)
    lengths = np.ascontiguousarray(sequence_lengths, dtype=np.int32)
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= np.dtype(dtype).itemsize
    with open(path, "wb") as file:
        file.write(HEADER + struct.pack("<QBQQ", VERSION, code, len(lengths), len(document_bounds)))
        for array in (lengths, pointers, np.ascontiguousarray(document_bounds, dtype=np.int64)):
            file.write(array.tobytes())


class IndexedTokens:
    """A pair of .bin and .idx files. The index is in memory; tokens are read on demand.

    tokens: reader of the .bin file. sequence_lengths [n] int32 and sequence_starts [n] int64: in tokens.
    document_bounds [d + 1] int64: index of each document's first sequence, then n. Raises ConfigError if a file is
    missing or damaged.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        bin_path, idx_path = f"{prefix}.bin", f"{prefix}.idx"
        for path in (bin_path, idx_path):
            if not os.path.isfile(path):
                raise ConfigError(
                    f"data.corpus: {path} does not exist, but token files come in pairs of .bin and .idx. {REBUILD}"
                )
        # Files are not mapped into memory: reading one that another process truncates would raise a bus error.
        with open(idx_path, "rb") as file:
            self.fingerprints = [_fingerprint(os.fstat(file.fileno()))]
            content = file.read()
        idx_bytes, head = len(content), content[:HEADER_BYTES]
        if len(head) < HEADER_BYTES or not head.startswith(HEADER):
            raise ConfigError(
                f"data.corpus: {idx_path} ({idx_bytes} bytes) does not begin with the header of a Megatron index. "
                f"{REBUILD}"
            )
        version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", head[len(HEADER) :])
        if version != VERSION or code not in DTYPES:
            raise ConfigError(
                f"data.corpus: {idx_path} has index version {version} and dtype code {code}, but supported are version "
                f"{VERSION} and dtype codes {sorted(DTYPES)}. {REBUILD}"
            )
        expected = HEADER_BYTES + num_sequences * (4 + 8) + num_bounds * 8
        if idx_bytes < expected:  # longer is legal: Megatron appends a byte per sequence to multimodal indices
            raise ConfigError(
                f"data.corpus: {idx_path} is truncated: it has {idx_bytes} bytes, but the {num_sequences} sequences "
                f"and {num_bounds} document bounds of its header take {expected} bytes. {REBUILD}"
            )
        self.dtype = np.dtype(DTYPES[code])
        index = np.frombuffer(content, dtype=np.uint8)
        lengths_end = HEADER_BYTES + num_sequences * 4
        pointers_end = lengths_end + num_sequences * 8
        self.sequence_lengths = index[HEADER_BYTES:lengths_end].view(np.int32)
        pointers = index[lengths_end:pointers_end].view(np.int64)
        self.document_bounds = index[pointers_end:expected].view(np.int64)

        self.tokens = TokenReader(bin_path, self.dtype)
        self.fingerprints.append(self.tokens.fingerprint)
        bin_bytes = self.tokens.fingerprint[0]
        announced = int(pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize if num_sequences else 0
        if bin_bytes != announced:
            raise ConfigError(
                f"data.corpus: {bin_path} has {bin_bytes} bytes, but must have {announced} according to {idx_path}: "
                f"the file is truncated or damaged. {REBUILD}"
            )
        self.sequence_starts = pointers // self.dtype.itemsize


class TokenReader:
    """Reader of the tokens in an open .bin file, which several threads may share.

    A file that is deleted or replaced stays readable. If the file is changed or truncated, the next read raises
    ConfigError; it never crashes the process.
    """

    def __init__(self, path: str, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self._file = _open(path)
        self.fingerprint = _fingerprint(os.fstat(self._file.fileno()))

    def __len__(self) -> int:
        return self.fingerprint[0] // self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> np.ndarray:
        begin, end, step = wanted.indices(len(self))
        assert step == 1
        return self.read([(begin, end)])

    def read(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the tokens of spans [begin, end), concatenated. Raises ConfigError if the file has changed."""
        size, descriptor = self.dtype.itemsize, self._file.fileno()
        content = b"".join([_read(descriptor, (end - begin) * size, begin * size) for begin, end in spans])
        now = _fingerprint(os.fstat(descriptor))
        if now != self.fingerprint or len(content) < sum(end - begin for begin, end in spans) * size:
            was = self.fingerprint[0]
            found = f"has {now[0]} bytes instead of {was}" if now[0] != was else "was written to"
            raise ConfigError(
                f"data.corpus: {self.path} {found}: it was changed during the run. Restore the file, and start the run "
                "again to resume"
            )
        return np.frombuffer(content, self.dtype)


def _read(descriptor: int, count: int, offset: int) -> bytes:
    """Return `count` bytes of a file, starting at byte `offset`; fewer at the end of the file."""
    content = os.pread(descriptor, count, offset)
    while len(content) < count:  # one read may return fewer bytes
        more = os.pread(descriptor, count - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content


def _fingerprint(stat: os.stat_result) -> tuple[int, int, int]:
    """Return size, modification time and inode of a file."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _open(path: str) -> BinaryIO:
    """Open a file for reading. If too many files are open, raise the process's limit on open files first."""
    try:
        return cast(BinaryIO, open(path, "rb", buffering=0))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise unreadable(path, error) from error
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return cast(BinaryIO, open(path, "rb", buffering=0))


def documents(starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the length in tokens of each document of an IndexedTokens: two int64 [documents]."""
    if len(bounds) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ends = np.append(starts, starts[-1:] + lengths[-1:])
    # A document's sequences are contiguous, so it ends where the next document starts.
    first, stop = ends[bounds[:-1]], ends[bounds[1:]]
    return first, stop - first
