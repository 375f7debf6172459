"""What places hold while rows are dealt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class DealtPart(NamedTuple):
    """Rows of a piece that lie together, in one place."""

    rows: int
    work: int
    piece: int
    begin: int


class DealtWork:
    """The work of a piece's rows, in whole numbers.

    causal: what the first i rows of a piece take, int64 [longest + 1]; null: i(i + 1) / 2. keys: what each row of a
    piece takes, by piece; null: causal.
    """

    def __init__(self, causal: np.ndarray | None, keys: list[int] | None) -> None:
        self.causal, self.keys = causal, keys
        self.keys_of = None if keys is None else np.array(keys, dtype=np.int64)

    def of(self, piece: int, begin: int, end: int) -> int:
        if self.keys is not None:
            return self.keys[piece] * (end - begin)
        if self.causal is None:
            return (end * (end + 1) - begin * (begin + 1)) // 2
        return int(self.causal[end]) - int(self.causal[begin])

    def of_each(self, piece: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """`of` for arrays int64 [m]."""
        if self.keys_of is not None:
            return self.keys_of[piece] * (end - begin)
        if self.causal is None:
            return (end * (end + 1) - begin * (begin + 1)) // 2
        return self.causal[end] - self.causal[begin]

    def first_rows(self, low: np.ndarray, high: np.ndarray, rows: np.ndarray, work: np.ndarray) -> np.ndarray:
        """The first row of causal pieces, from low to high, from which on so many rows are so much work: [m] each."""
        if self.keys is None and self.causal is None:
            return np.clip(-((rows * (rows + 1) // 2 - work) // rows), low, high)
        while (low < high).any():
            middle = (low + high) // 2
            enough = self.of_each(middle, middle, middle + rows) >= work
            low, high = np.where(enough | (low >= high), low, middle + 1), np.where(enough, middle, high)
        return low


class DealtPlaces:
    """rows: of a place. left: the rows that each lacks; below 0, has too many. work: of each. parts: what may change
    places. fixed: parts of a piece of which a place holds several. limit: the work that a place may have."""

    def __init__(self, number: int, rows: int, limit: int, work: DealtWork) -> None:
        self.rows, self.limit = rows, limit
        self.left = [rows] * number
        self.work = [0] * number
        self.parts: list[list[DealtPart]] = [[] for _ in range(number)]
        self.fixed: list[list[DealtPart]] = [[] for _ in range(number)]
        self.keys = work.keys
        self.work_of, self.works_of, self.first_rows = work.of, work.of_each, work.first_rows

    def cut(self, piece: int, row: int) -> int:
        """The exchanged rows of what lies behind a row of a piece, in a place of its own."""
        return row if self.keys is None else self.keys[piece]

    def part(self, piece: int, begin: int, end: int) -> DealtPart:
        return DealtPart(end - begin, self.work_of(piece, begin, end), piece, begin)

    def add(self, place: int, part: DealtPart, *, fixed: bool = False) -> None:
        (self.fixed if fixed else self.parts)[place].append(part)
        self.left[place] -= part.rows
        self.work[place] += part.work

    def move(self, source: int, target: int, parts: Iterable[DealtPart]) -> None:
        for part in parts:
            self.parts[source].remove(part)
            self.left[source] += part.rows
            self.work[source] -= part.work
            self.add(target, part)

    def hold(self, place: int, parts: list[DealtPart]) -> None:
        """Let a place hold these parts alone."""
        times: dict[int, int] = {}
        for part in parts:
            times[part.piece] = times.get(part.piece, 0) + 1
        self.parts[place] = [part for part in parts if times[part.piece] == 1]
        self.fixed[place] = [part for part in parts if times[part.piece] > 1]
        self.left[place] = self.rows - sum(part.rows for part in parts)
        self.work[place] = sum(part.work for part in parts)

    def fits(self, one: int, other: int, moved: int) -> bool:
        """Whether so much work may go from one place to the other: no excess over the limit grows."""
        before = max(self.work[one], self.work[other], self.limit)
        return self.work[one] - moved <= before and self.work[other] + moved <= before
