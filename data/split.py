"""The choice of validation documents, by their names and texts alone, whatever their paths.

By hash: the documents whose names hash to less than data.validation_fraction of the range, and at least one. This split
is used for the standard library, whose figures are recorded, and for many documents if its share of the tokens is close
to the requested one. Otherwise documents are chosen in the order of their hashes until the share of tokens is reached;
of the last one only the end is chosen, cut at a line.

Documents of equal text are hashed by the text. So they are on the same side, or are cut at the same token, and no
document of validation is trained on under another name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data.indexed import documents

# The split by hash is used for this many documents if it meets the share within this fraction of it.
MANY_DOCUMENTS, CLOSE = (5_000, 0.1)
LEAST_TAIL = 8  # tokens: shorter tails are not cut off a document
MOST_CUTS = 16  # documents of equal text that are cut alike; if there are more, they stay whole
LINE_REACH = 32  # tokens from the exact position to the line end, or else the word, where a document is cut instead


@dataclass(frozen=True)
class DocumentSplit:
    """The documents of validation.

    held_out bool [documents]: whether the whole document is. cuts: documents of which only the last `tail` tokens are;
    one, or several of equal text.
    """

    held_out: np.ndarray
    cuts: tuple[int, ...] = ()
    tail: int = 0


def split_documents(
    hashes: np.ndarray, lengths: np.ndarray, fraction: float, is_stdlib: bool = False, texts: np.ndarray | None = None
) -> DocumentSplit:
    """Split documents by the hashes of their names uint64 [d], their lengths in tokens [d] and, if they are known, the
    hashes of their texts uint64 [d]."""
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
    if _hash_suffices(len(hashes), total - held_out, held_out, fraction, is_stdlib):
        return DocumentSplit(by_hash)
    target = round(fraction * total)
    order = np.argsort(hashes, kind="stable")
    # Groups that are not separated, in the order of the hashes: documents of equal text, or one document.
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
        if size <= tail:  # a group after one that could not be cut
            mask[group] = True
            tail -= int(size)
        elif len(group) <= MOST_CUTS and own_tail >= LEAST_TAIL and len(set(lengths[group].tolist())) == 1:
            return DocumentSplit(mask, tuple(sorted(group.tolist())), own_tail)
    return DocumentSplit(mask)


def _hash_suffices(num_documents: int, train: int, valid: int, fraction: float, is_stdlib: bool) -> bool:
    """Whether the split by hash, with these tokens in training and validation, is close enough to the fraction."""
    if is_stdlib or fraction == 0:
        return True
    return num_documents >= MANY_DOCUMENTS and abs(valid - fraction * (train + valid)) <= CLOSE * fraction * (
        train + valid
    )


def number_hashes(num_documents: int) -> np.ndarray:
    """Return hashes of the numbers of documents without names: uint64 [num_documents] (splitmix64)."""
    x = np.arange(1, num_documents + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def cut_position(
    lengths: np.ndarray, tail: int, tokens: Any = None, marks: tuple[np.ndarray, np.ndarray] | None = None
) -> int:
    """Return the position, in tokens, at which a document is cut so that about `tail` tokens remain for validation.

    lengths: of the document's sequences. tokens: all of the document, [n]; it is indexed with arrays of positions.
    marks: bool [vocabulary], whether a token ends a line, and whether it begins a word. The document is cut between two
    sequences, else between lines, else before a word, if one of these is near; else at the exact token.
    """
    ends = np.cumsum(lengths)
    wanted = int(ends[-1]) - tail
    choices = [ends[(ends > 0) & (ends < ends[-1])]]
    if tokens is not None and marks is not None:
        ends_line, begins_word = marks
        window = np.arange(max(1, wanted - LINE_REACH), min(len(tokens) - 1, wanted + LINE_REACH) + 1)
        choices += [window[ends_line[tokens[window - 1]]], window[begins_word[tokens[window]]]]
    for positions in choices:
        if len(positions) and np.abs(positions - wanted).min() <= LINE_REACH:
            return int(positions[np.argmin(np.abs(positions - wanted))])
    return wanted


def cut_document(
    starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, number: int, position: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut document `number` in two, the first of `position` tokens, in an index: sequence_starts [n], sequence_lengths
    [n], and document_bounds [d + 1] (see IndexedTokens)."""
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
    """Split a token file of the user's. Return starts, lengths and bounds of its index after the cut, and which
    documents are held out, bool [d]."""
    in_document = documents(starts, lengths, bounds)[1]
    split = split_documents(number_hashes(len(in_document)), in_document, fraction)
    held_out = split.held_out
    for number in split.cuts:  # at most one, since the documents' texts are not known
        of_cut = lengths[int(bounds[number]) : int(bounds[number + 1])]
        starts, lengths, bounds = cut_document(starts, lengths, bounds, number, cut_position(of_cut, split.tail))
        held_out = np.insert(held_out, number + 1, True)
    return starts, lengths, bounds, held_out
