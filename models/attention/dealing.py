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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.attention.dealt.packing import pack
from models.attention.dealt.places import DealtPart, DealtPlaces, DealtWork
from models.attention.dealt.repair import exchange_less, level_rows, level_work

LIMIT, OF = 102, 100  # work of a place: at most LIMIT / OF of the mean
AIMS = (1010, 985)  # thousandths of the mean work that places are packed to, one try after the other
MANY = 8  # pieces of a place, from which on what fills a place may be heavier than the lightest: the lower aim first
UNCUT = 4000  # of a first try that leaves short pieces whole, where all are
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
    of_work = DealtWork(_whole(work, lengths), None if keys is None else np.asarray(keys, dtype=np.int64).tolist())
    pieces = np.arange(len(lengths))
    works = of_work.of_each(pieces, np.zeros_like(lengths), lengths).tolist()
    all_work = sum(works)
    limit = LIMIT * all_work // (OF * number)
    parts = [DealtPart(rows, its_work, piece, 0) for piece, (rows, its_work) in enumerate(zip(lengths.tolist(), works))]
    enough = _enough(parts, total // number, max(limit, 1))
    best: tuple[int, int, Deal] | None = None
    aims = AIMS if len(parts) < MANY * number else AIMS[::-1]
    for share in aims if enough else (UNCUT, *aims):
        places = DealtPlaces(number, total // number, limit, of_work)
        pack(places, parts, share * all_work // (1000 * number), cut=share != UNCUT)
        level_rows(places)
        level_work(places)
        exchange_less(places, enough)
        found = _in_runs(places, lengths)
        over = max(max(places.work) - limit, 0)
        exchanged = int(exchanged_rows(found, lengths, keys).sum())
        if best is None or (over, exchanged) < best[:2]:
            best = (over, exchanged, found)
        if not over and exchanged <= enough:
            break
    assert best is not None
    return best[2]


def _enough(parts: list[DealtPart], rows: int, limit: int) -> int:
    """The exchanged rows if every piece were on as few places as its rows and work ask for, and each of those but one
    received it as a whole."""
    return sum((max(-(-part.rows // rows), -(-part.work // limit)) - 1) * part.rows for part in parts)


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


def _whole(work: np.ndarray | None, lengths: np.ndarray) -> np.ndarray | None:
    """Work in whole numbers: fractions keep FRACTIONS bits where there is room."""
    if work is None or np.issubdtype(np.asarray(work).dtype, np.integer):
        return None if work is None else np.asarray(work, dtype=np.int64)
    most = math.frexp(float(work[int(lengths.max())]) * len(lengths))[1]
    return np.rint(np.ldexp(np.asarray(work, dtype=np.float64), min(FRACTIONS, 60 - most))).astype(np.int64)


def window_work(slides: Sequence[int], window: int | None, longest: int) -> np.ndarray | None:
    """Keys that the first rows of a piece attend to in all layers together, int64 [longest + 1]; `slides`: by layer,
    1 where a row attends to the last `window` rows alone, 0 where to all before it. Without a window None, which `deal`
    takes for the latter."""
    if window is None:
        return None
    keys, sliding = np.arange(longest + 1), sum(slides)
    return np.cumsum(sliding * np.minimum(keys, window) + (len(slides) - sliding) * keys)


# -- what was dealt ----------------------------------------------------------------------------------------------------


def _in_runs(places: DealtPlaces, lengths: np.ndarray) -> Deal:
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
