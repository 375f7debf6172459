"""Lengths of documents and of their segments in samples, and numbers of token pairs that attend to each other.

A segment is the span of a document within a sample. A token attends to the earlier tokens of its segment and to itself;
in layers with a sliding window, to the last `window` of these. Shares are relative to the token pairs of samples that
consist of one document each, without a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from base.errors import ConfigError
from configs import derived
from configs.schema import Config
from data.indexed import IndexedTokens, documents
from data.prepare import TokenFile, find_prepared
from data.samples.shared import check_files, of_split

SEGMENT_LENGTHS = "segment_lengths"  # key in the batches of an evaluation
DRAWN = 16  # micro-batches whose segments are drawn for a plan
Made = TypeVar("Made")
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def document_lengths(file: TokenFile) -> np.ndarray:
    """Return the length in tokens, int64 [n], of each non-empty document in the split (train, validation or all) that a
    token file has."""
    *index, wanted = of_split(file, IndexedTokens(file.prefix))
    lengths = documents(*index)[1]
    return lengths[wanted & (lengths > 0)]


def summary(lengths: np.ndarray) -> dict[str, float]:
    """Return number, mean, quantiles and maximum of document lengths [n] in tokens; n is at least 1."""
    quantiles = {name: float(np.quantile(lengths, share)) for name, share in QUANTILES.items()}
    return {"number": len(lengths), "mean": float(lengths.mean()), **quantiles, "longest": int(lengths.max())}


def describe_lengths(files: Sequence[TokenFile], sequence_length: int | None) -> list[str]:
    """Return the lines that `python -m data.prepare` prints about the lengths of documents. Raises ConfigError."""
    every = [document_lengths(file) for file in files]
    if not sum(map(len, every)):
        return []
    found = summary(np.concatenate(every))
    lines = [
        f"lengths     {found['number']:,} documents to train on, in tokens: median {found['median']:,.0f}, mean "
        f"{found['mean']:,.0f}, 90% up to {found['p90']:,.0f}, 99% up to {found['p99']:,.0f}, longest "
        f"{found['longest']:,}"
    ]
    if sequence_length is not None:
        total = sum(file.weight for file in files)
        both = zip(files, every, strict=True)
        share = sum(file.weight / total * expected_share(lengths, sequence_length) for file, lengths in both)
        lines.append(
            f"attention   data.documents=separate keeps {share:.1%} of the token pairs at model.sequence_length="
            f"{sequence_length}"
        )
    return lines


def expected_share(lengths: np.ndarray, sequence_length: int, window: int | None = None) -> float:
    """Return the expected share of causal token pairs that attend to each other, if documents of these lengths [n] are
    separate. A share of 1 means that each sample is one document.

    Documents are concatenated in random order and cut into samples of `sequence_length` tokens, so that a sample begins
    at any token. So the expected position in its segment of token `i` of a document is i - i(i + 1) / 2s for i < s, and
    (s - 1) / 2 for later tokens.
    """
    s = float(sequence_length)
    reach = float(min(window or sequence_length, sequence_length))  # most keys that a token attends to
    inside = np.minimum(lengths, reach).astype(np.float64)  # tokens with fewer keys than the most
    pairs = inside * (inside + 1) / 2 - (inside - 1) * inside * (inside + 1) / (6 * s)
    pairs += (lengths - inside) * (reach - reach * (reach - 1) / (2 * s))
    return float(pairs.sum() / (lengths.sum() * (s + 1) / 2))


def corpus_share(config: Config, files: Sequence[TokenFile]) -> float:
    """Return the expected share of causal token pairs that attend to each other if documents are separate: a mean over
    the layers and the weighted token files. Raises ConfigError if a file is damaged."""
    check_files(files)
    length, window, pattern = config.model.sequence_length, config.model.sliding_window, derived.window_pattern(config)
    windowed = sum(pattern) / len(pattern)
    total = 0.0
    for file in files:
        lengths = document_lengths(file)
        share = (1 - windowed) * expected_share(lengths, length)
        total += file.weight * (share + windowed * expected_share(lengths, length, window))
    return total / sum(file.weight for file in files)


def planned_share(config: Config) -> float | None:
    """Return the expected share of causal token pairs that attend to each other in samples of the configured corpus;
    None unless documents are separate and the corpus is prepared."""
    return _of_prepared(config, corpus_share)


def planned_segments(config: Config) -> list[np.ndarray] | None:
    """Draw random micro-batches of the configured corpus for a plan. Returns the lengths in tokens of each one's
    segments (parts of one document), int64 [n]; None unless documents are separate, sequences are sharded over ranks,
    and the corpus is prepared. Writes no files."""
    return None if config.parallel.context == 1 else _of_prepared(config, draw_segments)


def _of_prepared(config: Config, make: Callable[[Config, Sequence[TokenFile]], Made]) -> Made | None:
    if config.data.documents != "separate":
        return None
    try:
        files = find_prepared(config.data, config.model.family)
        return None if files is None else make(config, files)
    except ConfigError:
        return None  # a plan needs no corpus; training reports the error


def draw_segments(config: Config, files: Sequence[TokenFile]) -> list[np.ndarray]:
    """Draw random micro-batches of a blend of token files. Returns the lengths in tokens of each one's segments (parts
    of one document), int64 [n].

    Documents are concatenated in random order and cut into samples, so that a sample begins at any token of a document.
    Raises ConfigError if a file is damaged.
    """
    check_files(files)
    draw, length = np.random.default_rng(config.training.seed), config.model.sequence_length
    every = [document_lengths(file) for file in files]
    weights = np.array([file.weight if len(lengths) else 0.0 for file, lengths in zip(files, every, strict=True)])
    found = []
    for _ in range(DRAWN):
        chosen = draw.choice(len(files), config.training.micro_batch_size, p=weights / weights.sum())
        found.append(np.concatenate([_sample(draw, every[number], length) for number in chosen]))
    return found


def _sample(draw: np.random.Generator, lengths: np.ndarray, size: int) -> np.ndarray:
    first = draw.choice(lengths, p=lengths / lengths.sum())
    count = 1 + int(np.ceil(2 * size / lengths.mean()))
    others = draw.choice(lengths, count)
    while others.sum() < size:
        others = np.concatenate([others, draw.choice(lengths, count)])
    ends = np.cumsum(np.concatenate([[draw.integers(1, first + 1)], others]))
    return np.diff(np.concatenate([[0], ends[ends < size], [size]]))


def attended_pairs(config: Config, positions: Any) -> int:
    """Return the number of token pairs that attend to each other, summed over the layers. positions: each token's
    position in its segment (part of one document), int64 [b, s] on the host."""
    keys = np.asarray(positions) + 1
    pattern = derived.window_pattern(config)
    pairs = int(keys.sum()) * (len(pattern) - sum(pattern))
    if any(pattern):
        assert config.model.sliding_window is not None
        pairs += int(np.minimum(keys, config.model.sliding_window).sum()) * sum(pattern)
    return pairs


def share_of(config: Config, pairs: float) -> float:
    """Return `pairs`, the number of attended token pairs of a global batch, divided by the number that the batch would
    have if each sample were one document."""
    length, samples = config.model.sequence_length, config.training.global_batch_size
    return pairs / (config.model.num_layers * samples * length * (length + 1) / 2)


def segment_lengths(positions: Any) -> np.ndarray:
    """Return the length in tokens of the segment (part of one document) that contains each token, int64 [b, s].
    positions: each token's position in its segment, int64 [b, s]."""
    begins = np.asarray(positions) == 0
    begins[:, 0] = True
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, begins.size))
    return np.repeat(lengths, lengths).reshape(begins.shape)


def bucket_name(bucket: int) -> str:
    """Return the name of a histogram's bucket, which is its range of values: 0, 1, 2-3, 4-7, ... for 0, 1, 2, 3, ..."""
    first, last = 2 ** (bucket - 1) if bucket else 0, 2**bucket - 1
    return str(first) if first == last else f"{first}-{last}"
