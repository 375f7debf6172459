"""The choice of validation documents, which depends only on the documents' names and texts, not on their paths.

By hash: documents are chosen whose names hash into the lowest data.validation_fraction of the range, and at least one.
This split is used for the standard library, whose results are published, and for many documents if the resulting share
of tokens is close to the fraction. Otherwise documents are chosen in the order of their hashes until the share of
tokens is reached; of the last document only the end is chosen, cut at a line.

Documents of equal text are hashed by their text. So they are all in the same split, or are cut at the same token, and
no validation document is trained on under another name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.indexed import documents

# From this number of documents on, the split by hash is used if its share is within this fraction of the wanted one.
MANY_DOCUMENTS, CLOSE = (5_000, 0.1)
LEAST_TAIL = 8  # tokens; shorter ends are not cut off a document
MOST_CUTS = 16  # documents of equal text that are cut in the same way; more of them are not cut
LINE_REACH = 32  # most tokens between the exact position and the end of a line (or a word) where the cut is made


@dataclass(frozen=True)
class DocumentSplit:
    """The documents that are held out for validation.

    held_out bool [documents]: True if the whole document is held out. cuts: documents of which only the last `tail`
    tokens are held out; several only if their texts are equal.
    """

    held_out: np.ndarray
    cuts: tuple[int, ...] = ()
    tail: int = 0


def split_documents(
    hashes: np.ndarray, lengths: np.ndarray, fraction: float, is_stdlib: bool = False, texts: np.ndarray | None = None
) -> DocumentSplit:
    """Choose the validation documents. hashes: of the documents' names, uint64 [d]. lengths [d]: in tokens. texts:
    hashes of the documents' texts, uint64 [d], if known."""
    is_duplicate = np.zeros(len(hashes), dtype=bool)
    if texts is not None and not is_stdlib:
        _, inverse, counts = np.unique(texts, return_inverse=True, return_counts=True)
        is_duplicate = np.asarray(counts[inverse] > 1)
        hashes = np.where(is_duplicate, texts, hashes)
    by_hash = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if fraction > 0 and len(hashes) > 1 and not by_hash.any():
        by_hash[np.argmin(hashes)] = True
    by_hash |= is_duplicate & np.isin(hashes, hashes[by_hash & is_duplicate])
    total, held_out = int(lengths.sum()), int(lengths[by_hash].sum())
    if is_stdlib or _hash_suffices(len(hashes), held_out, total, fraction):
        return DocumentSplit(by_hash)
    target = round(fraction * total)
    order = np.argsort(hashes, kind="stable")
    # Groups in the order of the hashes: documents of equal text, which stay together, or a single document.
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (hashes[order[1:]] != hashes[order[:-1]]) | ~is_duplicate[order[1:]] | ~is_duplicate[order[:-1]]
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(order))
    sizes = np.add.reduceat(lengths[order], firsts)
    ends = np.cumsum(sizes)
    whole = int(np.searchsorted(ends, target, side="right"))
    mask = np.zeros(len(hashes), dtype=bool)
    mask[order[: firsts[whole] if whole < len(firsts) else len(order)]] = True
    tail = target - (int(ends[whole - 1]) if whole else 0)
    for first, last, size in zip(firsts[whole:], lasts[whole:], sizes[whole:]):
        if tail < LEAST_TAIL:
            break
        group = order[first:last]
        own_tail = tail // len(group)  # of each document
        if size <= tail:  # a group that follows one that could not be cut
            mask[group] = True
            tail -= int(size)
        elif len(group) <= MOST_CUTS and own_tail >= LEAST_TAIL and len(set(lengths[group].tolist())) == 1:
            return DocumentSplit(mask, tuple(sorted(group.tolist())), own_tail)
    return DocumentSplit(mask)


def _hash_suffices(num_documents: int, held_out: int, total: int, fraction: float) -> bool:
    """Return whether the split by hash holds out a share of the `total` tokens that is close enough to `fraction`."""
    is_close = abs(held_out - fraction * total) <= CLOSE * fraction * total
    return fraction == 0 or (num_documents >= MANY_DOCUMENTS and is_close)


def number_hashes(num_documents: int) -> np.ndarray:
    """Return a hash for each document of a source whose documents have no names, from its number: uint64
    [num_documents] (splitmix64)."""
    x = np.arange(1, num_documents + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def cut_position(
    lengths: np.ndarray,
    tail: int,
    read: Callable[[int, int], np.ndarray] | None = None,
    marks: tuple[np.ndarray, np.ndarray] | None = None,
) -> int:
    """Return the position, in tokens, at which to cut a document so that about its last `tail` tokens are held out.

    lengths: of the document's sequences. read: returns the document's tokens [begin, end). marks: whether each token id
    ends a line, and whether it begins a word, both bool [vocabulary]. The cut is at the nearest position between two
    sequences, else between two lines, else before a word; if none is within LINE_REACH tokens, at the exact token.
    """
    ends = np.cumsum(lengths)
    wanted = int(ends[-1]) - tail
    choices = [ends[(ends > 0) & (ends < ends[-1])]]
    if read is not None and marks is not None:
        ends_line, begins_word = marks
        window = np.arange(max(1, wanted - LINE_REACH), min(int(ends[-1]) - 1, wanted + LINE_REACH) + 1)
        near = read(int(window[0]) - 1, int(window[-1]) + 1)
        choices += [window[ends_line[near[:-1]]], window[begins_word[near[1:]]]]
    for positions in choices:
        if len(positions) and np.abs(positions - wanted).min() <= LINE_REACH:
            return int(positions[np.argmin(np.abs(positions - wanted))])
    return wanted


def cut_document(
    starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, number: int, position: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut document `number` in two after `position` tokens. Returns the new index: sequence_starts [n],
    sequence_lengths [n] and document_bounds [d + 1] (IndexedTokens)."""
    first, last = int(bounds[number]), int(bounds[number + 1])
    ends = np.cumsum(lengths[first:last], dtype=np.int64)
    inside = int(np.searchsorted(ends, position))
    sequence = first + inside
    bounds = np.array(bounds)
    if ends[inside] != position:  # in the middle of a sequence, which becomes two
        kept = position - int(ends[inside] - lengths[sequence])
        starts = np.insert(starts, sequence + 1, starts[sequence] + kept)
        lengths = np.insert(lengths, sequence + 1, lengths[sequence] - kept)
        lengths[sequence] = kept
        bounds[number + 1 :] += 1
    return starts, lengths, np.insert(bounds, number + 1, sequence + 1)


def split_index(
    starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, fraction: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split the documents of a user's token file. Returns the index (starts, lengths and bounds), in which a cut
    document counts as two, and whether each document is held out, bool [d]."""
    in_document = documents(starts, lengths, bounds)[1]
    split = split_documents(number_hashes(len(in_document)), in_document, fraction)
    held_out = split.held_out
    for number in split.cuts:  # at most one, because the texts of the documents are unknown
        of_cut = lengths[int(bounds[number]) : int(bounds[number + 1])]
        starts, lengths, bounds = cut_document(starts, lengths, bounds, number, cut_position(of_cut, split.tail))
        held_out = np.insert(held_out, number + 1, True)
    return starts, lengths, bounds, held_out
