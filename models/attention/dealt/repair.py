"""Repairs of a deal: pieces change places until rows are equal and work is level; what is left over is cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from models.attention.dealt.pairs import cost_of, deal_anew, joined
from models.attention.dealt.places import Part, Places

MOST_TRIED = 20_000  # sums of pieces that are looked at for a place
MOST_FREE = 12  # parts of two places that are dealt anew, each one of which may be cut
MOST_PAIRS = 24  # of places that are dealt anew
MOST_SPLIT = 26  # pieces of two places that are dealt anew between them


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
    for i, first in enumerate(own[:40]):
        for second in own[i + 1 : 40]:
            for one in found.get(first.rows + second.rows - surplus, ())[:2]:
                yield (first, second), (one,)
    lengths = sorted(found)
    tried = 0
    for part in (None, *own):
        wanted = (part.rows if part else 0) - surplus
        given = (part,) if part else ()
        for rows in lengths[: bisect_left(lengths, (wanted + 1) // 2)]:
            tried += 1
            if tried > MOST_TRIED // 16:
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
                found = (cost, over, kind, part.rows, index, begin)
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


# -- level work, fewer exchanged rows ----------------------------------------------------------------------------------


def level_work(places: Places) -> None:
    """Bring the work of places that are over the limit down to it."""
    number = len(places.left)
    most = min(MOST_FREE, 8 + 16 // number)
    stuck: set[int] = set()
    for _ in range(2 * number):
        heavy = [place for place in range(number) if places.work[place] > places.limit and place not in stuck]
        if not heavy:
            return
        place = max(heavy, key=lambda each: (places.work[each], -each))
        others = sorted((each for each in range(number) if each != place), key=lambda each: (places.work[each], each))
        pieces = {part.piece for part in (*places.parts[place], *places.fixed[place])}
        sharing = [each for each in others if any(part.piece in pieces for part in places.parts[each])]
        if not any(deal_anew(places, place, other, most) for other in dict.fromkeys((*sharing[:2], *others[:3]))):
            if not _trade(places, place, others[0]):
                stuck.add(place)


def _trade(places: Places, most: int, least: int) -> bool:
    """Last rows of one place's heaviest part for first rows of the other's lightest, as many as bring it to the
    limit, or to the other's work."""

    def ends(place: int) -> list[tuple[int, int, Part]]:
        held = [*places.parts[place], *places.fixed[place]]
        return [
            (
                places.work_of(part.piece, part.begin + part.rows - 1, part.begin + part.rows),
                places.work_of(part.piece, part.begin, part.begin + 1),
                part,
            )
            for part in held
        ]

    long, short = max(ends(most))[2], min((first, part) for _, first, part in ends(least))[1]
    end = long.begin + long.rows
    wanted = min(places.work[most] - places.limit, (places.work[most] - places.work[least]) // 2)

    def moved(rows: int) -> int:
        given = places.work_of(long.piece, end - rows, end)
        return given - places.work_of(short.piece, short.begin, short.begin + rows)

    low, high = 0, min(long.rows, short.rows)
    while low < high:
        rows = (low + high) // 2
        low, high = (low, rows) if moved(rows) >= wanted else (rows + 1, high)
    before = places.work[most]
    if not low or moved(low) <= 0 or places.work[least] + moved(low) >= before:
        return False
    kept = [part for part in (*places.parts[most], *places.fixed[most]) if part != long]
    others = [part for part in (*places.parts[least], *places.fixed[least]) if part != short]
    first, last = short.begin + low, short.begin + short.rows
    kept.append(places.part(short.piece, short.begin, first))
    others.append(places.part(long.piece, end - low, end))
    if long.rows > low:
        kept.append(places.part(long.piece, long.begin, end - low))
    if first < last:
        others.append(places.part(short.piece, first, last))
    places.hold(most, joined(places, kept))
    places.hold(least, joined(places, others))
    return True


def exchange_less(places: Places) -> None:
    """Deal pairs of places anew, those first that exchange most."""
    number = len(places.left)
    most = min(MOST_FREE, 8 + 16 // number)
    tried = 0
    costs = [cost_of(places, place) for place in range(number)]
    done: set[tuple[int, int]] = set()
    while tried < MOST_PAIRS:
        order = sorted(range(number), key=lambda each: (-costs[each], each))
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
            if deal_anew(places, one, other, most):
                costs[one], costs[other] = cost_of(places, one), cost_of(places, other)
                done = {pair for pair in done if one not in pair and other not in pair}
                done.add((min(one, other), max(one, other)))
                break
            if tried >= MOST_PAIRS:
                return
