"""The first way that pieces go to places: whole where they fit, else tails of them."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable

from models.attention.dealt.places import DealtPart, DealtPlaces

NEGLIGIBLE = 500  # where the rest is 1 / NEGLIGIBLE of the work, parts go where rows are missing, whatever their work
SPARE = 32  # a place that lacks less than 1 / SPARE of its work beside the lightest rows counts on them
CRUMB = 16  # a piece of 1 / CRUMB of a place's rows is not cut before pieces have changed places


class _Packing:
    """The pool of parts that are not placed, the heaviest first, and what the lightest of them take.

    DealtPlaces that have their work already count on the lightest rows of the pool to be filled.
    """

    def __init__(self, places: DealtPlaces, parts: list[DealtPart], cap: int) -> None:
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

    def is_long(self, part: DealtPart) -> bool:
        return part.rows > self.places.rows or part.work > self.cap

    def is_whole_and_short(self, part: DealtPart) -> bool:
        return part.rows == self.lengths[part.piece] and not self.is_long(part)

    def next(self) -> DealtPart:
        minus_work, minus_rows, piece, begin = heapq.heappop(self.rest)
        part = DealtPart(-minus_rows, -minus_work, piece, begin)
        self.pool_rows, self.pool_work = self.pool_rows - part.rows, self.pool_work - part.work
        if self.is_whole_and_short(part):
            self.short_rows -= part.rows
        return part

    def back(self, part: DealtPart) -> None:
        heapq.heappush(self.rest, (-part.work, -part.rows, part.piece, part.begin))
        self.pool_rows, self.pool_work = self.pool_rows + part.rows, self.pool_work + part.work

    def expected(self, wanted: Iterable[int]) -> list[tuple[int, int]]:
        """The work of places that an even share of the pool fills, and the place; of those that count on the lightest,
        as if it came after all other."""
        light = self._until(self.counted)
        rows, work = max(self.pool_rows - self.counted, 1), max(self.pool_work - light, 0)
        counted, left, now, last = max(self.counted, 1), self.places.left, self.places.work, 2 * self.cap
        return [
            (now[place] + left[place] * work // rows, place)
            if place not in self.counting
            else (last + now[place] + left[place] * light // counted, place)
            for place in wanted
        ]

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

    def put(self, place: int, part: DealtPart, *, fixed: bool = False) -> None:
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

    def fits(self, place: int, part: DealtPart) -> bool:
        beside = self.places.left[place] - part.rows
        if beside < 0:
            return False
        work = self.places.work[place] + part.work
        return work + self.lightest(place, beside) <= self.cap

    def cut(self, place: int, part: DealtPart) -> tuple[int, int]:
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


def pack(places: DealtPlaces, parts: list[DealtPart], cap: int, *, cut: bool) -> None:
    """The heaviest first, to the place that will have the least work if the rest fills it evenly; tails, where the
    whole is too much, and the rest in its turn. What fits nowhere and is short makes a place's rows too many.

    cap: the work to pack a place to. cut: else short pieces stay whole, too.
    """
    number, left = len(places.left), places.left
    packing = _Packing(places, parts, cap)
    negligible, crumb = packing.pool_work // NEGLIGIBLE, places.rows // (CRUMB if cut else 1)
    order: list[tuple[int, int]] = []  # places, the one to be filled next first
    waiting = [(-places.rows, place) for place in range(number)]  # those that lack fewer rows than a part has
    homeless = []
    turn, by_rows = 0, False
    while packing.rest:
        if turn <= 0 or (not by_rows and packing.pool_work <= negligible):
            by_rows, turn = packing.pool_work <= negligible, 2 * number
            kept = [place for _, place in order]
            order = [(-left[place], place) for place in kept] if by_rows else packing.expected(kept)
            heapq.heapify(order)
        turn -= 1
        part = packing.next()
        while waiting and left[waiting[0][1]] >= part.rows:
            place = heapq.heappop(waiting)[1]
            heapq.heappush(order, (-left[place], place) if by_rows else packing.expected((place,))[0])
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
            place = min(packing.expected([place for place in range(number) if left[place] > 0]))[1]
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
            heapq.heappush(order, (-left[place], place) if by_rows else packing.expected((place,))[0])
    for part in homeless:
        places.add(max(range(number), key=lambda place: (left[place], -place)), part)
