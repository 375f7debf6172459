"""Attention as a list of slices: a run of query rows, a run of key rows of one sample, and which of their pairs
count.

Documents, padding and sliding windows are lists of slices. They are made on the host, once for a micro-batch, from
where its documents begin; neither torch nor a device is asked. Rows of a sample are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Kinds. Causal: query row i of a square attends to key rows 0 to i. Anti-causal: to key rows i to the last.
FULL, CAUSAL, ANTI_CAUSAL = range(3)
# Query rows: below them, torch's kernels for half precision on a CPU take longer than those for fp32, in the backward
# pass up to 9 times as long, and longer still for lengths that are new to them.
SHORT, SHORT_BACKWARD = 128, 768


class SliceShape(NamedTuple):
    """What slices that can be computed as one batch have in common: kind, query rows, key rows."""

    kind: int
    queries: int
    keys: int


@dataclass(frozen=True, eq=False)
class Slices:
    """A micro-batch's slices, int64 `[n]` each: kind, sample, first query row and number, first key row and number.

    Raises ValueError for a slice without a query or a key row, and for a causal one that is no square.
    """

    kind: np.ndarray
    sample: np.ndarray
    query: np.ndarray
    queries: np.ndarray
    key: np.ndarray
    keys: np.ndarray

    def __post_init__(self) -> None:
        # An empty slice ends the process: torch's kernel for the CPU divides by its length.
        if min(self.queries.min(initial=1), self.keys.min(initial=1)) < 1:
            raise ValueError("a slice has at least one query row and one key row")
        if ((self.kind != FULL) & (self.queries != self.keys)).any():
            raise ValueError("a causal slice has as many query rows as key rows")

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key row count."""
        return int(self._pairs.sum())

    @property
    def _pairs(self) -> np.ndarray:
        square, halves = self.queries * self.keys, self.queries * (self.queries + 1) // 2
        return np.where(self.kind == FULL, square, halves)

    def halves(self) -> list[Slices]:
        """The first slices and the others, about as many pairs in both, of which one that has most is cut; one list
        where there is nothing to cut."""
        most = int(np.argmax(self._pairs)) if len(self) else 0
        found = self._with_cut(most) if len(self) and 2 * self._pairs[most] > self.pairs else self
        middle = np.cumsum(found._pairs) - found._pairs / 2
        is_first = middle <= found._pairs.sum() / 2
        return [found.only(each) for each in (is_first, ~is_first) if each.any()] or [self]

    def _with_cut(self, number: int) -> Slices:
        """The same pairs with one slice cut at half its query rows: a causal square into a full one of half its pairs
        and two causal ones."""
        kind, sample, query, queries, key, keys = (int(column[number]) for column in self.columns)
        above = queries // 2
        if above == 0 or kind == ANTI_CAUSAL:
            return self
        below = query + above, queries - above
        if kind == FULL:
            parts = [(FULL, sample, query, above, key, keys), (FULL, sample, *below, key, keys)]
        else:
            parts = [
                (FULL, sample, *below, key, above),
                (CAUSAL, sample, query, above, key, above),
                (CAUSAL, sample, *below, key + above, queries - above),
            ]
        columns = zip(self.columns, np.array(parts, dtype=np.int64).T)
        return Slices(*(np.concatenate([each[:number], cut, each[number + 1 :]]) for each, cut in columns))

    def only(self, chosen: np.ndarray) -> Slices:
        """The slices that a mask or indices choose."""
        return Slices(*(column[chosen] for column in self.columns))

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """The six lists, in their order."""
        return self.kind, self.sample, self.query, self.queries, self.key, self.keys

    def batches(self) -> Iterator[tuple[SliceShape, Slices]]:
        """The slices by their shapes, each shape's in the order of their rows."""
        shapes = np.stack([self.kind, self.queries, self.keys], axis=1)
        found, inverse = np.unique(shapes, axis=0, return_inverse=True)
        for number, shape in enumerate(found):
            yield SliceShape(*map(int, shape)), self.only(np.flatnonzero(inverse.reshape(-1) == number))

    def launches(self) -> list[Slices]:
        """The slices in few groups, each of one kind, in which no query row and no key row is in two slices: what a
        kernel with cumulative lengths takes at once. The order of rows within each."""
        groups: list[_Group] = []
        order = np.lexsort((self.key, self.query, self.sample)).tolist()
        rows = [column.tolist() for column in self.columns]
        for i in order:
            kind, sample, query, queries, key, keys = (column[i] for column in rows)
            spans = (sample, query, query + queries), (sample, key, key + keys)
            for group in groups:
                if group.kind == kind and not any(runs.meet(*span) for runs, span in zip(group.sides, spans)):
                    break
            else:
                group = _Group(kind, [], (_Runs(), _Runs()))
                groups.append(group)
            group.members.append(i)
            for runs, span in zip(group.sides, spans):
                runs.add(*span)
        return [self.only(np.array(group.members)) for group in groups]


class _Runs:
    """Runs of rows of samples."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[int, int]]] = {}
        self._ends: dict[int, int] = {}

    def meet(self, sample: int, begin: int, end: int) -> bool:
        """Whether a run has a row in common with one of them."""
        if begin >= self._ends.get(sample, 0):  # as where they come in the order of their rows
            return False
        return any(first < end and begin < last for first, last in self._of[sample])

    def add(self, sample: int, begin: int, end: int) -> None:
        """One run more."""
        self._of.setdefault(sample, []).append((begin, end))
        self._ends[sample] = max(self._ends.get(sample, 0), end)


class _Group(NamedTuple):
    kind: int
    members: list[int]
    sides: tuple[_Runs, _Runs]  # their query rows and their key rows


def of_documents(positions: np.ndarray) -> Slices:
    """A causal square for each piece of a document. positions: of each token in its piece, int64 `[b, s]`; 0 begins a
    piece, as does a sample."""
    b, s = positions.shape
    begins = positions == 0
    begins[:, 0] = True
    sample, first = np.nonzero(begins)
    flat = sample * s + first
    lengths = np.diff(np.append(flat, b * s))
    return Slices(np.full(len(flat), CAUSAL), sample, first, lengths, first, lengths)


def joined(num_samples: int, length: int) -> Slices:
    """A causal square for each sample: `of_documents` where each sample is one document."""
    sample, zeros, lengths = np.arange(num_samples), np.zeros(num_samples, np.int64), np.full(num_samples, length)
    return Slices(np.full(num_samples, CAUSAL), sample, zeros, lengths, zeros, lengths)


def of_real_keys(num_keys: np.ndarray, length: int) -> Slices:
    """All rows of each sample attend to its first ones. num_keys: int64 `[b]`, at least 1 each."""
    sample, zeros = np.arange(len(num_keys)), np.zeros(len(num_keys), np.int64)
    return Slices(np.full(len(num_keys), FULL), sample, zeros, np.full(len(num_keys), length), zeros, num_keys)


def windowed(slices: Slices, window: int) -> Slices:
    """Causal squares in which a row attends to the last `window` rows alone, itself among them.

    Rows are cut into blocks of a window: a row attends to its block up to itself, and to what lies after its place in
    the block before.
    """
    assert (slices.kind == CAUSAL).all(), "a window slides over causal squares"
    parts: list[tuple[int, int, int, int, int, int]] = []
    for _, sample, query, length, _, _ in zip(*(column.tolist() for column in slices.columns)):
        for begin in range(0, length, window):
            size, at = min(window, length - begin), query + begin
            parts.append((CAUSAL, sample, at, size, at, size))
            reach = min(size, window - 1)  # the block's last row, if it has them all, attends to none before it
            if begin and reach:
                # Row i of the block attends to rows i + 1 to the last of the block before: an anti-causal square of
                # its first rows, and all keys behind it.
                before = at - window + 1
                parts.append((ANTI_CAUSAL, sample, at, reach, before, reach))
                if reach < window - 1:
                    parts.append((FULL, sample, at, reach, before + reach, window - 1 - reach))
    columns = np.array(parts, dtype=np.int64).reshape(-1, 6).T
    return Slices(*(np.ascontiguousarray(column) for column in columns))
