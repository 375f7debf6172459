"""Megatron's token files: `<prefix>.bin` holds the tokens, `<prefix>.idx` the length and offset of each sequence, and
the documents' bounds.

The layout is that of megatron/core/datasets/indexed_dataset.py (megatron-core 0.16.1). It is read and written here,
without importing Megatron, because that import takes seconds in each process that tokenizes; a test holds the two
compatible.
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

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(HEADER) + 8 + 1 + 8 + 8  # magic, version, dtype code, number of sequences, number of document bounds
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
UINT16_VOCAB_LIMIT = 65500  # Megatron's rule: smaller vocabularies are stored as uint16
REBUILD = "delete it, or run `python -m data.prepare` again with the same data settings to rebuild it"


def token_dtype(vocab_size: int) -> type[np.generic]:
    """Return the dtype that Megatron stores tokens of this vocabulary in."""
    return np.uint16 if vocab_size < UINT16_VOCAB_LIMIT else np.int32


def write_index(path: Path, dtype: type[np.generic], sequence_lengths: np.ndarray, document_bounds: np.ndarray) -> None:
    """Write an .idx file. sequence_lengths [n]: tokens; document_bounds [d + 1]: documents' first sequences, then n."""
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
    """A pair of .bin/.idx files: the index is in memory, the tokens are read when they are asked for.

    tokens: the whole .bin; sequence_lengths [n] int32; sequence_starts [n] int64, in tokens;
    document_bounds [d + 1] int64: the first sequence of each document, then n.

    Raises ConfigError with the file's name if one is missing or damaged.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        bin_path, idx_path = f"{prefix}.bin", f"{prefix}.idx"
        for path in (bin_path, idx_path):
            if not os.path.isfile(path):
                raise ConfigError(
                    f"data.corpus: token file {path} does not exist, though its partner is expected beside it; "
                    f"{REBUILD}"
                )
        # Neither file is mapped into memory: if another process truncates it, reading would end this one with a bus
        # error.
        with open(idx_path, "rb") as file:
            self.fingerprints = [_fingerprint(os.fstat(file.fileno()))]
            content = file.read()
        idx_bytes, head = len(content), content[:HEADER_BYTES]
        if len(head) < HEADER_BYTES or not head.startswith(HEADER):
            raise ConfigError(
                f"data.corpus: {idx_path} ({idx_bytes} bytes) does not begin with the header of a Megatron index; "
                f"{REBUILD}"
            )
        version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", head[len(HEADER) :])
        if version != VERSION or code not in DTYPES:
            raise ConfigError(
                f"data.corpus: {idx_path} has index version {version} and dtype code {code}; "
                f"supported are version {VERSION} and codes {sorted(DTYPES)}; {REBUILD}"
            )
        expected = HEADER_BYTES + num_sequences * (4 + 8) + num_bounds * 8
        if idx_bytes < expected:  # longer is legal: Megatron appends a byte per sequence to multimodal indices
            raise ConfigError(
                f"data.corpus: {idx_path} is truncated: {idx_bytes} bytes, but its header announces {num_sequences} "
                f"sequences and {num_bounds} document bounds, which take {expected}; {REBUILD}"
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
                f"data.corpus: {bin_path} has {bin_bytes} bytes, but {idx_path} announces {announced}: "
                f"the file is truncated or damaged; {REBUILD}"
            )
        self.sequence_starts = pointers // self.dtype.itemsize


class TokenReader:
    """The tokens of an open .bin file, which threads may share.

    A file that is deleted or replaced stays readable; one that is written to or truncated is an error at the next
    reading, never a crash.
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
        """Return the tokens of [begin, end) of each span, in a row. Raises ConfigError if the file has changed."""
        size, descriptor = self.dtype.itemsize, self._file.fileno()
        content = b"".join([_read(descriptor, (end - begin) * size, begin * size) for begin, end in spans])
        now = _fingerprint(os.fstat(descriptor))
        if now != self.fingerprint or len(content) < sum(end - begin for begin, end in spans) * size:
            found = (
                f"has {now[0]} bytes now, of {self.fingerprint[0]}"
                if now[0] != self.fingerprint[0]
                else "was written to"
            )
            raise ConfigError(
                f"data.corpus: {self.path} {found}: it was changed while it was read. Put it back as it was, and start "
                "again to go on"
            )
        return np.frombuffer(content, self.dtype)


def _read(descriptor: int, count: int, offset: int) -> bytes:
    """Return `count` bytes of a file, or fewer at its end."""
    content = os.pread(descriptor, count, offset)
    while len(content) < count:  # the system may return fewer at once
        more = os.pread(descriptor, count - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content


def _fingerprint(stat: os.stat_result) -> tuple[int, int, int]:
    """Return a file's size, time of change and inode."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _open(path: str) -> BinaryIO:
    """Open a file; raise the process' limit of open files if need be, as for a blend of hundreds."""
    try:
        return cast(BinaryIO, open(path, "rb", buffering=0))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise ConfigError(f"data.corpus: cannot read {path}: {error.strerror}") from error
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return cast(BinaryIO, open(path, "rb", buffering=0))


def documents(starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return start and length in tokens of each document of an index (see IndexedTokens), both int64 [documents]."""
    if len(bounds) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ends = np.append(starts, starts[-1:] + lengths[-1:])
    # A document's sequences are contiguous, so it ends where the next document starts.
    first, stop = ends[bounds[:-1]], ends[bounds[1:]]
    return first, stop - first
