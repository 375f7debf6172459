"""Repairs of a deal: pieces change places until rows are equal and work is level; what is left over is cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from models.attention.dealt.pairs import cost_of, deal_anew, joined
from models.attention.dealt.places import DealtPart, DealtPlaces

MOST_TRIED = 20_000  # sums of pieces that are looked at for a place
FEW = 8  # places
MOST_FREE = 10  # parts of two places that are dealt anew, each one of which may be cut
MOST_PAIRS, FEW_PAIRS = 160, 8  # of places that are dealt anew for fewer exchanged rows
MOST_PARTS = 60_000  # pairs times parts
MOST_LEVELLED = 40  # of places that are dealt anew for level work
MOST_TRADED = 8  # times that places trade rows, by the number of places
MOST_SPLIT = 26  # parts of two places, all choices of which are looked at
MOST_SPLITS = 4  # choices of such parts, where there are more


# -- equal rows --------------------------------------------------------------------------------------------------------


def level_rows(places: DealtPlaces) -> None:
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


def _change(places: DealtPlaces, place: int, others: list[int]) -> bool:
    """Parts change between a place and others until its rows are right; False where none do."""
    surplus = -places.left[place]
    found: dict[int, list[tuple[int, DealtPart]]] = {}
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


Found = dict[int, list[tuple[int, DealtPart]]]
Taken = tuple[tuple[int, DealtPart], ...]


def _candidates(own: list[DealtPart], found: Found, surplus: int) -> Iterator[tuple[tuple[DealtPart, ...], Taken]]:
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
    places: DealtPlaces, place: int, given: tuple[DealtPart, ...], taken: Taken
) -> list[tuple[int, int, list[DealtPart]]] | None:
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


def _give(places: DealtPlaces, place: int, parts: list[DealtPart]) -> list[tuple[int, int, list[DealtPart]]] | None:
    target = max(range(len(places.left)), key=lambda other: (places.left[other], -other))
    fits = target != place and places.fits(place, target, sum(part.work for part in parts))
    return [(place, target, parts)] if fits else None


def _split(places: DealtPlaces, one: int, other: int) -> None:
    """Deal the parts of two places anew between them: the first one's rows exact, or as near as parts allow (sums of
    halves, Horowitz and Sahni 1974)."""
    parts = sorted([*places.parts[one], *places.parts[other]], key=lambda part: (part.rows, part.piece, part.begin))
    half = MOST_SPLIT // 2
    begins = range(0, len(parts) - MOST_SPLIT + 1, half)[:MOST_SPLITS] if len(parts) > MOST_SPLIT else (0,)
    for begin in begins:  # the longest and some of the others
        free = parts if len(parts) <= MOST_SPLIT else parts[begin : begin + half] + parts[-half:]
        if _split_some(places, one, other, free):
            return


def _split_some(places: DealtPlaces, one: int, other: int, free: list[DealtPart]) -> bool:
    """`_split` for some of the parts. Whether both places have their rows, and work within the limit."""
    is_free = set(free)
    own = [part for part in places.parts[one] if part in is_free]
    wanted = places.left[one] + sum(part.rows for part in own)
    outside = places.work[one] - sum(part.work for part in own)
    both = places.work[one] + places.work[other]
    half = len(free) // 2
    rows, work = zip(_sums(free[:half]), _sums(free[half:]))
    order = np.argsort(rows[1], kind="stable")
    right_rows, right_work = rows[1][order], work[1][order]
    begin = np.searchsorted(right_rows, wanted - rows[0], side="left")
    counts = np.searchsorted(right_rows, wanted - rows[0], side="right") - begin
    left = np.repeat(np.arange(len(counts)), counts)[:MOST_TRIED]
    right = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)[:MOST_TRIED] + begin[left]
    near = np.arange(len(begin))
    pairs = [(left, right), *((near, np.clip(begin + shift, 0, len(right_rows) - 1)) for shift in (-1, 0))]
    lefts, rights = (np.concatenate(each) for each in zip(*pairs))
    ones = outside + work[0][lefts] + right_work[rights]
    over = np.maximum(np.maximum(ones, both - ones) - places.limit, 0)
    off = np.abs(rows[0][lefts] + right_rows[rights] - wanted)
    best = int(np.lexsort((off, over))[0])
    now = (max(places.work[one] - places.limit, places.work[other] - places.limit, 0), abs(places.left[one]))
    found = (int(over[best]), int(off[best]))
    if found < now:
        bits = int(lefts[best]) | int(order[rights[best]]) << half
        chosen = {part for number, part in enumerate(free) if bits >> number & 1}
        given = [part for part in own if part not in chosen]
        taken = [part for part in places.parts[other] if part in chosen]
        places.move(one, other, given)
        places.move(other, one, taken)
    return min(found, now) == (0, 0)


def _sums(parts: list[DealtPart]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and work int64 [2 ** parts] of every choice of parts."""
    rows, work = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for part in parts:
        rows, work = np.concatenate([rows, rows + part.rows]), np.concatenate([work, work + part.work])
    return rows, work


def _cut_surplus(places: DealtPlaces) -> None:
    """Rows of a place that has too many go where some are missing."""
    number = len(places.left)
    while surplus := -min(places.left):
        source = places.left.index(-surplus)
        equal = [place for place in range(number) if places.left[place] == surplus]
        target = equal[0] if equal else max(range(number), key=lambda place: (places.left[place], -place))
        _give_rows(places, source, target, min(surplus, places.left[target]))


def _give_rows(places: DealtPlaces, source: int, target: int, rows: int) -> None:
    """Rows of the source's parts go to the target, by the cut that costs least."""
    held = [*places.parts[source], *places.fixed[source]]
    cuts = []
    for part in held:
        if part.rows == rows:
            cuts.append((0, part, part.begin))
        elif part.rows > rows:
            last = part.begin + part.rows - rows
            cuts.append((places.cut(part.piece, part.begin + rows) + part.begin, part, part.begin))
            cuts.append((places.cut(part.piece, last), part, last))
    if not cuts:  # every part is shorter: the longest goes as a whole
        part = max(held)
        cuts = [(0, part, part.begin)]
    _, part, begin = min(cuts)
    end, rest = begin + min(rows, part.rows), [each for each in held if each != part]
    for first, last in ((part.begin, begin), (end, part.begin + part.rows)):
        if first < last:
            rest.append(places.part(part.piece, first, last))
    given = [*places.parts[target], *places.fixed[target], places.part(part.piece, begin, end)]
    places.hold(source, joined(places, rest))
    places.hold(target, joined(places, given))


# -- level work, fewer exchanged rows ----------------------------------------------------------------------------------


def level_work(places: DealtPlaces) -> None:
    """Bring the work of places that are over the limit down to it: pairs of places are dealt anew; when MOST_LEVELLED
    were, or where that does not help, rows change places."""
    number = len(places.left)
    most = MOST_FREE if number <= FEW else MOST_FREE - 2
    tried = 0
    if number == 2 and max(places.work) > places.limit:
        _split(places, 0, 1)
        _cut_surplus(places)
    stuck: set[int] = set()
    for _ in range(MOST_TRADED * number):
        heavy = [place for place in range(number) if places.work[place] > places.limit and place not in stuck]
        if not heavy:
            return
        place = max(heavy, key=lambda each: (places.work[each], -each))
        others = sorted((each for each in range(number) if each != place), key=lambda each: (places.work[each], each))
        found = False
        if tried < MOST_LEVELLED:
            pieces = {part.piece for part in (*places.parts[place], *places.fixed[place])}
            sharing = [each for each in others if any(part.piece in pieces for part in places.parts[each])]
            for other in dict.fromkeys((*sharing[:2], *others[:2])):
                tried += 1
                if found := deal_anew(places, place, other, most):
                    break
        if found or any(_trade(places, place, other) for other in others[:4]):
            stuck.clear()
        else:
            stuck.add(place)


def _trade(places: DealtPlaces, most: int, least: int) -> bool:
    """Last rows of one place's heaviest part for first rows of the other's lightest, as many as bring it to the
    limit, or to the other's work."""

    def ends(place: int) -> list[tuple[int, int, DealtPart]]:
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
    while low and places.work[least] + moved(low) >= before:
        low //= 2
    if not low or moved(low) <= 0:
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


def exchange_less(places: DealtPlaces, enough: int) -> None:
    """Deal pairs of places anew, those first that exchange most; few pairs where no more than enough is exchanged."""
    number = len(places.left)
    most = MOST_FREE if number <= FEW else MOST_FREE - 2
    tried = 0
    costs = [cost_of(places, place) for place in range(number)]
    held = sum(len(parts) for parts in (*places.parts, *places.fixed))
    pairs_allowed = MOST_PAIRS // 2 if number <= FEW else FEW_PAIRS if sum(costs) <= enough else MOST_PAIRS
    allowed = min(pairs_allowed, MOST_PARTS // held)
    done: set[tuple[int, int]] = set()
    while tried < allowed:
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
            if tried >= allowed:
                return
