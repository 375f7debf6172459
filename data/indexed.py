"""Megatron's token files: `<prefix>.bin` holds the tokens, `<prefix>.idx` the length and place of each sequence and document.

The layout is that of megatron/core/datasets/indexed_dataset.py (megatron-core 0.16.1). It is read and written here, without
importing Megatron, because that import takes seconds in each process that tokenizes; a test holds the two compatible.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.schema import ConfigError

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(HEADER) + 8 + 1 + 8 + 8  # magic, version, dtype code, number of sequences, number of document bounds
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
UINT16_VOCAB_LIMIT = 65500  # Megatron's rule: smaller vocabularies are stored as uint16
REBUILD = "delete it, or run `python -m data.prepare` again with the same data settings to rebuild it"


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The dtype that Megatron stores tokens of this vocabulary in."""
    return np.uint16 if vocab_size < UINT16_VOCAB_LIMIT else np.int32


def write_index(path: Path, dtype: type[np.generic], sequence_lengths: np.ndarray, document_bounds: np.ndarray) -> None:
    """Write an .idx file. sequence_lengths [n] in tokens; document_bounds [d + 1]: first sequence of each document, then n."""
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
    """A pair of .bin/.idx files, memory-mapped.

    tokens [total]: the whole .bin; sequence_lengths [n] int32; sequence_starts [n] int64, in tokens;
    document_bounds [d + 1] int64: the first sequence of each document, then n.

    Raises ConfigError, naming the file, when one is missing or damaged.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        bin_path, idx_path = f"{prefix}.bin", f"{prefix}.idx"
        for path in (bin_path, idx_path):
            if not os.path.isfile(path):
                raise ConfigError(f"data.corpus: token file {path} does not exist, though its partner is expected beside it; {REBUILD}")
        idx_bytes = os.path.getsize(idx_path)
        with open(idx_path, "rb") as file:
            head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES or not head.startswith(HEADER):
            raise ConfigError(f"data.corpus: {idx_path} ({idx_bytes} bytes) does not begin with the header of a Megatron index; {REBUILD}")
        version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", head[len(HEADER) :])
        if version != VERSION or code not in DTYPES:
            raise ConfigError(
                f"data.corpus: {idx_path} has index version {version} and dtype code {code}; "
                f"supported are version {VERSION} and codes {sorted(DTYPES)}; {REBUILD}"
            )
        expected = HEADER_BYTES + num_sequences * (4 + 8) + num_bounds * 8
        if idx_bytes < expected:  # longer is legal: Megatron appends a byte per sequence to multimodal indices
            raise ConfigError(
                f"data.corpus: {idx_path} is truncated: {idx_bytes} bytes, but its header announces {num_sequences} sequences "
                f"and {num_bounds} document bounds, which take {expected}; {REBUILD}"
            )
        self.dtype = np.dtype(DTYPES[code])
        index = np.memmap(idx_path, mode="r", dtype=np.uint8)
        lengths_end = HEADER_BYTES + num_sequences * 4
        pointers_end = lengths_end + num_sequences * 8
        self.sequence_lengths = index[HEADER_BYTES:lengths_end].view(np.int32)
        pointers = index[lengths_end:pointers_end].view(np.int64)
        self.document_bounds = index[pointers_end:expected].view(np.int64)

        bin_bytes = os.path.getsize(bin_path)
        announced = int(pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize if num_sequences else 0
        if bin_bytes != announced:
            raise ConfigError(
                f"data.corpus: {bin_path} has {bin_bytes} bytes, but {idx_path} announces {announced}: "
                f"the file is truncated or damaged; {REBUILD}"
            )
        self.sequence_starts = pointers // self.dtype.itemsize
        self.tokens = np.memmap(bin_path, mode="r", dtype=self.dtype) if bin_bytes else np.zeros(0, self.dtype)


def documents(starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and length in tokens, both int64 [number of documents], of every document of an index (as IndexedTokens has it)."""
    if len(bounds) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ends = np.append(starts, starts[-1:] + lengths[-1:])
    # A document's sequences lie one after the other, so it reaches from its first to the start of what follows.
    first, stop = ends[bounds[:-1]], ends[bounds[1:]]
    return first, stop - first


def write_tokens(prefix: Path, dtype: type[np.generic], documents: Sequence[Sequence[Sequence[int] | np.ndarray]]) -> None:
    """Write small token files in one go: documents, each a list of token arrays (its sequences)."""
    sequences = [sequence for document in documents for sequence in document]
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(np.asarray(sequence, dtype=dtype).tobytes())
    bounds = np.cumsum([0] + [len(document) for document in documents])
    write_index(Path(f"{prefix}.idx"), dtype, np.array([len(sequence) for sequence in sequences]), bounds)
