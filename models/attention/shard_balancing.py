"""Evens out rows and attention work between the ranks of context parallelism, with few exchanged rows.

A ledger lists the spans (runs of rows) of each rank. Ranks swap whole spans until each has its number of rows; where no
swap achieves this, spans are cut. Then pairs of ranks redistribute their spans: whole groups and at most one cut, the
cheapest choice that keeps work balanced. Every choice among the longest groups is tried, with every span that could be
cut: the rows that a rank still lacks are the span's first or last rows, or rows inside it if their work fits better.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

SpansBySize = dict[int, list[tuple[int, "RowSpan"]]]  # rank and span, by the span's number of rows
TakenSpans = tuple[tuple[int, "RowSpan"], ...]  # rank and span

MOST_CUTS = 128  # cuts inside a span that are tried
MOST_TRIED = 20_000  # sums of spans that are tried for a rank
FEW_RANKS = 8
MOST_FREE = 10  # span groups of two ranks that are redistributed; one of them may be cut
MOST_PAIRS, FEW_PAIRS = 160, 8  # pairs of ranks that are rebalanced to exchange fewer rows
MOST_SPANS = 60_000  # pairs of ranks times spans
MOST_LEVELLED = 40  # pairs of ranks that are rebalanced to even out work
MOST_TRADED = 8  # steps of balance_work per rank
MOST_SPLIT = 26  # spans of two ranks of which every choice is tried
MOST_SPLITS = 4  # selections of MOST_SPLIT spans that are tried where there are more


class RowSpan(NamedTuple):
    """Consecutive rows of a segment that one rank holds, from row `begin` of the segment on, and their attention
    work."""

    num_rows: int
    work: int
    segment: int
    begin: int


class RowWork:
    """Attention work of rows, as integers.

    causal: int64 [longest + 1], the work of the first i rows of a segment (None: i(i + 1) / 2). keys: number of keys
    that each row of a segment attends to, by segment (None: causal attention).
    """

    def __init__(self, causal: np.ndarray | None, keys: list[int] | None) -> None:
        self.causal, self.keys = causal, keys
        self.keys_of = None if keys is None else np.array(keys, dtype=np.int64)

    def of(self, segment: int, begin: int, end: int) -> int:
        if self.keys is not None:
            return self.keys[segment] * (end - begin)
        if self.causal is None:
            return (end * (end + 1) - begin * (begin + 1)) // 2
        return int(self.causal[end]) - int(self.causal[begin])

    def of_each(self, segment: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the attention work of rows [begin, end) of each segment, int64 [m]."""
        if self.keys_of is not None:
            return self.keys_of[segment] * (end - begin)
        if self.causal is None:
            return (end * (end + 1) - begin * (begin + 1)) // 2
        return self.causal[end] - self.causal[begin]

    def first_rows(self, low: np.ndarray, high: np.ndarray, num_rows: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Return the lowest row, between `low` and `high`, from which `num_rows` consecutive rows of a causal segment
        have at least this work; `high` if there is none. All int64 [m]."""
        if self.keys is None and self.causal is None:
            return np.clip(-((num_rows * (num_rows + 1) // 2 - work) // num_rows), low, high)
        while (low < high).any():
            middle = (low + high) // 2
            enough = self.of_each(middle, middle, middle + num_rows) >= work
            low, high = np.where(enough | (low >= high), low, middle + 1), np.where(enough, middle, high)
        return low


class ShardLedger:
    """Ledger of the row spans that each rank holds, used while rows and work are balanced between ranks.

    missing: number of rows that each rank still lacks; negative if it has too many. work: attention work of each rank.
    spans: each rank's spans that may be moved whole. fixed: each rank's other spans, such as several spans of one
    segment. limit: the most work that a rank should have.
    """

    def __init__(self, cp_size: int, rows_per_rank: int, limit: int, work: RowWork) -> None:
        self.rows_per_rank, self.limit = rows_per_rank, limit
        self.missing = [rows_per_rank] * cp_size
        self.work = [0] * cp_size
        self.spans: list[list[RowSpan]] = [[] for _ in range(cp_size)]
        self.fixed: list[list[RowSpan]] = [[] for _ in range(cp_size)]
        self.keys = work.keys
        self.work_of, self.works_of, self.first_rows = work.of, work.of_each, work.first_rows

    def cut_cost(self, segment: int, row: int) -> int:
        """Return the number of key rows that must be exchanged if a segment is cut before `row`."""
        return row if self.keys is None else self.keys[segment]

    def span(self, segment: int, begin: int, end: int) -> RowSpan:
        return RowSpan(end - begin, self.work_of(segment, begin, end), segment, begin)

    def held(self, cp_rank: int) -> list[RowSpan]:
        """Return all row spans that a rank holds."""
        return [*self.spans[cp_rank], *self.fixed[cp_rank]]

    def add(self, cp_rank: int, span: RowSpan, *, fixed: bool = False) -> None:
        (self.fixed if fixed else self.spans)[cp_rank].append(span)
        self.missing[cp_rank] -= span.num_rows
        self.work[cp_rank] += span.work

    def move(self, source: int, target: int, spans: Iterable[RowSpan]) -> None:
        for span in spans:
            self.spans[source].remove(span)
            self.missing[source] += span.num_rows
            self.work[source] -= span.work
            self.add(target, span)

    def replace(self, cp_rank: int, spans: list[RowSpan]) -> None:
        """Replace all spans of a rank, and update its work and missing rows."""
        times = Counter(span.segment for span in spans)
        self.spans[cp_rank] = [span for span in spans if times[span.segment] == 1]
        self.fixed[cp_rank] = [span for span in spans if times[span.segment] > 1]
        self.missing[cp_rank] = self.rows_per_rank - sum(span.num_rows for span in spans)
        self.work[cp_rank] = sum(span.work for span in spans)

    def fits(self, one: int, other: int, moved: int) -> bool:
        """Return whether `moved` work may move from rank `one` to rank `other`. Neither rank may then exceed the work
        limit, or the present maximum of the two if that is higher."""
        before = max(self.work[one], self.work[other], self.limit)
        return self.work[one] - moved <= before and self.work[other] + moved <= before


# -- pairs of ranks ---------------------------------------------------------------------------------------------------


class SpanGroup(NamedTuple):
    """Row spans of one segment that move between two ranks together; a group of a single span may be cut."""

    num_rows: int
    work: int
    spans: tuple[RowSpan, ...]
    owner: int  # 0 and 1; 2: both


class PairSplit(NamedTuple):
    """Choice of the span groups that the first of two ranks gets; the second rank gets the others. Bit i of `units` is
    set if the first rank gets group i. It also gets rows `begin` to `end` of group `cut` (no rows if both are 0).
    `over`: work above the limit. `cost`: rows that are exchanged because of the cut."""

    over: int  # work over the limit
    cost: int  # exchanged rows of the cut
    units: int  # bits
    cut: int
    begin: int
    end: int


def rebalance_pair(ledger: ShardLedger, one: int, other: int) -> bool:
    """Redistribute the row spans of two ranks if that reduces their work above the limit, or the key rows that they
    receive. Returns whether it did. Both ranks keep their number of rows."""
    most = MOST_FREE if len(ledger.missing) <= FEW_RANKS else MOST_FREE - 2
    units, kept = _units(ledger, one, other, most)
    if not units:
        return False
    wanted = ledger.rows_per_rank - ledger.missing[one] - sum(unit.num_rows for unit in kept[0])
    both = ledger.work[one] + ledger.work[other]
    outside = sum(unit.work for unit in kept[0])
    choice = _best(ledger, units, wanted, both - ledger.limit - outside, ledger.limit - outside)
    if choice is None:
        return False
    before = _over(ledger, one, other), exchange_cost(ledger, one) + exchange_cost(ledger, other)
    held = [ledger.held(each) for each in (one, other)]
    found = [[span for unit in units_kept for span in unit.spans] for units_kept in kept]
    for number, unit in enumerate(units):
        if number == choice.cut:
            (span,) = unit.spans
            cuts = (span.begin, choice.begin, choice.end, span.begin + span.num_rows)
            for owner, begin, last in zip((1, 0, 1), cuts, cuts[1:]):
                if begin < last:
                    found[owner].append(ledger.span(span.segment, begin, last))
        else:
            found[0 if choice.units >> number & 1 else 1].extend(unit.spans)
    ledger.replace(one, merge_adjacent(ledger, found[0]))
    ledger.replace(other, merge_adjacent(ledger, found[1]))
    after = _over(ledger, one, other), exchange_cost(ledger, one) + exchange_cost(ledger, other)
    if after < before:
        return True
    ledger.replace(one, held[0])
    ledger.replace(other, held[1])
    return False


def merge_adjacent(ledger: ShardLedger, spans: list[RowSpan]) -> list[RowSpan]:
    """Sort spans and merge adjacent spans of the same segment."""
    found: list[RowSpan] = []
    for span in sorted(spans, key=lambda span: (span.segment, span.begin)):
        if found and found[-1].segment == span.segment and found[-1].begin + found[-1].num_rows == span.begin:
            found[-1] = ledger.span(span.segment, found[-1].begin, span.begin + span.num_rows)
        else:
            found.append(span)
    return found


def exchange_cost(ledger: ShardLedger, cp_rank: int) -> int:
    """Return the number of key rows that a rank must receive from other ranks."""
    needed: dict[int, int] = {}
    cost = 0
    for span in ledger.held(cp_rank):
        end = span.begin + span.num_rows
        if ledger.keys is None:
            cost -= span.num_rows
            if needed.get(span.segment, 0) < end:
                needed[span.segment] = end
        else:
            key_rows = ledger.keys[span.segment]
            cost -= max(min(end, key_rows) - span.begin, 0)
            needed[span.segment] = key_rows
    return cost + sum(needed.values())


def _over(ledger: ShardLedger, one: int, other: int) -> int:
    return max(ledger.work[one] - ledger.limit, ledger.work[other] - ledger.limit, 0)


def _units(
    ledger: ShardLedger, one: int, other: int, most: int
) -> tuple[list[SpanGroup], tuple[list[SpanGroup], list[SpanGroup]]]:
    """Return the span groups that may move between two ranks (the longest, the shortest, and those with rows of both
    ranks), and the groups that each rank keeps. Returns no groups if more than `most` have rows of both ranks."""
    by_segment: dict[int, list[tuple[RowSpan, int]]] = {}
    for owner, cp_rank in enumerate((one, other)):
        for span in ledger.held(cp_rank):
            by_segment.setdefault(span.segment, []).append((span, owner))
    units = []
    for found in by_segment.values():
        if len(found) == 1:
            span, owner = found[0]
            units.append(SpanGroup(span.num_rows, span.work, (span,), owner))
            continue
        owners = {owner for _, owner in found}
        spans = merge_adjacent(ledger, [span for span, _ in found])
        if len(owners) == 1:
            groups = [(tuple(spans), owners.pop())]
        else:  # a merged span with rows of both ranks belongs to both
            whose = dict(found)
            groups = [((span,), whose.get(span, 2)) for span in spans]
        for group, owner in groups:
            num_rows, work = sum(span.num_rows for span in group), sum(span.work for span in group)
            units.append(SpanGroup(num_rows, work, group, owner))
    units.sort(key=lambda unit: (unit.owner < 2, -unit.num_rows, unit.spans))
    kept: tuple[list[SpanGroup], list[SpanGroup]] = ([], [])
    if units[most:] and units[most].owner == 2:
        return [], kept
    shared = sum(unit.owner == 2 for unit in units)
    longest, shortest = most - (most - shared) // 2, (most - shared) // 2
    last = max(len(units) - shortest, longest)
    for unit in units[longest:last]:
        kept[unit.owner].append(unit)
    return units[:longest] + units[last:], kept


@functools.cache
def _choices(number: int) -> np.ndarray:
    """Return all subsets of `number` groups as masks: bool [2 ** number, number]."""
    return (np.arange(2**number)[:, None] >> np.arange(number) & 1).astype(bool)


def _best(ledger: ShardLedger, units: list[SpanGroup], wanted: int, low: int, high: int) -> PairSplit | None:
    """Return the cheapest division of the span groups `units` between two ranks that gives the first rank `wanted` rows
    and work from `low` to `high`, or else the division whose work is closest to that range. Returns None if no division
    has `wanted` rows."""
    number = len(units)
    num_rows = np.array([unit.num_rows for unit in units], dtype=np.int64)
    work = np.array([unit.work for unit in units], dtype=np.int64)
    whole = np.array([len(unit.spans) == 1 for unit in units])
    choices = _choices(number)
    lacking = wanted - choices @ num_rows
    its_work = choices @ work
    best: PairSplit | None = None
    exact = np.flatnonzero(lacking == 0)
    if len(exact):
        over = _outside(its_work[exact], low, high)
        first = int(np.argmin(over))
        best = PairSplit(int(over[first]), 0, int(exact[first]), -1, 0, 0)
        if not best.over:
            return best
    chosen, cut = np.nonzero(~choices & whole & (lacking[:, None] > 0) & (lacking[:, None] < num_rows))
    if not len(chosen):
        return best
    begins = np.array([unit.spans[0].begin for unit in units], dtype=np.int64)[cut]
    segments = np.array([unit.spans[0].segment for unit in units], dtype=np.int64)[cut]
    ends, missing = begins + num_rows[cut], lacking[chosen]
    lower, upper = low - its_work[chosen], high - its_work[chosen]
    first_work = ledger.works_of(segments, begins, begins + missing)
    last_work = ledger.works_of(segments, ends - missing, ends)
    if ledger.keys is None:
        first_cost, last_cost = begins + missing, ends - missing
    else:
        first_cost = last_cost = np.array(ledger.keys, dtype=np.int64)[segments]
    for cost, at, found in ((first_cost, begins, first_work), (last_cost, ends - missing, last_work)):
        over = _outside(found, lower, upper)
        i = int(np.lexsort((cost, over))[0])
        choice = PairSplit(int(over[i]), int(cost[i]), int(chosen[i]), int(cut[i]), int(at[i]), int(at[i] + missing[i]))
        best = choice if best is None or choice < best else best
    if ledger.keys is not None or best is None:
        return best
    # Rows inside a span: from the first row at which the missing rows have enough work.
    inside = np.flatnonzero((first_work < lower) & (last_work > upper) & ((best.over > 0) | (first_cost < best.cost)))
    inside = inside[np.argsort(first_cost[inside], kind="stable")[:MOST_CUTS]]
    if not len(inside):
        return best
    at = ledger.first_rows(begins[inside], ends[inside] - missing[inside], missing[inside], lower[inside])
    found = ledger.works_of(segments[inside], at, at + missing[inside])
    over, cost = _outside(found, lower[inside], upper[inside]), at + missing[inside]
    i = int(np.lexsort((cost, over))[0])
    k = int(inside[i])
    choice = PairSplit(int(over[i]), int(cost[i]), int(chosen[k]), int(cut[k]), int(at[i]), int(at[i] + missing[k]))
    return choice if choice < best else best


def _outside(work: np.ndarray, low: np.ndarray | int, high: np.ndarray | int) -> np.ndarray:
    """Return the distance of each work value from the range `low` to `high`; 0 inside the range."""
    return np.maximum(np.maximum(low - work, work - high), 0)


# -- equal rows --------------------------------------------------------------------------------------------------------


def equalize_rows(ledger: ShardLedger) -> None:
    """Give every rank exactly its number of rows: first by swapping whole spans, then by cutting spans."""
    open_ranks = sorted(range(len(ledger.missing)), key=lambda cp_rank: (len(ledger.spans[cp_rank]), cp_rank))
    while len(open_ranks) > 1 and any(ledger.missing[cp_rank] for cp_rank in open_ranks):
        cp_rank = open_ranks.pop(0)
        if not ledger.missing[cp_rank]:
            continue
        if not _swap_spans(ledger, cp_rank, open_ranks) and len(open_ranks) < 4:
            _repartition(ledger, cp_rank, min(open_ranks, key=lambda other: (ledger.missing[other], other)))
    _cut_surplus(ledger)


def _swap_spans(ledger: ShardLedger, cp_rank: int, others: list[int]) -> bool:
    """Swap spans between a rank and the ranks `others` so that it has exactly its number of rows. Returns False if no
    swap achieves this."""
    surplus = -ledger.missing[cp_rank]
    found: SpansBySize = {}
    for other in others:
        for span in ledger.spans[other]:
            found.setdefault(span.num_rows, []).append((other, span))
    own = list({span.num_rows: span for span in ledger.spans[cp_rank]}.values())
    for given, taken in _candidates(own, found, surplus):
        moves = _allowed_moves(ledger, cp_rank, given, taken)
        if moves is not None:
            for source, target, spans in moves:
                ledger.move(source, target, spans)
            return True
    return False


def _candidates(
    own: list[RowSpan], found: SpansBySize, surplus: int
) -> Iterator[tuple[tuple[RowSpan, ...], TakenSpans]]:
    """Yield candidates for a swap: the spans of `own` that a rank gives and the spans of `found` that it takes, with
    `surplus` more rows given than taken. One span for one comes first, then two for one, then one for two."""
    most = 8  # spans of equal length that are tried
    choices: list[tuple[tuple[RowSpan, ...], int]] = [
        ((), -surplus),
        *(((span,), span.num_rows - surplus) for span in own),
    ]
    for given, wanted in choices:
        if wanted == 0:
            yield given, ()
        for one in found.get(wanted, ())[:most]:
            yield given, (one,)
    for i, first in enumerate(own[:40]):
        for second in own[i + 1 : 40]:
            for one in found.get(first.num_rows + second.num_rows - surplus, ())[:2]:
                yield (first, second), (one,)
    lengths = sorted(found)
    tried = 0
    for given, wanted in choices:
        for num_rows in lengths[: bisect_left(lengths, (wanted + 1) // 2)]:
            tried += 1
            if tried > MOST_TRIED // 16:
                return
            if wanted - num_rows in found:
                yield given, (found[num_rows][0], found[wanted - num_rows][0])


def _allowed_moves(
    ledger: ShardLedger, cp_rank: int, given: tuple[RowSpan, ...], taken: TakenSpans
) -> list[tuple[int, int, list[RowSpan]]] | None:
    """Return a swap as moves (source, target, spans), or None if a rank would get too much work. The given spans move
    to the rank of the first taken span or, if none is taken, to the rank that lacks the most rows."""
    if not taken:
        if not given:
            return None
        target = max(range(len(ledger.missing)), key=lambda other: (ledger.missing[other], -other))
        fits = target != cp_rank and ledger.fits(cp_rank, target, sum(span.work for span in given))
        return [(cp_rank, target, list(given))] if fits else None
    target = taken[0][0]
    moved = {target: sum(span.work for span in given)}
    for other, span in taken:
        moved[other] = moved.get(other, 0) - span.work
    if not all(ledger.fits(cp_rank, other, work) for other, work in moved.items()):
        return None
    return [*((other, cp_rank, [span]) for other, span in taken), (cp_rank, target, list(given))]


def _repartition(ledger: ShardLedger, one: int, other: int) -> None:
    """Redistribute the row spans of two ranks so that rank `one` has exactly its number of rows, or as close to it as
    whole spans allow. Combines the subset sums of two halves of the spans (Horowitz and Sahni 1974)."""
    spans = sorted(
        [*ledger.spans[one], *ledger.spans[other]], key=lambda span: (span.num_rows, span.segment, span.begin)
    )
    half = MOST_SPLIT // 2
    begins = range(0, len(spans) - MOST_SPLIT + 1, half)[:MOST_SPLITS] if len(spans) > MOST_SPLIT else (0,)
    for begin in begins:  # the longest spans and some of the others
        free = spans if len(spans) <= MOST_SPLIT else spans[begin : begin + half] + spans[-half:]
        if _repartition_some(ledger, one, other, free):
            return


def _repartition_some(ledger: ShardLedger, one: int, other: int, free: list[RowSpan]) -> bool:
    """Redistribute the spans `free` between two ranks. Returns whether both then have exactly their number of rows and
    work within the limit."""
    is_free = set(free)
    own = [span for span in ledger.spans[one] if span in is_free]
    wanted = ledger.missing[one] + sum(span.num_rows for span in own)
    outside = ledger.work[one] - sum(span.work for span in own)
    both = ledger.work[one] + ledger.work[other]
    half = len(free) // 2
    row_sums, work_sums = zip(_subset_sums(free[:half]), _subset_sums(free[half:]))
    order = np.argsort(row_sums[1], kind="stable")
    right_rows, right_work = row_sums[1][order], work_sums[1][order]
    begin = np.searchsorted(right_rows, wanted - row_sums[0], side="left")
    counts = np.searchsorted(right_rows, wanted - row_sums[0], side="right") - begin
    left = np.repeat(np.arange(len(counts)), counts)[:MOST_TRIED]
    right = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)[:MOST_TRIED] + begin[left]
    near = np.arange(len(begin))
    pairs = [(left, right), *((near, np.clip(begin + shift, 0, len(right_rows) - 1)) for shift in (-1, 0))]
    lefts, rights = (np.concatenate(each) for each in zip(*pairs))
    ones = outside + work_sums[0][lefts] + right_work[rights]
    over = np.maximum(np.maximum(ones, both - ones) - ledger.limit, 0)
    off = np.abs(row_sums[0][lefts] + right_rows[rights] - wanted)
    best = int(np.lexsort((off, over))[0])
    now = (_over(ledger, one, other), abs(ledger.missing[one]))
    found = (int(over[best]), int(off[best]))
    if found < now:
        bits = int(lefts[best]) | int(order[rights[best]]) << half
        chosen = {span for number, span in enumerate(free) if bits >> number & 1}
        given = [span for span in own if span not in chosen]
        taken = [span for span in ledger.spans[other] if span in chosen]
        ledger.move(one, other, given)
        ledger.move(other, one, taken)
    return min(found, now) == (0, 0)


def _subset_sums(spans: list[RowSpan]) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of rows and the work of every subset of the spans, int64 [2 ** spans] each."""
    row_sums, work_sums = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for span in spans:
        row_sums, work_sums = (
            np.concatenate([row_sums, row_sums + span.num_rows]),
            np.concatenate([work_sums, work_sums + span.work]),
        )
    return row_sums, work_sums


def _cut_surplus(ledger: ShardLedger) -> None:
    """Move rows from ranks with too many rows to ranks with too few, and cut spans where needed."""
    cp_size = len(ledger.missing)
    while surplus := -min(ledger.missing):
        source = ledger.missing.index(-surplus)
        equal = [cp_rank for cp_rank in range(cp_size) if ledger.missing[cp_rank] == surplus]
        target = equal[0] if equal else max(range(cp_size), key=lambda cp_rank: (ledger.missing[cp_rank], -cp_rank))
        # Choose the cut that costs least.
        num_rows = min(surplus, ledger.missing[target])
        held = ledger.held(source)
        cuts = []
        for span in held:
            if span.num_rows == num_rows:
                cuts.append((0, span, span.begin))
            elif span.num_rows > num_rows:
                last = span.begin + span.num_rows - num_rows
                cuts.append((ledger.cut_cost(span.segment, span.begin + num_rows) + span.begin, span, span.begin))
                cuts.append((ledger.cut_cost(span.segment, last), span, last))
        if not cuts:  # every span is shorter: the longest one is moved whole
            span = max(held)
            cuts = [(0, span, span.begin)]
        _, span, begin = min(cuts)
        end, rest = begin + min(num_rows, span.num_rows), [each for each in held if each != span]
        for first, last in ((span.begin, begin), (end, span.begin + span.num_rows)):
            if first < last:
                rest.append(ledger.span(span.segment, first, last))
        given = [*ledger.held(target), ledger.span(span.segment, begin, end)]
        ledger.replace(source, merge_adjacent(ledger, rest))
        ledger.replace(target, merge_adjacent(ledger, given))


# -- level work, fewer exchanged rows ----------------------------------------------------------------------------------


def balance_work(ledger: ShardLedger) -> None:
    """Reduce the work of ranks above the limit: first redistribute spans between pairs of ranks; after MOST_LEVELLED
    pairs, or if that does not help, trade rows between ranks."""
    cp_size = len(ledger.missing)
    tried = 0
    if cp_size == 2 and max(ledger.work) > ledger.limit:
        _repartition(ledger, 0, 1)
        _cut_surplus(ledger)
    stuck: set[int] = set()
    for _ in range(MOST_TRADED * cp_size):
        heavy = [cp_rank for cp_rank in range(cp_size) if ledger.work[cp_rank] > ledger.limit and cp_rank not in stuck]
        if not heavy:
            return
        cp_rank = max(heavy, key=lambda each: (ledger.work[each], -each))
        others = sorted(
            (each for each in range(cp_size) if each != cp_rank), key=lambda each: (ledger.work[each], each)
        )
        found = False
        if tried < MOST_LEVELLED:
            segments = {span.segment for span in ledger.held(cp_rank)}
            sharing = [each for each in others if any(span.segment in segments for span in ledger.spans[each])]
            for other in dict.fromkeys((*sharing[:2], *others[:2])):
                tried += 1
                if found := rebalance_pair(ledger, cp_rank, other):
                    break
        if found or any(_trade_rows(ledger, cp_rank, other) for other in others[:4]):
            stuck.clear()
        else:
            stuck.add(cp_rank)


def _trade_rows(ledger: ShardLedger, most: int, least: int) -> bool:
    """Trade the last rows of the heaviest span of rank `most` for the first rows of the lightest span of rank `least`.
    Trades as few rows as bring `most` down to the limit, or both ranks to equal work. Returns whether rows were
    traded."""

    def first_and_last(span: RowSpan) -> list[int]:
        return [ledger.work_of(span.segment, row, row + 1) for row in (span.begin, span.begin + span.num_rows - 1)]

    long = max(ledger.held(most), key=lambda span: (*first_and_last(span)[::-1], span))
    short = min(ledger.held(least), key=lambda span: (first_and_last(span)[0], span))
    end = long.begin + long.num_rows
    wanted = min(ledger.work[most] - ledger.limit, (ledger.work[most] - ledger.work[least]) // 2)

    def moved(num_rows: int) -> int:
        given = ledger.work_of(long.segment, end - num_rows, end)
        return given - ledger.work_of(short.segment, short.begin, short.begin + num_rows)

    low, high = 0, min(long.num_rows, short.num_rows)
    while low < high:
        num_rows = (low + high) // 2
        low, high = (low, num_rows) if moved(num_rows) >= wanted else (num_rows + 1, high)
    before = ledger.work[most]
    while low and ledger.work[least] + moved(low) >= before:
        low //= 2
    if not low or moved(low) <= 0:
        return False
    kept = [span for span in ledger.held(most) if span != long]
    others = [span for span in ledger.held(least) if span != short]
    first, last = short.begin + low, short.begin + short.num_rows
    kept.append(ledger.span(short.segment, short.begin, first))
    others.append(ledger.span(long.segment, end - low, end))
    if long.num_rows > low:
        kept.append(ledger.span(long.segment, long.begin, end - low))
    if first < last:
        others.append(ledger.span(short.segment, first, last))
    ledger.replace(most, merge_adjacent(ledger, kept))
    ledger.replace(least, merge_adjacent(ledger, others))
    return True


def reduce_exchange(ledger: ShardLedger, enough: int) -> None:
    """Redistribute spans between pairs of ranks so that fewer rows are exchanged. With more than FEW_RANKS ranks, only
    a few pairs are tried if at most `enough` rows are exchanged already."""
    cp_size = len(ledger.missing)
    tried = 0
    costs = [exchange_cost(ledger, cp_rank) for cp_rank in range(cp_size)]
    held = sum(len(spans) for spans in (*ledger.spans, *ledger.fixed))
    pairs_allowed = MOST_PAIRS // 2 if cp_size <= FEW_RANKS else FEW_PAIRS if sum(costs) <= enough else MOST_PAIRS
    allowed = min(pairs_allowed, MOST_SPANS // held)
    done: set[tuple[int, int]] = set()
    while tried < allowed:
        order = sorted(range(cp_size), key=lambda each: (-costs[each], each))
        pairs = [
            (one, other)
            for i, one in enumerate(order[:12])
            for other in order[i + 1 :]
            if costs[one] and (min(one, other), max(one, other)) not in done
        ]
        if not pairs:
            return
        for one, other in pairs:
            tried += 1
            done.add((min(one, other), max(one, other)))
            if rebalance_pair(ledger, one, other):
                costs[one], costs[other] = exchange_cost(ledger, one), exchange_cost(ledger, other)
                done = {pair for pair in done if one not in pair and other not in pair}
                done.add((min(one, other), max(one, other)))
                break
            if tried >= allowed:
                return
