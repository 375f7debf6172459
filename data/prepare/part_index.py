"""What the parts of a source hold, as a whole: the index of its documents, and their tokens."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from configs.schema import ConfigError

MOST_TOKENS = 2**31 - 1  # of a sequence: an .idx file holds its length in 32 bits


@dataclass
class Index:
    """The index of a source's documents.

    lengths int32 [n]: of the sequences, in tokens; counts int64 [d]: of each document's sequences; hashes uint64 [d]:
    of the documents' names; texts uint64 [d]: of what they hold.
    """

    lengths: np.ndarray
    counts: np.ndarray
    hashes: np.ndarray
    texts: np.ndarray
    num_bytes: int
    bad_lines: list[str]
    control_tokens: Counter[int]  # special tokens that the texts hold

    def bounds(self) -> np.ndarray:
        """The first sequence of each document, then n: int64 [d + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    def tokens(self) -> np.ndarray:
        """Tokens of each document: int64 [d]."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
        return np.diff(ends[self.bounds()])


def load(part: Path) -> Any:
    """The arrays of a part, each read when it is asked for."""
    return np.load(io.BytesIO(part.read_bytes()))


def read_index(parts: list[Path], family: str, name: str) -> Index:
    """The index of all parts; a document that lies in several is one. Raises ConfigError for one that is too long."""
    lengths, counts, hashes = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    texts = [np.zeros(0, np.uint64)]
    text_hash = xxhash.xxh3_64()  # of a document that lies in several parts, so far
    num_bytes, bad, control = 0, list[str](), Counter[int]()
    for part in parts:
        arrays = load(part)
        own_lengths, own_counts, own_hashes, own_texts = (
            arrays[key] for key in ("sequence_lengths", "sequences_per_document", "hashes", "texts")
        )
        num_bytes += int(arrays["num_bytes"])
        bad += arrays["bad_lines"].tolist()
        control.update(dict(arrays["control_tokens"].tolist()))
        if arrays["goes_on"]:
            if family == "gpt":  # a document is one sequence
                before = next(array for array in reversed(lengths) if len(array))
                joined = int(before[-1]) + int(own_lengths[0])
                if joined > MOST_TOKENS:
                    raise ConfigError(
                        f"data.documents_in_text=file: a file of {name} is a document of {joined:,} tokens or more, "
                        f"and a token file takes {MOST_TOKENS:,}; cut the file, or set "
                        "data.documents_in_text=blank_line or line"
                    )
                before[-1], own_lengths = joined, own_lengths[1:]
            else:
                next(array for array in reversed(counts) if len(array))[-1] += own_counts[0]
            text_hash.update(arrays["head"])
            next(array for array in reversed(texts) if len(array))[-1] = text_hash.intdigest()
            own_counts, own_hashes, own_texts = own_counts[1:], own_hashes[1:], own_texts[1:]
        if len(tail := arrays["tail"]):
            text_hash = xxhash.xxh3_64(tail)
        lengths.append(own_lengths)
        counts.append(own_counts)
        hashes.append(own_hashes)
        texts.append(own_texts)
    return Index(
        np.concatenate(lengths),
        np.concatenate(counts),
        np.concatenate(hashes),
        np.concatenate(texts),
        num_bytes,
        bad,
        control,
    )


class PartTokens:
    """The tokens of all parts, end to end, read where they are asked for."""

    def __init__(self, parts: list[Path], dtype: type[np.generic]):
        self._files = [part.with_suffix(".bin") for part in parts]
        self._dtype = np.dtype(dtype)
        sizes = [file.stat().st_size // self._dtype.itemsize for file in self._files]
        self._ends = np.cumsum(np.array(sizes, dtype=np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end)."""
        found = [np.zeros(0, self._dtype)]
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            stop = min(end, int(self._ends[number]))
            first = begin - (int(self._ends[number - 1]) if number else 0)
            found.append(
                np.fromfile(self._files[number], self._dtype, count=stop - begin, offset=first * self._dtype.itemsize)
            )
            begin, number = stop, number + 1
        return np.concatenate(found)


class DocumentTokens:
    """A document's tokens as `cut_place` reads them: a few near each other."""

    def __init__(self, tokens: PartTokens, begin: int, length: int):
        self._tokens, self._begin, self._length = tokens, begin, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        if not len(places):
            return self._tokens.read(0, 0)
        first = int(places.min())
        return self._tokens.read(self._begin + first, self._begin + int(places.max()) + 1)[places - first]
