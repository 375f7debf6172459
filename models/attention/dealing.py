"""Which rows of a micro-batch each place of context parallelism holds: equal rows, level work, few exchanged rows.

Documents' pieces lie one after the other in a micro-batch's rows. A piece whose rows or work are more than a place may
have is long: its tails, with its head where nothing lighter is left, go to places of their own until the rest is short.
What is short stays whole: the longest first, each to the place that will have the least work (Graham's rule); pieces
change places until rows are equal, and where no pieces do, heads of pieces are cut off, which costs least. A row's work
is the keys that it attends to.

Everything is whole numbers in a fixed order, so that all ranks find the same. numpy alone: the loader's thread calls
it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.attention.dealing_repair import Part, Places, level_rows, level_work

LIMIT, OF = 102, 100  # work of a place: at most LIMIT / OF of the mean
NEGLIGIBLE = 500  # a part of 1 / NEGLIGIBLE of a place's work goes where rows are missing, whatever the work
FRACTIONS = 20  # bits of fractions of work that count


@dataclass(frozen=True, eq=False)
class Deal:
    """Which rows of a micro-batch each place holds, in runs. Rows are counted through the micro-batch: sample x s + row
    in the sample.

    place: int64 [m], ascending. first: int64 [m], the first row of each run, ascending within a place; neighbouring
    runs of one place are one run. length: int64 [m].
    """

    num_places: int
    place: np.ndarray
    first: np.ndarray
    length: np.ndarray

    def rows(self, place: int) -> np.ndarray:
        """The rows of a place: int64 [n / num_places], ascending."""
        begin, end = np.searchsorted(self.place, [place, place + 1])
        first, length = self.first[begin:end], self.length[begin:end]
        shift = np.repeat(first - (np.cumsum(length) - length), length)
        return shift + np.arange(len(shift))


def deal(
    lengths: np.ndarray, num_places: int, *, work: np.ndarray | None = None, keys: np.ndarray | None = None
) -> Deal:
    """Deal the rows of pieces to places: equal rows, work of at most 1.02 of the mean where rows allow it, and few
    exchanged rows.

    lengths: rows of each piece, int64 [pieces], at least 1; their sum n must be divisible by num_places. A row attends
    to its piece up to itself: work[i] is what the first i rows of a piece take, [longest + 1], work[0] = 0 (null:
    i(i + 1) / 2). With keys, int64 [pieces], each row of piece p attends to the piece's first keys[p] rows. A pure
    function. Raises ValueError for lengths, places or keys that do not go together.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    _check(lengths, num_places, work, keys)
    number, total = num_places, int(lengths.sum())
    work_of, works = _work_functions(lengths, work, keys)
    all_work = sum(works)

    def cut(piece: int, row: int) -> int:
        return row if keys is None else int(keys[piece])

    limit = LIMIT * all_work // (OF * number)
    places = Places(number, total // number, limit, work_of, cut)
    short = _cut_long(places, lengths.tolist(), works)
    _pack(places, short)
    level_rows(places)
    level_work(places)
    return _in_runs(places, lengths)


def _check(lengths: np.ndarray, num_places: int, work: np.ndarray | None, keys: np.ndarray | None) -> None:
    total = int(lengths.sum())
    if num_places < 1 or total % max(num_places, 1):
        raise ValueError(f"{total} rows cannot be dealt equally to {num_places} places: use a divisor of the rows")
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("every piece has at least one row")
    if work is not None and len(work) <= lengths.max():
        raise ValueError(f"work of {len(work) - 1} rows is given, the longest piece has {lengths.max()}")
    if keys is not None and (len(keys) != len(lengths) or np.any((keys < 1) | (keys > lengths))):
        raise ValueError("keys takes 1 to the piece's rows for each piece")


def _work_functions(
    lengths: np.ndarray, work: np.ndarray | None, keys: np.ndarray | None
) -> tuple[Callable[[int, int, int], int], list[int]]:
    """The work of a piece's rows from a first to behind a last, in whole numbers, and of every piece."""
    if keys is not None:
        by_piece = np.asarray(keys, dtype=np.int64).tolist()
        return (lambda piece, begin, end: by_piece[piece] * (end - begin)), (lengths * keys).tolist()
    if work is None:
        of_pieces = (lengths * (lengths + 1) // 2).tolist()
        return (lambda piece, begin, end: (end * (end + 1) - begin * (begin + 1)) // 2), of_pieces
    if np.issubdtype(np.asarray(work).dtype, np.integer):
        whole = np.asarray(work, dtype=np.int64)
    else:
        most = math.frexp(float(work[int(lengths.max())]) * len(lengths))[1]
        whole = np.rint(np.ldexp(np.asarray(work, dtype=np.float64), min(FRACTIONS, 60 - most))).astype(np.int64)
    return (lambda piece, begin, end: int(whole[end]) - int(whole[begin])), whole[lengths].tolist()


# -- long pieces -------------------------------------------------------------------------------------------------------


def _cut_long(places: Places, lengths: list[int], works: list[int]) -> list[Part]:
    """Cut tails, with heads, off the pieces that are too much for a place, one to each empty place, until the rest is
    not. Returns what is not placed."""
    rows, limit = places.left[0], places.limit
    pieces = range(len(lengths))
    is_long = [length > rows or work > limit for length, work in zip(lengths, works)]
    short = [Part(lengths[piece], works[piece], piece, 0) for piece in pieces if not is_long[piece]]
    filler = _Filler(short)
    empty = 0
    for piece in sorted((piece for piece in pieces if is_long[piece]), key=lambda piece: (-works[piece], piece)):
        begin, end = 0, lengths[piece]
        while empty < len(places.left) and (end - begin > rows or places.work_of(piece, begin, end) > limit):
            tail, head = _tail(places, filler, piece, begin, end)
            places.add(empty, places.part(piece, end - tail, end), fixed=True)
            if head:
                places.add(empty, places.part(piece, begin, begin + head), fixed=True)
            filler.used += rows - tail - head
            begin, end = begin + head, end - tail
            empty += 1
        if begin < end:
            short.append(places.part(piece, begin, end))
    return short


class _Filler:
    """The lightest of the whole pieces, which fill the places of long pieces."""

    def __init__(self, short: list[Part]) -> None:
        self.rows, self.work = [0], [0]
        for part in sorted(short, key=lambda part: (part.work // part.rows, part)):
            self.rows.append(self.rows[-1] + part.rows)
            self.work.append(self.work[-1] + part.work)
        self.used = 0

    def left(self) -> int:
        return self.rows[-1] - self.used

    def of(self, rows: int) -> int:
        """The work of the next rows."""
        return self._until(self.used + rows) - self._until(self.used)

    def _until(self, rows: int) -> int:
        i = bisect_right(self.rows, rows) - 1
        if i + 1 == len(self.rows):
            return self.work[-1]
        share = rows - self.rows[i]
        return self.work[i] + (self.work[i + 1] - self.work[i]) * share // (self.rows[i + 1] - self.rows[i])


def _tail(places: Places, filler: _Filler, piece: int, begin: int, end: int) -> tuple[int, int]:
    """Rows of the longest tail that a place takes, and of the head that it takes beside: what else fills it considered,
    its work is within the limit."""
    rows, work_of = places.left[-1], places.work_of
    length, work = end - begin, work_of(piece, begin, end)
    needed = max(-(-length // rows), -(-work // max(places.limit, 1)))
    others = max((needed - 1) * rows, length - rows)

    def head(tail: int) -> int:
        return min(max(0, rows - tail - filler.left(), length - tail - others), rows - tail)

    low, high = 1, min(rows, length - 1)
    while low < high:
        tail = (low + high + 1) // 2
        beside = head(tail)
        found = work_of(piece, end - tail, end) + work_of(piece, begin, begin + beside)
        if found + filler.of(rows - tail - beside) <= places.limit:
            low = tail
        else:
            high = tail - 1
    return low, min(head(low), length - low)


# -- short pieces ------------------------------------------------------------------------------------------------------


def _pack(places: Places, parts: list[Part]) -> None:
    """The longest first, each whole to the place that will have the least work if the rest fills it evenly; those that
    fit nowhere make a place's rows too many."""
    parts = sorted(parts, key=lambda part: (-part.work, -part.rows, part.piece, part.begin))
    pool_rows, pool_work = sum(part.rows for part in parts), sum(part.work for part in parts)
    number, left, work = len(places.left), places.left, places.work
    negligible = places.limit // NEGLIGIBLE
    homeless = []
    heap: list[tuple[int, int]] = []
    by_rows = False
    for index, part in enumerate(parts):
        if not by_rows and (index % number == 0 or part.work <= negligible):
            by_rows = part.work <= negligible
            if by_rows:
                heap = [(-left[place], place) for place in range(number)]
            else:
                heap = [(work[place] + left[place] * pool_work // pool_rows, place) for place in range(number)]
            heapq.heapify(heap)
        aside = []
        while heap and left[heap[0][1]] < part.rows:
            aside.append(heapq.heappop(heap))
            if by_rows:
                break
        pool_rows, pool_work = pool_rows - part.rows, pool_work - part.work
        if heap and left[heap[0][1]] >= part.rows:
            place = heap[0][1]
            places.add(place, part)
            key = -left[place] if by_rows else work[place] + left[place] * pool_work // max(pool_rows, 1)
            heapq.heapreplace(heap, (key, place))
        else:
            homeless.append(part)
        for entry in aside:
            heapq.heappush(heap, entry)
    for part in homeless:
        places.add(max(range(number), key=lambda place: (left[place], -place)), part)


# -- what was dealt ----------------------------------------------------------------------------------------------------


def _in_runs(places: Places, lengths: np.ndarray) -> Deal:
    begins = (np.cumsum(lengths) - lengths).tolist()
    place: list[int] = []
    first: list[int] = []
    length: list[int] = []
    for number, (parts, fixed) in enumerate(zip(places.parts, places.fixed)):
        end = -1
        for begin, rows in sorted((begins[part.piece] + part.begin, part.rows) for part in (*parts, *fixed)):
            if begin == end:
                length[-1] += rows
            else:
                place.append(number)
                first.append(begin)
                length.append(rows)
            end = begin + rows
    return Deal(len(places.left), *(np.array(each, dtype=np.int64) for each in (place, first, length)))


def _by_piece(found: Deal, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The runs cut where pieces end, int64 [parts] each: place, piece, first row and end within the piece."""
    ends = np.cumsum(lengths)
    last = found.first + found.length
    pieces = np.searchsorted(ends, found.first, side="right")
    counts = np.searchsorted(ends, last, side="left") - pieces + 1
    run = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts) + pieces[run]
    begin = ends[piece] - lengths[piece]
    first, end = np.maximum(found.first[run], begin) - begin, np.minimum(last[run], ends[piece]) - begin
    return found.place[run], piece, first, end


def exchanged_rows(found: Deal, lengths: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
    """Key rows int64 [num_places] that rows of a place attend to and that it does not hold."""
    lengths = np.asarray(lengths, dtype=np.int64)
    place, piece, first, end = _by_piece(found, lengths)
    order = np.lexsort((first, piece, place))
    place, piece, first, end = place[order], piece[order], first[order], end[order]
    is_last = np.append((place[1:] != place[:-1]) | (piece[1:] != piece[:-1]), True)
    result = np.zeros(found.num_places, dtype=np.int64)
    needed = end if keys is None else np.asarray(keys, dtype=np.int64)[piece]
    np.add.at(result, place[is_last], needed[is_last])
    held = end - first if keys is None else np.clip(np.minimum(end, needed) - first, 0, None)
    np.subtract.at(result, place, held)
    return result


def work_of(
    found: Deal, lengths: np.ndarray, work: np.ndarray | None = None, keys: np.ndarray | None = None
) -> np.ndarray:
    """The work [num_places] of each place's rows, as `deal` counts it."""
    lengths = np.asarray(lengths, dtype=np.int64)
    place, piece, first, end = _by_piece(found, lengths)
    if keys is not None:
        each = np.asarray(keys, dtype=np.int64)[piece] * (end - first)
    elif work is None:
        each = (end * (end + 1) - first * (first + 1)) // 2
    else:
        each = np.asarray(work)[end] - np.asarray(work)[first]
    result = np.zeros(found.num_places, dtype=each.dtype)
    np.add.at(result, place, each)
    return result
