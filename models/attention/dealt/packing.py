"""The first way that pieces go to places: whole where they fit, else tails of them."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right, insort

from models.attention.dealt.places import Part, Places

NEGLIGIBLE = 500  # where the rest is 1 / NEGLIGIBLE of the work, parts go where rows are missing, whatever their work
DENSE = 90  # percent of the mean work of a row, from which on a long part is no filler
SPARE = 32  # a place that lacks less than 1 / SPARE of its work beside the lightest rows counts on them
CRUMB = 16  # a piece of 1 / CRUMB of a place's rows is not cut before pieces have changed places


class _Packing:
    """The pool of parts that are not placed, the heaviest first, and what the lightest of them take.

    Places that have their work already count on the lightest rows of the pool to be filled.
    """

    def __init__(self, places: Places, parts: list[Part], cap: int) -> None:
        self.places, self.cap = places, cap
        self.rest = [self._key(part) for part in parts]
        heapq.heapify(self.rest)
        self.pool_rows, self.pool_work = sum(part.rows for part in parts), sum(part.work for part in parts)
        self.light = sorted((part.work // part.rows, part) for part in parts if self.is_light(part))
        self.light_rows = sum(part.rows for _, part in self.light)
        self.short_rows = sum(part.rows for part in parts if not self.is_long(part))
        self.moving = {part for part in parts if self.is_long(part)}  # parts that do not leave by their work
        self._add_up()
        self.counting: set[int] = set()  # places
        self.counted = 0  # rows that they lack

    def is_long(self, part: Part) -> bool:
        return part.rows > self.places.rows or part.work > self.cap

    def is_light(self, part: Part) -> bool:
        return not self.is_long(part) or part.work * self.places.rows * 100 < DENSE * self.cap * part.rows

    def _add_up(self) -> None:
        self.rows = [0, *itertools.accumulate(part.rows for _, part in self.light)]
        self.work = [0, *itertools.accumulate(part.work for _, part in self.light)]

    def _key(self, part: Part) -> tuple[int, Part]:
        work = part.work
        if self.is_long(part) and self.is_light(part):  # after all that is long and not light
            work = min(work, self.cap * DENSE // 100)
        return -work, part

    def next(self) -> Part:
        part = heapq.heappop(self.rest)[1]
        self._count(part, -1)
        if part in self.moving and self.is_light(part):
            self.light.remove((part.work // part.rows, part))
            self._add_up()
        return part

    def back(self, part: Part) -> None:
        heapq.heappush(self.rest, self._key(part))
        self._count(part, 1)
        self.moving.add(part)
        if self.is_light(part):
            insort(self.light, (part.work // part.rows, part))
            self._add_up()

    def _count(self, part: Part, sign: int) -> None:
        self.pool_rows += sign * part.rows
        self.pool_work += sign * part.work
        self.light_rows += sign * part.rows if self.is_light(part) else 0
        self.short_rows += sign * part.rows if not self.is_long(part) else 0

    def expected(self, place: int) -> int:
        """The work of a place that an even share of the pool fills; those that count on the lightest come last."""
        left, work = self.places.left[place], self.places.work[place]
        if place in self.counting:
            return 2 * self.cap + work + left * self._until(self.counted) // max(self.counted, 1)
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
        if place not in self.counting and 0 < left <= self.light_rows - self.counted:
            spare = self.cap - self.places.work[place] - self.lightest(place, left)
            if spare < self.cap // SPARE:
                self.counting.add(place)
                self.counted += left

    def owed(self, part: Part) -> int | None:
        """The place that counts on such a part, where all the short ones are counted on."""
        if not self.is_light(part):
            return None
        left = self.places.left
        if self.is_long(part):
            holes = [(-left[place], place) for place in self.counting if left[place] > 0]
            return min(holes)[1] if holes else None
        fitting = [(self.expected(place), place) for place in self.counting if left[place] >= part.rows]
        return min(fitting)[1] if fitting else None

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
        short = 0 if place in self.counting else max(self.light_rows - self.counted, 0)

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
        if low:
            return low, head(low)
        rows = min(room, part.rows)
        return (rows, 0) if rows == part.rows else (0, rows)


def pack(places: Places, parts: list[Part], cap: int) -> None:
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
        owed = None if by_rows or packing.short_rows >= packing.counted else packing.owed(part)
        if owed is None and not fits and (by_rows or part.rows <= crumb):
            homeless.append(part)
            continue
        if owed in (None, order[0][1] if order else None) and fits:
            place = heapq.heappop(order)[1]
        else:
            fits = owed is not None and left[owed] >= part.rows
            place = owed if owed is not None else min((packing.expected(place), place) for place in range(number) if left[place] > 0)[1]
            order = [entry for entry in order if entry[1] != place]
            waiting = [entry for entry in waiting if entry[1] != place]
            heapq.heapify(order)
            heapq.heapify(waiting)
        tail, head = (part.rows, 0) if fits else packing.cut(place, part)
        if tail + head >= part.rows:
            packing.put(place, part)
        else:
            end = part.begin + part.rows
            cuts = [(end - tail, end)] * (tail > 0) + [(part.begin, part.begin + head)] * (head > 0)
            for first, last in cuts:
                packing.put(place, places.part(part.piece, first, last), fixed=True)
            packing.back(places.part(part.piece, part.begin + head, end - tail))
        packing.settle(place)
        if left[place]:
            heapq.heappush(order, (-left[place] if by_rows else packing.expected(place), place))
    for part in homeless:
        places.add(max(range(number), key=lambda place: (left[place], -place)), part)
