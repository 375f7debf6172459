"""Functions that the samples of GPT and BERT share: seeded random draws, blends, epochs, and the files of a split."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from base.errors import ConfigError
from data.indexed import IndexedTokens
from data.prepare import TokenFile
from data.split import split_index

BLEND_PERIOD = 10_000  # samples after which the pattern of a blend repeats; weights are rounded to 1/BLEND_PERIOD
IGNORED = 0  # label of positions without a prediction, whose loss_mask is 0
# Purposes for which separate random streams are derived from one seed.
DOCUMENT_ORDER, SAMPLE_ORDER, SAMPLE = range(3)


def random_of(seed: int, purpose: int, *index: int) -> np.random.Philox:
    """Return a random bit generator that depends on the seed, the purpose and an index, such as a sample's number."""
    return np.random.Philox(np.random.SeedSequence([seed, purpose, *index]))


def permutation(seed: int, purpose: int, file: int, epoch: int, n: int) -> np.ndarray:
    """Return a random permutation of range(n), int64 [n], which is equal in every version of numpy."""
    return np.argsort(random_of(seed, purpose, file, epoch).random_raw(n), kind="stable")


class Locates(Protocol):
    """An object that maps sample i of a blend to a file and to the number of a sample in that file."""

    def locate(self, i: int) -> tuple[int, int]: ...


class Blend:
    """A blend of files by weight: maps sample i to a file and to a sample of that file, in a repeated pattern."""

    def __init__(self, weights: Sequence[float]):
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * BLEND_PERIOD
        if len(weights) > BLEND_PERIOD // 10 or shares.min() < 0.5:
            least = min(weights) / sum(weights)
            raise ConfigError(
                f"data.corpus has {len(weights)} sources (at most {BLEND_PERIOD // 10}), of which the smallest has "
                f"{least:.2g} of the total weight (at least {0.5 / BLEND_PERIOD}). Merge small sources into a folder"
            )
        self.counts = np.maximum(np.round(shares), 1).astype(np.int64)
        # The k-th of a file's c samples is at (k + 1/2) / c of the pattern: as even as possible.
        file = np.repeat(np.arange(len(weights)), self.counts)
        rank = np.concatenate([np.arange(count) for count in self.counts])
        order = np.argsort((rank + 0.5) / self.counts[file], kind="stable")
        self.file, self.rank = file[order], rank[order]

    def locate(self, i: int) -> tuple[int, int]:
        period, position = divmod(i, len(self.file))
        file = int(self.file[position])
        return file, period * int(self.counts[file]) + int(self.rank[position])


class Epochs:
    """A cache of the two most recently used epochs of a file."""

    def __init__(self, build: Any):
        self._build = build
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def get(self, epoch: int) -> Any:
        with self._lock:
            if epoch not in self._kept:
                while len(self._kept) > 1:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[epoch] = self._build(epoch)
            return self._kept[epoch]


def open_tokens(file: TokenFile) -> IndexedTokens:
    """Open a token file. Raises ConfigError if the file was replaced since this run first opened it."""
    indexed = IndexedTokens(file.prefix)
    file.opened = file.opened or indexed.fingerprints
    if indexed.fingerprints != file.opened:
        raise ConfigError(
            f"data.corpus: {file.prefix}.bin or .idx was replaced during the run. Restore the file, and start the run "
            "again to resume"
        )
    return indexed


def of_split(file: TokenFile, indexed: IndexedTokens) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return starts [n], lengths [n] and document bounds [d + 1] of a token file, and whether each document is in the
    file's split, bool [d]."""
    index = (indexed.sequence_starts, np.asarray(indexed.sequence_lengths), np.asarray(indexed.document_bounds))
    if file.split == "all":
        return *index, np.ones(max(len(index[2]) - 1, 0), dtype=bool)
    starts, lengths, bounds, held_out = split_index(*index, file.validation_fraction)
    return starts, lengths, bounds, held_out if file.split == "validation" else ~held_out


def check_files(files: Sequence[TokenFile]) -> None:
    """Raise ConfigError if `files`, the token files of a split, is empty."""
    if not files:
        raise ConfigError(
            "data.validation_fraction leaves a split of the corpus without documents, but training and validation need "
            "some. Raise data.validation_fraction, or set training.eval_interval=0"
        )
