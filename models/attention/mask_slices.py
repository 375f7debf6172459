"""The attention mask as a list of slices. A slice is a run of query rows, a run of key rows of the same sample, and a
kind, which tells which query rows attend to which key rows.

Documents, padding and sliding windows are expressed as slices. Slices are made on the host with numpy, once per
micro-batch, from the starts of its documents. Rows of a sample are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FULL, CAUSAL, ANTI_CAUSAL = range(3)  # kinds of slices: see Slices
# Numbers of query rows below which torch's CPU kernels are slower in half precision than in fp32: up to 9 times in the
# backward pass, and even slower at the first call with a new length.
SHORT, SHORT_BACKWARD = 128, 768


class SliceShape(NamedTuple):
    """Kind (full, causal or anti-causal), number of query rows and number of key rows of attention slices that have
    equal shapes."""

    kind: int
    queries: int
    keys: int


@dataclass(frozen=True, eq=False)
class Slices:
    """Attention slices of a micro-batch, as columns, int64 `[n]` each. A slice is a run of query rows, a run of key
    rows of the same sample, and a kind: query row i attends to all keys (full), to keys 0 to i (causal), or to keys i
    to the last (anti-causal). `query`, `queries`: first query row and number of query rows. `key`, `keys`: first key
    row and number of key rows.

    Raises ValueError if a slice has no query row or no key row, or if a causal or anti-causal slice is not square.
    """

    kind: np.ndarray
    sample: np.ndarray
    query: np.ndarray
    queries: np.ndarray
    key: np.ndarray
    keys: np.ndarray

    def __post_init__(self) -> None:
        # An empty slice kills the process: torch's CPU kernel divides by its length.
        if min(self.queries.min(initial=1), self.keys.min(initial=1)) < 1:
            shortest = f"{self.queries.min()} query rows and {self.keys.min()} key rows"
            raise ValueError(f"each slice must have query rows and key rows, but the smallest has {shortest}")
        if (oblong := (self.kind != FULL) & (self.queries != self.keys)).any():
            sizes = f"{self.queries[oblong][0]} and {self.keys[oblong][0]}"
            raise ValueError(f"a causal or anti-causal slice must have as many query rows as key rows, not {sizes}")

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def pairs(self) -> int:
        """Number of query-key pairs in which the query attends to the key, summed over all slices."""
        return int(self._pairs.sum())

    @property
    def _pairs(self) -> np.ndarray:
        square, halves = self.queries * self.keys, self.queries * (self.queries + 1) // 2
        return np.where(self.kind == FULL, square, halves)

    def halves(self) -> list[Slices]:
        """Split the attention slices into two lists with about equal numbers of query-key pairs, and cut the largest
        slice if needed. Returns a single list if they cannot be split."""
        most = int(np.argmax(self._pairs)) if len(self) else 0
        found = self._with_cut(most) if len(self) and 2 * self._pairs[most] > self.pairs else self
        middle = np.cumsum(found._pairs) - found._pairs / 2
        is_first = middle <= found._pairs.sum() / 2
        return [found.only(each) for each in (is_first, ~is_first) if each.any()] or [self]

    def _with_cut(self, number: int) -> Slices:
        """Cut one attention slice (index `number`) at half its query rows. A causal slice becomes a full slice with
        about half its pairs and two causal slices. An anti-causal slice or a single query row is not cut."""
        kind, sample, query, queries, key, keys = (int(column[number]) for column in self.columns)
        above = queries // 2
        if above == 0 or kind == ANTI_CAUSAL:
            return self
        below = query + above, queries - above
        if kind == FULL:
            new_slices = [(FULL, sample, query, above, key, keys), (FULL, sample, *below, key, keys)]
        else:
            new_slices = [
                (FULL, sample, *below, key, above),
                (CAUSAL, sample, query, above, key, above),
                (CAUSAL, sample, *below, key + above, queries - above),
            ]
        columns = zip(self.columns, np.array(new_slices, dtype=np.int64).T)
        return Slices(*(np.concatenate([each[:number], cut, each[number + 1 :]]) for each, cut in columns))

    def only(self, chosen: np.ndarray) -> Slices:
        """Select attention slices by a boolean mask or by indices."""
        return Slices(*(column[chosen] for column in self.columns))

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All columns in a fixed order: kind, sample, query, queries, key, keys."""
        return self.kind, self.sample, self.query, self.queries, self.key, self.keys

    def batches(self) -> Iterator[tuple[SliceShape, Slices]]:
        """Group the attention slices by shape. Yields each shape with its slices, whose order does not change."""
        shapes = np.stack([self.kind, self.queries, self.keys], axis=1)
        found, inverse = np.unique(shapes, axis=0, return_inverse=True)
        for number, shape in enumerate(found):
            yield SliceShape(*map(int, shape)), self.only(np.flatnonzero(inverse.reshape(-1) == number))

    def launches(self) -> list[Slices]:
        """Group the attention slices into few kernel launches. The slices of a launch have one kind, share no query row
        and no key row, and are sorted by row, as kernels with cumulative lengths require."""
        groups: list[_Group] = []
        order = np.lexsort((self.key, self.query, self.sample)).tolist()
        column_lists = [column.tolist() for column in self.columns]
        for i in order:
            kind, sample, query, queries, key, keys = (column[i] for column in column_lists)
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
    """Set of row ranges in each sample that tells whether a new range overlaps them."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[int, int]]] = {}
        self._ends: dict[int, int] = {}

    def meet(self, sample: int, begin: int, end: int) -> bool:
        """Return whether rows [begin, end) of a sample overlap a range that was added before."""
        if begin >= self._ends.get(sample, 0):  # always so if runs are added in the order of their rows
            return False
        return any(first < end and begin < last for first, last in self._of[sample])

    def add(self, sample: int, begin: int, end: int) -> None:
        """Add rows [begin, end) of a sample."""
        self._of.setdefault(sample, []).append((begin, end))
        self._ends[sample] = max(self._ends.get(sample, 0), end)


class _Group(NamedTuple):
    kind: int
    members: list[int]
    sides: tuple[_Runs, _Runs]  # runs of query rows and of key rows


def of_documents(positions: np.ndarray) -> Slices:
    """Return the attention slices of packed documents: one causal slice per segment. `positions`: int64 `[b, s]`, the
    position of each token in its segment. A segment starts at position 0 and at the start of a sample."""
    b, s = positions.shape
    begins = positions == 0
    begins[:, 0] = True
    sample, first = np.nonzero(begins)
    flat = sample * s + first
    lengths = np.diff(np.append(flat, b * s))
    return Slices(np.full(len(flat), CAUSAL), sample, first, lengths, first, lengths)


def windowed(slices: Slices, window: int) -> Slices:
    """Restrict causal attention slices to a sliding window: a row attends to the last `window` rows, including itself.

    Rows are cut into blocks of `window` rows. A row attends to the rows of its own block up to itself, and to the rows
    of the previous block at later positions in the block.
    """
    assert (slices.kind == CAUSAL).all(), "only causal slices can have a sliding window"
    blocks: list[tuple[int, int, int, int, int, int]] = []
    for _, sample, query, length, _, _ in zip(*(column.tolist() for column in slices.columns)):
        for begin in range(0, length, window):
            size, at = min(window, length - begin), query + begin
            blocks.append((CAUSAL, sample, at, size, at, size))
            reach = min(size, window - 1)  # the last row of a full block attends to no row before the block
            if begin and reach:
                # Row i of the block attends to rows i + 1 to the last of the previous block: an anti-causal square
                # with its first rows, and all keys after that square.
                before = at - window + 1
                blocks.append((ANTI_CAUSAL, sample, at, reach, before, reach))
                if reach < window - 1:
                    blocks.append((FULL, sample, at, reach, before + reach, window - 1 - reach))
    columns = np.array(blocks, dtype=np.int64).reshape(-1, 6).T
    return Slices(*(np.ascontiguousarray(column) for column in columns))
