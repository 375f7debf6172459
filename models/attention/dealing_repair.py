"""Repairs of a deal: pieces change places until rows are equal and work is level; what is left over is cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

MOST_TRIED = 20_000  # sums of pieces that are looked at for a place
MOST_SPLIT = 26  # pieces of two places that are dealt anew between them


class Part(NamedTuple):
    """Rows of a piece that lie together, in one place."""

    rows: int
    work: int
    piece: int
    begin: int


class Places:
    """What places hold while rows are dealt.

    left: the rows that each lacks; below 0, has too many. work: of each. parts: what may change places. fixed: parts of
    long pieces, which stay. limit: the work that a place may have. work_of: of a piece's rows from a first to behind a
    last. cut: the exchanged rows that a cut costs, by the piece and the row.
    """

    def __init__(
        self,
        number: int,
        rows: int,
        limit: int,
        work_of: Callable[[int, int, int], int],
        cut: Callable[[int, int], int],
    ) -> None:
        self.left = [rows] * number
        self.work = [0] * number
        self.parts: list[list[Part]] = [[] for _ in range(number)]
        self.fixed: list[list[Part]] = [[] for _ in range(number)]
        self.limit = limit
        self.work_of = work_of
        self.cut = cut

    def part(self, piece: int, begin: int, end: int) -> Part:
        return Part(end - begin, self.work_of(piece, begin, end), piece, begin)

    def add(self, place: int, part: Part, *, fixed: bool = False) -> None:
        (self.fixed if fixed else self.parts)[place].append(part)
        self.left[place] -= part.rows
        self.work[place] += part.work

    def move(self, source: int, target: int, parts: Iterable[Part]) -> None:
        for part in parts:
            self.parts[source].remove(part)
            self.left[source] += part.rows
            self.work[source] -= part.work
            self.add(target, part)

    def fits(self, one: int, other: int, moved: int) -> bool:
        """Whether so much work may go from one place to the other: no excess over the limit grows."""
        before = max(self.work[one], self.work[other], self.limit)
        return self.work[one] - moved <= before and self.work[other] + moved <= before


# -- equal rows --------------------------------------------------------------------------------------------------------


def level_rows(places: Places) -> None:
    """Give every place its rows exactly: by changes of whole parts, then by cuts."""
    open_places = sorted(range(len(places.left)), key=lambda place: (len(places.parts[place]), place))
    while len(open_places) > 1 and any(places.left[place] for place in open_places):
        place = open_places.pop(0)
        if not places.left[place]:
            continue
        if len(open_places) > 1:
            if not _change(places, place, open_places) and len(open_places) < 4:
                _split(places, place, min(open_places, key=lambda other: (places.left[other], other)))
        elif not _change(places, place, open_places):
            _split(places, place, open_places[0])
    _cut_surplus(places)


def _change(places: Places, place: int, others: list[int]) -> bool:
    """Parts change between a place and others until its rows are right; False where none do."""
    surplus = -places.left[place]
    found: dict[int, list[tuple[int, Part]]] = {}
    for other in others:
        for part in places.parts[other]:
            found.setdefault(part.rows, []).append((other, part))
    own = list({part.rows: part for part in places.parts[place]}.values())
    for given, taken in _candidates(own, found, surplus):
        moves = _moves(places, place, given, taken)
        if moves is not None:
            for source, target, parts in moves:
                places.move(source, target, parts)
            return True
    return False


Found = dict[int, list[tuple[int, Part]]]
Taken = tuple[tuple[int, Part], ...]


def _candidates(own: list[Part], found: Found, surplus: int) -> Iterator[tuple[tuple[Part, ...], Taken]]:
    """What a place may give and take, so that it gives `surplus` rows more: one for one, then two for one, and one for
    two."""
    most = 8  # parts of equal rows that are tried
    for part in (None, *own):
        wanted = (part.rows if part else 0) - surplus
        given = (part,) if part else ()
        if wanted == 0:
            for other in found.get(0, ()) or ():
                yield given, (other,)
            yield given, ()
        for one in found.get(wanted, ())[:most]:
            yield given, (one,)
    for i, first in enumerate(own):
        for second in own[i + 1 :]:
            for one in found.get(first.rows + second.rows - surplus, ())[:2]:
                yield (first, second), (one,)
    lengths = sorted(found)
    tried = 0
    for part in (None, *own):
        wanted = (part.rows if part else 0) - surplus
        given = (part,) if part else ()
        for rows in lengths[: bisect_left(lengths, (wanted + 1) // 2)]:
            tried += 1
            if tried > MOST_TRIED // 8:
                return
            if wanted - rows in found:
                yield given, (found[rows][0], found[wanted - rows][0])


def _moves(
    places: Places, place: int, given: tuple[Part, ...], taken: Taken
) -> list[tuple[int, int, list[Part]]] | None:
    """The moves, where the work allows them: what is given goes where something is taken, or to the place that lacks
    most."""
    if taken:
        target = taken[0][0]
    else:
        return None if not given else _give(places, place, list(given))
    moved = {target: sum(part.work for part in given)}
    for other, part in taken:
        moved[other] = moved.get(other, 0) - part.work
    if not all(places.fits(place, other, work) for other, work in moved.items()):
        return None
    taking = [(other, place, [part]) for other, part in taken]
    return [*taking, (place, target, list(given))]


def _give(places: Places, place: int, parts: list[Part]) -> list[tuple[int, int, list[Part]]] | None:
    target = max(range(len(places.left)), key=lambda other: (places.left[other], -other))
    fits = target != place and places.fits(place, target, sum(part.work for part in parts))
    return [(place, target, parts)] if fits else None


def _split(places: Places, one: int, other: int) -> None:
    """Deal the parts of two places anew between them: the first one's rows exact, or as near as parts allow (sums of
    halves, Horowitz and Sahni 1974)."""
    parts = sorted([*places.parts[one], *places.parts[other]], key=lambda part: (part.rows, part.piece, part.begin))
    kept, free = [], parts
    if len(parts) > MOST_SPLIT:
        own = set(places.parts[one])
        free, others = parts[:MOST_SPLIT], parts[MOST_SPLIT:]
        kept = [part for part in others if part in own]
    own_rows = sum(part.rows for part in places.parts[one])
    own_work = sum(part.work for part in places.parts[one])
    wanted = own_rows + places.left[one] - sum(part.rows for part in kept)
    half = len(free) // 2
    rows, work = zip(_sums(free[:half]), _sums(free[half:]))
    order = np.argsort(rows[1], kind="stable")
    right_rows, right_work = rows[1][order], work[1][order]
    outside = places.work[one] - own_work + sum(part.work for part in kept)
    both = places.work[one] + places.work[other]
    begin = np.searchsorted(right_rows, wanted - rows[0], side="left")
    end = np.searchsorted(right_rows, wanted - rows[0], side="right")
    best: tuple[int, int, int, int] | None = None

    def judge(left: np.ndarray, right: np.ndarray) -> None:
        nonlocal best
        if not len(left):
            return
        ones = outside + work[0][left] + right_work[right]
        worst = np.maximum(np.maximum(ones, both - ones) - places.limit, 0)
        off = np.abs(rows[0][left] + right_rows[right] - wanted)
        first = np.lexsort((off, worst))[0]
        found = (int(worst[first]), int(off[first]), int(left[first]), int(right[first]))
        if best is None or found < best:
            best = found

    counts = end - begin
    left = np.repeat(np.arange(len(counts)), counts)[:MOST_TRIED]
    right = np.arange(counts.sum())[:MOST_TRIED] - np.repeat(np.cumsum(counts) - counts, counts)[:MOST_TRIED]
    judge(left, right + begin[left])
    near = np.arange(len(begin))
    for shift in (-1, 0):
        judge(near, np.clip(begin + shift, 0, len(right_rows) - 1))
    assert best is not None
    now = (max(places.work[one] - places.limit, places.work[other] - places.limit, 0), abs(places.left[one]))
    if best[:2] >= now:
        return
    wanted_parts = set(kept)
    for number, picked in ((best[2], free[:half]), (int(order[best[3]]), free[half:])):
        wanted_parts |= {part for bit, part in enumerate(picked) if number >> bit & 1}
    places.move(one, other, [part for part in places.parts[one] if part not in wanted_parts])
    had = set(places.parts[one])
    places.move(other, one, [part for part in places.parts[other] if part in wanted_parts - had])


def _sums(parts: list[Part]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and work int64 [2 ** parts] of every choice of parts."""
    rows, work = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for part in parts:
        rows, work = np.concatenate([rows, rows + part.rows]), np.concatenate([work, work + part.work])
    return rows, work


def _cut_surplus(places: Places) -> None:
    """Rows of a place that has too many go where some are missing."""
    while (most := max(range(len(places.left)), key=lambda place: (-places.left[place], -place))) is not None:
        surplus = -places.left[most]
        if not surplus:
            return
        lacking = [place for place, left in enumerate(places.left) if left > 0]
        equal = [place for place in lacking if places.left[place] == surplus]
        target = (equal or [max(lacking, key=lambda place: (places.left[place], -place))])[0]
        rows = min(surplus, places.left[target])
        _give_rows(places, most, target, rows)


def _give_rows(places: Places, source: int, target: int, rows: int) -> None:
    """Rows of the source's parts go to the target, by the cut that costs least among those that the work allows."""
    best = None
    for kind, held in ((0, places.parts[source]), (1, places.fixed[source])):
        for index, part in enumerate(held):
            if part.rows <= rows:
                continue
            end = part.begin + part.rows
            for cost, begin in (
                (places.cut(part.piece, part.begin + rows) + part.begin, part.begin),
                (places.cut(part.piece, end - rows), end - rows),
            ):
                work = places.work_of(part.piece, begin, begin + rows)
                over = not places.fits(source, target, work)
                found = (over, cost, kind, part.rows, index, begin)
                if best is None or found < best:
                    best = found
    if best is None:  # every part is shorter: the longest goes as a whole
        part = max(places.parts[source] or places.fixed[source])
        if part in places.fixed[source]:
            places.fixed[source].remove(part)
            places.parts[source].append(part)
        places.move(source, target, [part])
        return
    _, _, kind, _, index, begin = best
    _take(places, source, target, (places.parts, places.fixed)[kind][source][index], begin, begin + rows, bool(kind))


def _take(places: Places, source: int, target: int, part: Part, begin: int, end: int, fixed: bool) -> None:
    """Rows from `begin` to `end` of a part go to the target."""
    held = (places.fixed if fixed else places.parts)[source]
    held.remove(part)
    places.left[source] += part.rows
    places.work[source] -= part.work
    for first, last in ((part.begin, begin), (end, part.begin + part.rows)):
        if first < last:
            places.add(source, places.part(part.piece, first, last), fixed=fixed)
    places.add(target, places.part(part.piece, begin, end))


# -- level work --------------------------------------------------------------------------------------------------------


def level_work(places: Places) -> None:
    """Move work off the places that are over the limit, rows staying equal."""
    for _ in range(8 * len(places.left)):
        most = max(range(len(places.left)), key=lambda place: (places.work[place], -place))
        least = min(range(len(places.left)), key=lambda place: (places.work[place], place))
        if places.work[most] <= places.limit or not _exchange(places, most, least):
            return


def _exchange(places: Places, most: int, least: int) -> bool:
    """Work goes from one place to another: a long part but its first rows for a shorter whole one."""
    needed = places.work[most] - places.limit
    room = max(places.limit - places.work[least], (places.work[most] - places.work[least]) // 2)
    best = None
    for long in sorted(places.parts[most], reverse=True):
        for short in sorted(places.parts[least]):
            rows = long.rows - short.rows
            if rows < 0:
                break
            kept = places.work_of(long.piece, long.begin, long.begin + rows)
            moved = long.work - kept - short.work
            if moved <= 0 or moved > room:
                continue
            cost = places.cut(long.piece, long.begin + rows) + long.begin if rows else 0
            found = (max(needed - moved, 0), cost, long, short)
            if best is None or found < best:
                best = found
    if best is None:
        return _trade(places, most, least, needed, room)
    _, _, long, short = best
    places.move(least, most, [short])
    _take(places, most, least, long, long.begin + long.rows - short.rows, long.begin + long.rows, False)
    return True


def _trade(places: Places, most: int, least: int, needed: int, room: int) -> bool:
    """Last rows of one place's heaviest part for first rows of the other's lightest."""

    def last_row(part: Part) -> int:
        end = part.begin + part.rows
        return places.work_of(part.piece, end - 1, end)

    def first_row(part: Part) -> int:
        return places.work_of(part.piece, part.begin, part.begin + 1)

    ones = [
        (last_row(part), part, fixed) for fixed, held in enumerate((places.parts, places.fixed)) for part in held[most]
    ]
    others = [
        (first_row(part), part, fixed)
        for fixed, held in enumerate((places.parts, places.fixed))
        for part in held[least]
    ]
    heavy, long, long_fixed = max(ones)
    light, short, short_fixed = min(others)

    def moved(rows: int) -> int:
        end = long.begin + long.rows
        return places.work_of(long.piece, end - rows, end) - places.work_of(
            short.piece, short.begin, short.begin + rows
        )

    low, high = 0, min(long.rows, short.rows)
    while low < high:  # the fewest rows that are enough, or the most that there are
        rows = (low + high) // 2
        if moved(rows) >= needed:
            high = rows
        else:
            low = rows + 1
    if moved(low) > room:
        low -= 1
    if not low or moved(low) <= 0:
        return False
    end = long.begin + long.rows
    _take(places, most, least, long, end - low, end, bool(long_fixed))
    _take(places, least, most, short, short.begin, short.begin + low, bool(short_fixed))
    return True
