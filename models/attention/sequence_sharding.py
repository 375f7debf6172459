"""Sequence sharding: chooses the rows of a micro-batch that each rank of context parallelism holds, with equal numbers
of rows, balanced attention work and few exchanged rows.

The segments of documents follow each other in a micro-batch's rows. A segment with more rows or more work than a rank
may have is long: its last rows (and its first rows, if nothing lighter fills the rank) are placed on separate ranks
until the remainder is short. Short segments stay whole: the longest are placed first, each on the rank that will have
the least work (Graham's rule). Then shard_balancing.py evens out the ranks. The work of a row is the number of keys
that it attends to.

A cp_rank is a rank of context parallelism, or a group of `context_heads` ranks that exchange heads and so share their
rows.

All arithmetic is in integers and in a fixed order, so that every rank finds the same sharding. Only numpy is imported,
because the data loader's thread calls this module.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from models.attention.shard_balancing import RowSpan, RowWork, ShardLedger, balance_work, equalize_rows, reduce_exchange

LIMIT, OF = 102, 100  # work of a rank: at most LIMIT / OF of the mean
AIMS = (1010, 985)  # thousandths of the mean work that ranks are packed to: one attempt each, in this order
# From this mean number of segments per rank on, the lower aim is tried first: the segments that fill a rank may then be
# heavier than the lightest ones.
MANY_SEGMENTS = 8
UNCUT = 4000  # aim of a first attempt without cuts, which is so high that every segment is short
FRACTIONS = 20  # bits that are kept of fractional work
# When the unassigned spans have at most 1 / NEGLIGIBLE of all work, they are assigned to ranks that lack rows, whatever
# their work.
NEGLIGIBLE = 500
# A rank reserves the lightest rows when they would leave less than 1 / SPARE of its work unused.
SPARE = 32
CRUMB = 16  # a segment of at most 1 / CRUMB of a rank's rows is not cut while ranks are packed


@dataclass(frozen=True, eq=False)
class SequenceSharding:
    """Assignment of a micro-batch's rows to ranks, as runs of rows. Rows are numbered through the micro-batch: row i of
    sample k is row k * s + i.

    cp_rank: int64 [m], the rank of each run, ascending. first: int64 [m], the first row of each run, ascending within a
    rank. length: int64 [m], the number of rows per run. Adjacent runs of one rank are merged.
    """

    cp_size: int
    cp_rank: np.ndarray
    first: np.ndarray
    length: np.ndarray

    def sequence_rows(self, cp_rank: int) -> np.ndarray:
        """Return the indices of the rows that a rank holds: int64 [rows per rank], ascending."""
        begin, end = np.searchsorted(self.cp_rank, [cp_rank, cp_rank + 1])
        first, length = self.first[begin:end], self.length[begin:end]
        shift = np.repeat(first - (np.cumsum(length) - length), length)
        return shift + np.arange(len(shift))


def shard_sequence(
    lengths: np.ndarray, cp_size: int, *, work: np.ndarray | None = None, keys: np.ndarray | None = None
) -> SequenceSharding:
    """Shard the rows of segments over ranks: equal numbers of rows per rank, at most 1.02 times the mean work where the
    rows allow it, and few exchanged rows. A pure function.

    lengths: rows per segment, int64 [segments], at least 1 each; cp_size must divide their sum n. work: in causal
    attention, work[i] is the work of the first i rows of a segment, [longest + 1], work[0] = 0 (None: i(i + 1) / 2).
    keys: int64 [segments], each row of segment p attends to the segment's first keys[p] rows (None: causal attention).

    Raises ValueError if rows cannot be divided equally, a segment is empty, or work or keys do not fit the lengths.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    total = int(lengths.sum())
    if cp_size < 1 or total % max(cp_size, 1):
        raise ValueError(
            f"{total} rows cannot be divided equally among {cp_size} ranks: use a number of ranks that divides the rows"
        )
    if not len(lengths) or lengths.min() < 1:
        raise ValueError(f"lengths ({lengths[:5]}...) must have at least one segment, and each at least one row")
    if work is not None and len(work) <= lengths.max():
        raise ValueError(
            f"work has {len(work)} numbers, but needs {lengths.max() + 1}, one more than the longest segment has rows"
        )
    if keys is not None and (len(keys) != len(lengths) or np.any((keys < 1) | (keys > lengths))):
        raise ValueError(f"keys ({keys[:5]}...) must each be from 1 to its segment's rows ({lengths[:5]}...)")
    of_work = RowWork(_integer_work(work, lengths), None if keys is None else np.asarray(keys, dtype=np.int64).tolist())
    works = of_work.of_each(np.arange(len(lengths)), np.zeros_like(lengths), lengths).tolist()
    all_work = sum(works)
    limit = LIMIT * all_work // (OF * cp_size)
    spans = [
        RowSpan(num_rows, its_work, segment, 0)
        for segment, (num_rows, its_work) in enumerate(zip(lengths.tolist(), works))
    ]
    # The exchanged rows if every segment were on as few ranks as its rows and work require, and each of these but one
    # received the whole segment.
    enough = sum(
        (max(-(-span.num_rows // (total // cp_size)), -(-span.work // max(limit, 1))) - 1) * span.num_rows
        for span in spans
    )
    best: tuple[int, int, SequenceSharding] | None = None
    aims = AIMS if len(spans) < MANY_SEGMENTS * cp_size else AIMS[::-1]
    for share in aims if enough else (UNCUT, *aims):
        ledger = ShardLedger(cp_size, total // cp_size, limit, of_work)
        _pack(ledger, spans, share * all_work // (1000 * cp_size), cut=share != UNCUT)
        equalize_rows(ledger)
        balance_work(ledger)
        reduce_exchange(ledger, enough)
        found = _in_runs(ledger, lengths)
        over = max(max(ledger.work) - limit, 0)
        exchanged = int(exchanged_rows(found, lengths, keys).sum())
        if best is None or (over, exchanged) < best[:2]:
            best = (over, exchanged, found)
        if not over and exchanged <= enough:
            break
    assert best is not None
    return best[2]


def _integer_work(work: np.ndarray | None, lengths: np.ndarray) -> np.ndarray | None:
    """Convert attention work to int64. Fractional work is multiplied by 2 ** FRACTIONS first, or by a lower power of 2
    if sums would overflow."""
    if work is None or np.issubdtype(np.asarray(work).dtype, np.integer):
        return None if work is None else np.asarray(work, dtype=np.int64)
    most = math.frexp(float(work[int(lengths.max())]) * len(lengths))[1]
    return np.rint(np.ldexp(np.asarray(work, dtype=np.float64), min(FRACTIONS, 60 - most))).astype(np.int64)


def window_work(slides: Sequence[int], window: int | None, longest: int) -> np.ndarray | None:
    """Return the attention work of the first i rows of a segment: the number of query-key pairs, summed over all
    layers, int64 [longest + 1]; None if there is no window.

    slides: one entry per layer, 1 if a row attends to the last `window` rows only, 0 if it attends to all rows before
    it.
    """
    if window is None:
        return None
    keys, sliding = np.arange(longest + 1), sum(slides)
    return np.cumsum(sliding * np.minimum(keys, window) + (len(slides) - sliding) * keys)


# -- first assignment of segments to ranks ----------------------------------------------------------------------------


class _Packing:
    """Queue of the spans (runs of rows) that are not assigned to a rank yet, heaviest first. It also knows the
    cumulative work of the lightest of their rows.

    Ranks that already have enough work reserve the lightest unassigned rows to reach their number of rows.
    """

    def __init__(self, ledger: ShardLedger, spans: list[RowSpan], cap: int) -> None:
        self.ledger, self.cap = ledger, cap
        self.lengths = [span.num_rows for span in spans]
        self.heap = [(-span.work, -span.num_rows, span.segment, span.begin) for span in spans]
        heapq.heapify(self.heap)
        self.pool_rows, self.pool_work = sum(span.num_rows for span in spans), sum(span.work for span in spans)
        self.cumulative_rows, self.cumulative_work = [0], [0]
        short = [span for span in spans if not self.is_long(span)]
        for span in sorted(short, key=lambda span: (span.work // span.num_rows, span)):
            self.cumulative_rows.append(self.cumulative_rows[-1] + span.num_rows)
            self.cumulative_work.append(self.cumulative_work[-1] + span.work)
        self.short_rows = self.cumulative_rows[-1]  # of the pool
        self.counting: set[int] = set()  # ranks that have reserved the lightest rows
        self.counted = 0  # rows that these lack

    def is_long(self, span: RowSpan) -> bool:
        return span.num_rows > self.ledger.rows_per_rank or span.work > self.cap

    def next(self) -> RowSpan:
        minus_work, minus_rows, segment, begin = heapq.heappop(self.heap)
        span = RowSpan(-minus_rows, -minus_work, segment, begin)
        self.pool_rows, self.pool_work = self.pool_rows - span.num_rows, self.pool_work - span.work
        if span.num_rows == self.lengths[span.segment] and not self.is_long(span):
            self.short_rows -= span.num_rows
        return span

    def put_back(self, span: RowSpan) -> None:
        heapq.heappush(self.heap, (-span.work, -span.num_rows, span.segment, span.begin))
        self.pool_rows, self.pool_work = self.pool_rows + span.num_rows, self.pool_work + span.work

    def expected(self, wanted: Iterable[int]) -> list[tuple[int, int]]:
        """Return (expected work, rank) for each rank in `wanted`, as keys to sort ranks by. The work assumes that the
        unassigned rows are spread evenly over all ranks; ranks for which rows are reserved sort last."""
        light = self._until(self.counted)
        num_rows, work = max(self.pool_rows - self.counted, 1), max(self.pool_work - light, 0)
        counted, left, now, last = max(self.counted, 1), self.ledger.missing, self.ledger.work, 2 * self.cap
        return [
            (now[cp_rank] + left[cp_rank] * work // num_rows, cp_rank)
            if cp_rank not in self.counting
            else (last + now[cp_rank] + left[cp_rank] * light // counted, cp_rank)
            for cp_rank in wanted
        ]

    def before(self, cp_rank: int) -> int:
        """Return the number of the lightest unassigned rows that other ranks have reserved."""
        return self.counted - (self.ledger.missing[cp_rank] if cp_rank in self.counting else 0)

    def lightest(self, cp_rank: int, num_rows: int) -> int:
        """Return the work of the `num_rows` lightest unassigned rows that no other rank has reserved."""
        before = self.before(cp_rank)
        return self._until(before + num_rows) - self._until(before)

    def _until(self, num_rows: int) -> int:
        row_sums, sums = self.cumulative_rows, self.cumulative_work
        i = bisect_right(row_sums, num_rows) - 1
        share = num_rows - row_sums[i]
        if i + 1 == len(row_sums):
            return sums[-1] + share * self.cap // self.ledger.rows_per_rank
        return sums[i] + (sums[i + 1] - sums[i]) * share // (row_sums[i + 1] - row_sums[i])

    def put(self, cp_rank: int, span: RowSpan, *, fixed: bool = False) -> None:
        if cp_rank in self.counting:
            self.counted -= span.num_rows
        self.ledger.add(cp_rank, span, fixed=fixed)

    def reserve_lightest(self, cp_rank: int) -> None:
        """Reserve the lightest unassigned rows for a rank if they complete its number of rows and use nearly all work
        that it may have."""
        left = self.ledger.missing[cp_rank]
        if cp_rank not in self.counting and 0 < left <= self.short_rows - self.counted:
            spare = self.cap - self.ledger.work[cp_rank] - self.lightest(cp_rank, left)
            if spare < self.cap // SPARE:
                self.counting.add(cp_rank)
                self.counted += left

    def fits(self, cp_rank: int, span: RowSpan) -> bool:
        beside = self.ledger.missing[cp_rank] - span.num_rows
        if beside < 0:
            return False
        work = self.ledger.work[cp_rank] + span.work
        return work + self.lightest(cp_rank, beside) <= self.cap

    def cut(self, cp_rank: int, span: RowSpan) -> tuple[int, int]:
        """Return how many of a span's last rows a rank takes, and how many of its first rows. First rows are taken only
        if there are too few lighter rows to fill the rank."""
        work_of, segment, begin, end = self.ledger.work_of, span.segment, span.begin, span.begin + span.num_rows
        capacity, before, whole = self.ledger.missing[cp_rank], self.ledger.work[cp_rank], self.ledger.rows_per_rank
        needed = max(-(-span.num_rows // whole), -(-span.work // max(self.cap, 1)))
        others = max((needed - 1) * whole, span.num_rows - capacity)
        short = max(self.short_rows - self.before(cp_rank), 0)

        def head(tail: int) -> int:
            least = max(capacity - tail - short, span.num_rows - tail - others)
            return max(0, min(least, capacity - tail, span.num_rows - tail))

        low, high = 0, min(capacity, span.num_rows)
        while low < high:
            tail = (low + high + 1) // 2
            beside = head(tail)
            found = before + work_of(segment, end - tail, end) + work_of(segment, begin, begin + beside)
            if found + self.lightest(cp_rank, capacity - tail - beside) <= self.cap:
                low = tail
            else:
                high = tail - 1
        return (low, head(low)) if low else (high or min(capacity, span.num_rows), 0)


def _pack(ledger: ShardLedger, spans: list[RowSpan], cap: int, *, cut: bool) -> None:
    """Assign every span to a rank: the heaviest span first, to the rank with the least expected work. A span that
    exceeds the rank's capacity is cut: its last rows are assigned now and the remainder later. A short span that fits
    on no rank is assigned anyway, and that rank then has too many rows.

    cap: the work up to which a rank is packed. cut: False to keep short segments whole.
    """
    cp_size, left = len(ledger.missing), ledger.missing
    packing = _Packing(ledger, spans, cap)
    negligible, crumb = packing.pool_work // NEGLIGIBLE, ledger.rows_per_rank // (CRUMB if cut else 1)
    order: list[tuple[int, int]] = []  # heap of ranks, the one to fill next first
    # Ranks that lack fewer rows than the span has.
    waiting = [(-ledger.rows_per_rank, cp_rank) for cp_rank in range(cp_size)]
    unplaced = []
    turn, by_rows = 0, False
    while packing.heap:
        if turn <= 0 or (not by_rows and packing.pool_work <= negligible):
            by_rows, turn = packing.pool_work <= negligible, 2 * cp_size
            kept = [cp_rank for _, cp_rank in order]
            order = [(-left[cp_rank], cp_rank) for cp_rank in kept] if by_rows else packing.expected(kept)
            heapq.heapify(order)
        turn -= 1
        span = packing.next()
        while waiting and left[waiting[0][1]] >= span.num_rows:
            cp_rank = heapq.heappop(waiting)[1]
            heapq.heappush(order, (-left[cp_rank], cp_rank) if by_rows else packing.expected((cp_rank,))[0])
        fitting = span.num_rows <= ledger.rows_per_rank
        while fitting and order and left[order[0][1]] < span.num_rows:
            cp_rank = heapq.heappop(order)[1]
            heapq.heappush(waiting, (-left[cp_rank], cp_rank))
        fits = fitting and bool(order) and (by_rows or span.num_rows <= crumb or packing.fits(order[0][1], span))
        if not fits and (by_rows or span.num_rows <= crumb):
            unplaced.append(span)
            continue
        if fits:
            cp_rank = heapq.heappop(order)[1]
        else:
            cp_rank = min(packing.expected([cp_rank for cp_rank in range(cp_size) if left[cp_rank] > 0]))[1]
            order = [entry for entry in order if entry[1] != cp_rank]
            waiting = [entry for entry in waiting if entry[1] != cp_rank]
            heapq.heapify(order)
            heapq.heapify(waiting)
        tail, head = (span.num_rows, 0) if fits else packing.cut(cp_rank, span)
        if tail + head >= span.num_rows:
            packing.put(cp_rank, span)
        else:
            end = span.begin + span.num_rows
            packing.put(cp_rank, ledger.span(span.segment, end - tail, end), fixed=True)
            if head:
                packing.put(cp_rank, ledger.span(span.segment, span.begin, span.begin + head), fixed=True)
            packing.put_back(ledger.span(span.segment, span.begin + head, end - tail))
        packing.reserve_lightest(cp_rank)
        if left[cp_rank]:
            heapq.heappush(order, (-left[cp_rank], cp_rank) if by_rows else packing.expected((cp_rank,))[0])
    for span in unplaced:
        ledger.add(max(range(cp_size), key=lambda cp_rank: (left[cp_rank], -cp_rank)), span)


# -- results -----------------------------------------------------------------------------------------------------------


def _in_runs(ledger: ShardLedger, lengths: np.ndarray) -> SequenceSharding:
    begins = (np.cumsum(lengths) - lengths).tolist()
    runs: list[list[int]] = []  # rank, first row and length
    for cp_rank, (spans, fixed) in enumerate(zip(ledger.spans, ledger.fixed)):
        end = -1
        for begin, num_rows in sorted((begins[span.segment] + span.begin, span.num_rows) for span in (*spans, *fixed)):
            if begin == end:
                runs[-1][2] += num_rows
            else:
                runs.append([cp_rank, begin, num_rows])
            end = begin + num_rows
    return SequenceSharding(len(ledger.missing), *(np.array(column, dtype=np.int64) for column in zip(*runs)))


def cut_at_segments(
    found: SequenceSharding, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut each rank's runs of rows at the ends of segments. Returns rank, segment, first row and end in the segment,
    int64 [spans] each."""
    ends = np.cumsum(lengths)
    last = found.first + found.length
    segments = np.searchsorted(ends, found.first, side="right")
    counts = np.searchsorted(ends, last, side="left") - segments + 1
    run = np.repeat(np.arange(len(counts)), counts)
    segment = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts) + segments[run]
    begin = ends[segment] - lengths[segment]
    first, end = np.maximum(found.first[run], begin) - begin, np.minimum(last[run], ends[segment]) - begin
    return found.cp_rank[run], segment, first, end


def exchanged_rows(found: SequenceSharding, lengths: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
    """Return the number of key rows that each rank attends to but does not hold: int64 [cp_size]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    cp_rank, segment, first, end = cut_at_segments(found, lengths)
    order = np.lexsort((first, segment, cp_rank))
    cp_rank, segment, first, end = cp_rank[order], segment[order], first[order], end[order]
    is_last = np.append((cp_rank[1:] != cp_rank[:-1]) | (segment[1:] != segment[:-1]), True)
    result = np.zeros(found.cp_size, dtype=np.int64)
    needed = end if keys is None else np.asarray(keys, dtype=np.int64)[segment]
    np.add.at(result, cp_rank[is_last], needed[is_last])
    held = end - first if keys is None else np.clip(np.minimum(end, needed) - first, 0, None)
    np.subtract.at(result, cp_rank, held)
    return result
