"""Choose the documents of validation, by their names and texts alone, not by where they are stored.

By hash: the documents whose names hash to less than data.validation_fraction of the range, and at least one. That split
is taken for the standard library, whose figures are recorded, and for many documents whose tokens it splits nearly as
asked. Else documents are taken in the order of their hashes until the share of tokens is reached, and of the last one
its end, cut at a line.

Documents of equal text are hashed by the text. So they go to the same side, or are cut at the same token, and no
document of validation is trained on under another name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data.indexed import documents

# so many documents with the share met within this fraction of it: the split by hash stays
MANY_DOCUMENTS, CLOSE = (5_000, 0.1)
LEAST_PIECE = 8  # tokens: less is not cut off a document
MOST_CUTS = 16  # copies of a text that are cut alike; of more the text stays whole
LINE_REACH = 32  # tokens from the exact place to the line end, or else the word, that is taken instead


@dataclass(frozen=True)
class DocumentSplit:
    """held_out [documents] bool: whole documents of validation. `cuts`: documents that are not, but for the last `tail`
    tokens of each; one, or several of equal text.
    """

    held_out: np.ndarray
    cuts: tuple[int, ...] = ()
    tail: int = 0


def split_documents(
    hashes: np.ndarray,
    lengths: np.ndarray,
    fraction: float,
    is_stdlib: bool = False,
    texts: np.ndarray | None = None,
) -> DocumentSplit:
    """Split documents by the hashes of their names uint64 [d], their lengths in tokens [d] and, where they are known,
    the hashes of their texts uint64 [d]."""
    copies = np.zeros(len(hashes), dtype=bool)
    if texts is not None and not is_stdlib:
        copies = are_copies(texts)
        hashes = np.where(copies, texts, hashes)
    by_hash = _by_hash(hashes, fraction)
    by_hash |= copies & np.isin(hashes, hashes[by_hash & copies])
    total, held_out = int(lengths.sum()), int(lengths[by_hash].sum())
    if _hash_suffices(len(hashes), total - held_out, held_out, fraction, is_stdlib):
        return DocumentSplit(by_hash)
    target = round(fraction * total)
    order = np.argsort(hashes, kind="stable")
    # What stays together, in the order of the hashes: copies of a text, or one document.
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (hashes[order[1:]] != hashes[order[:-1]]) | ~copies[order[1:]] | ~copies[order[:-1]]
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(order))
    sizes = np.add.reduceat(lengths[order], firsts)
    ends = np.cumsum(sizes)
    whole = int(np.searchsorted(ends, target, side="right"))
    mask = np.zeros(len(hashes), dtype=bool)
    mask[order[: firsts[whole] if whole < len(firsts) else len(order)]] = True
    tail = target - (int(ends[whole - 1]) if whole else 0)
    for first, last, size in zip(firsts[whole:], lasts[whole:], sizes[whole:]):
        if tail < LEAST_PIECE:
            break
        together = order[first:last]
        piece = tail // len(together)
        if size <= tail:  # what comes after copies that could not be cut
            mask[together] = True
            tail -= int(size)
        elif len(together) <= MOST_CUTS and piece >= LEAST_PIECE and len(set(lengths[together].tolist())) == 1:
            return DocumentSplit(mask, tuple(sorted(together.tolist())), piece)
    return DocumentSplit(mask)


def are_copies(texts: np.ndarray) -> np.ndarray:
    """Which documents have a text that another one has, bool [d], by the hashes of their texts uint64 [d]."""
    _, inverse, counts = np.unique(texts, return_inverse=True, return_counts=True)
    return np.asarray(counts[inverse] > 1)


def _hash_suffices(num_documents: int, train: int, valid: int, fraction: float, is_stdlib: bool) -> bool:
    """Whether the split by hash, which has put these tokens into training and validation, is near enough."""
    if is_stdlib or fraction == 0:
        return True
    return num_documents >= MANY_DOCUMENTS and abs(valid - fraction * (train + valid)) <= CLOSE * fraction * (
        train + valid
    )


def _by_hash(hashes: np.ndarray, fraction: float) -> np.ndarray:
    held_out = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if fraction > 0 and len(hashes) > 1 and not held_out.any():
        held_out[np.argmin(hashes)] = True
    return held_out


def number_hashes(num_documents: int) -> np.ndarray:
    """Hashes of documents that have numbers but no names: uint64 [num_documents] (splitmix64)."""
    x = np.arange(1, num_documents + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def cut_place(
    lengths: np.ndarray, tail: int, tokens: Any = None, marks: tuple[np.ndarray, np.ndarray] | None = None
) -> int:
    """Where to cut a document of sequences with these lengths so that about `tail` of its tokens are for validation:
    how many are not.

    That is between two of its sequences; else, by its tokens [n] (an array, or what gives those of some places) and
    `marks` (bool [vocabulary]: a token ends a line, and it begins a word), between lines or before a word; each where
    one is near, else at the very token.
    """
    ends = np.cumsum(lengths)
    wanted = int(ends[-1]) - tail
    choices = [ends[(ends > 0) & (ends < ends[-1])]]
    if tokens is not None and marks is not None:
        ends_line, begins_word = marks
        window = np.arange(max(1, wanted - LINE_REACH), min(len(tokens) - 1, wanted + LINE_REACH) + 1)
        choices += [window[ends_line[tokens[window - 1]]], window[begins_word[tokens[window]]]]
    for places in choices:
        if len(places) and np.abs(places - wanted).min() <= LINE_REACH:
            return int(places[np.argmin(np.abs(places - wanted))])
    return wanted


def cut_document(
    starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, number: int, place: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make document `number` two, of which the first has `place` tokens, in an index: sequence_starts, sequence_lengths
    [n], and document_bounds [d + 1] (see IndexedTokens)."""
    first, last = int(bounds[number]), int(bounds[number + 1])
    ends = np.cumsum(lengths[first:last], dtype=np.int64)
    inside = int(np.searchsorted(ends, place))
    sequence = first + inside
    bounds = np.array(bounds)
    if ends[inside] != place:  # in the middle of a sequence, which becomes two
        kept = place - int(ends[inside] - lengths[sequence])
        starts = np.insert(starts, sequence + 1, starts[sequence] + kept)
        lengths = np.insert(lengths, sequence + 1, lengths[sequence] - kept)
        lengths[sequence] = kept
        bounds[number + 1 :] += 1
    return starts, lengths, np.insert(bounds, number + 1, sequence + 1)


def split_index(
    starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, fraction: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split a token file that the user has made: its index, with the document that is cut made two, and which are held
    out [d]."""
    in_document = documents(starts, lengths, bounds)[1]
    split = split_documents(number_hashes(len(in_document)), in_document, fraction)
    held_out = split.held_out
    for number in split.cuts:  # one: its documents' texts are not known
        of_cut = lengths[int(bounds[number]) : int(bounds[number + 1])]
        starts, lengths, bounds = cut_document(starts, lengths, bounds, number, cut_place(of_cut, split.tail))
        held_out = np.insert(held_out, number + 1, True)
    return starts, lengths, bounds, held_out
