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
AIMS = (1010, 1018, 995)  # thousandths of the mean work that places are packed to, one try after the other
NEGLIGIBLE = 500  # where the rest is 1 / NEGLIGIBLE of the work, parts go where rows are missing, whatever their work
SPARE = 32  # a place that lacks less than 1 / SPARE of its work beside the lightest rows counts on them
CRUMB = 16  # a piece of 1 / CRUMB of a place's rows is not cut before pieces have changed places
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
    parts = [Part(rows, its_work, piece, 0) for piece, (rows, its_work) in enumerate(zip(lengths.tolist(), works))]
    best = None
    for share in AIMS:
        places = Places(number, total // number, limit, work_of, cut)
        _pack(places, parts, share * all_work // (OF * 10 * number))
        level_rows(places)
        level_work(places)
        found = _in_runs(places, lengths)
        exchanged = int(exchanged_rows(found, lengths, keys).sum())
        over = max(max(places.work) - limit, 0)
        if best is None or (over, exchanged) < best[:2]:
            best = (over, exchanged, found)
        if not over and exchanged <= 0:
            break
    assert best is not None
    return best[2]


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


# -- packing -----------------------------------------------------------------------------------------------------------


class _Packing:
    """The pool of parts that are not placed, the heaviest first, and what the lightest of them take.

    Places that have their work already count on the lightest rows of the pool to be filled.
    """

    def __init__(self, places: Places, parts: list[Part], cap: int) -> None:
        self.places, self.cap = places, cap
        self.lengths = [part.rows for part in parts]
        self.rest = [(-part.work, -part.rows, part.piece, part.begin) for part in parts]
        heapq.heapify(self.rest)
        self.pool_rows, self.pool_work = sum(part.rows for part in parts), sum(part.work for part in parts)
        self.rows, self.work = [0], [0]
        short = [part for part in parts if not self.is_long(part)]
        for part in sorted(short, key=lambda part: (part.work // part.rows, part)):
            self.rows.append(self.rows[-1] + part.rows)
            self.work.append(self.work[-1] + part.work)
        self.short_rows = self.rows[-1]  # of the pool
        self.counting: set[int] = set()  # places
        self.counted = 0  # rows that they lack

    def is_long(self, part: Part) -> bool:
        return part.rows > self.places.rows or part.work > self.cap

    def is_whole_and_short(self, part: Part) -> bool:
        return part.rows == self.lengths[part.piece] and not self.is_long(part)

    def next(self) -> Part:
        minus_work, minus_rows, piece, begin = heapq.heappop(self.rest)
        part = Part(-minus_rows, -minus_work, piece, begin)
        self.pool_rows, self.pool_work = self.pool_rows - part.rows, self.pool_work - part.work
        if self.is_whole_and_short(part):
            self.short_rows -= part.rows
        return part

    def back(self, part: Part) -> None:
        heapq.heappush(self.rest, (-part.work, -part.rows, part.piece, part.begin))
        self.pool_rows, self.pool_work = self.pool_rows + part.rows, self.pool_work + part.work

    def expected(self, place: int) -> int:
        """The work of a place that an even share of the pool fills; those that count on the lightest come last."""
        left, work = self.places.left[place], self.places.work[place]
        if place in self.counting:
            return 2 * self.cap + work + left * self.cap // (SPARE * self.places.rows)
        rows = self.pool_rows - self.counted
        return work + left * max(self.pool_work - self._until(self.counted), 0) // rows if rows > 0 else work

    def before(self, place: int) -> int:
        """The lightest rows that are for others."""
        return self.counted - (self.places.left[place] if place in self.counting else 0)

    def lightest(self, place: int, rows: int) -> int:
        """The work of so many rows, the lightest that are not for others."""
        before = self.before(place)
        return self._until(before + rows) - self._until(before)

    def _until(self, rows: int) -> int:
        i = bisect_right(self.rows, rows) - 1
        share = rows - self.rows[i]
        if i + 1 == len(self.rows):
            return self.work[-1] + share * self.cap // self.places.rows
        return self.work[i] + (self.work[i + 1] - self.work[i]) * share // (self.rows[i + 1] - self.rows[i])

    def put(self, place: int, part: Part, *, fixed: bool = False) -> None:
        if place in self.counting:
            self.counted -= part.rows
        self.places.add(place, part, fixed=fixed)

    def settle(self, place: int) -> None:
        """Whether a place counts on the lightest rows from now on."""
        left = self.places.left[place]
        if place not in self.counting and 0 < left <= self.short_rows - self.counted:
            spare = self.cap - self.places.work[place] - self.lightest(place, left)
            if spare < self.cap // SPARE:
                self.counting.add(place)
                self.counted += left

    def fits(self, place: int, part: Part) -> bool:
        beside = self.places.left[place] - part.rows
        if beside < 0:
            return False
        work = self.places.work[place] + part.work
        return work + self.lightest(place, beside) <= self.cap

    def cut(self, place: int, part: Part) -> tuple[int, int]:
        """Rows of the longest tail that a place takes, and of the head that it takes beside, where nothing lighter
        fills it."""
        work_of, piece, begin, end = self.places.work_of, part.piece, part.begin, part.begin + part.rows
        room, before, whole = self.places.left[place], self.places.work[place], self.places.rows
        needed = max(-(-part.rows // whole), -(-part.work // max(self.cap, 1)))
        others = max((needed - 1) * whole, part.rows - room)
        short = max(self.short_rows - self.before(place), 0)

        def head(tail: int) -> int:
            return max(0, min(max(room - tail - short, part.rows - tail - others), room - tail, part.rows - tail))

        low, high = 0, min(room, part.rows)
        while low < high:
            tail = (low + high + 1) // 2
            beside = head(tail)
            found = before + work_of(piece, end - tail, end) + work_of(piece, begin, begin + beside)
            if found + self.lightest(place, room - tail - beside) <= self.cap:
                low = tail
            else:
                high = tail - 1
        return (low, head(low)) if low else (high or min(room, part.rows), 0)


def _pack(places: Places, parts: list[Part], cap: int) -> None:
    """The heaviest first, to the place that will have the least work if the rest fills it evenly; tails, where the
    whole is too much, and the rest in its turn. What fits nowhere and is short makes a place's rows too many."""
    number, left = len(places.left), places.left
    packing = _Packing(places, parts, cap)
    negligible, crumb = packing.pool_work // NEGLIGIBLE, places.rows // CRUMB
    order: list[tuple[int, int]] = []  # places, the one to be filled next first
    waiting = [(-places.rows, place) for place in range(number)]  # those that lack fewer rows than a part has
    homeless = []
    turn, by_rows = 0, False
    while packing.rest:
        if turn <= 0 or (not by_rows and packing.pool_work <= negligible):
            by_rows, turn = packing.pool_work <= negligible, 2 * number
            order = [(-left[place] if by_rows else packing.expected(place), place) for _, place in order]
            heapq.heapify(order)
        turn -= 1
        part = packing.next()
        while waiting and left[waiting[0][1]] >= part.rows:
            place = heapq.heappop(waiting)[1]
            heapq.heappush(order, (-left[place] if by_rows else packing.expected(place), place))
        fitting = part.rows <= places.rows
        while fitting and order and left[order[0][1]] < part.rows:
            place = heapq.heappop(order)[1]
            heapq.heappush(waiting, (-left[place], place))
        fits = fitting and bool(order) and (by_rows or part.rows <= crumb or packing.fits(order[0][1], part))
        if not fits and (by_rows or part.rows <= crumb):
            homeless.append(part)
            continue
        if fits:
            place = heapq.heappop(order)[1]
        else:
            place = min((packing.expected(place), place) for place in range(number) if left[place] > 0)[1]
            order = [entry for entry in order if entry[1] != place]
            waiting = [entry for entry in waiting if entry[1] != place]
            heapq.heapify(order)
            heapq.heapify(waiting)
        tail, head = (part.rows, 0) if fits else packing.cut(place, part)
        if tail + head >= part.rows:
            packing.put(place, part)
        else:
            end = part.begin + part.rows
            packing.put(place, places.part(part.piece, end - tail, end), fixed=True)
            if head:
                packing.put(place, places.part(part.piece, part.begin, part.begin + head), fixed=True)
            packing.back(places.part(part.piece, part.begin + head, end - tail))
        packing.settle(place)
        if left[place]:
            heapq.heappush(order, (-left[place] if by_rows else packing.expected(place), place))
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
