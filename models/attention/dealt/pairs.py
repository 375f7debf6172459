"""Two places deal what they hold anew between them: whole parts and one cut, the cheapest that keeps work level.

Every choice among the longest parts is looked at, each with every part that could be cut: the rows that a place still
lacks are its first or last ones, or lie so far inside that the work is right.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from models.attention.dealt.places import DealtPart, DealtPlaces

MOST_TRIED = 128  # cuts inside a part that are looked at


class KeptTogether(NamedTuple):
    """Parts of one piece that stay together; one part may be cut."""

    rows: int
    work: int
    parts: tuple[DealtPart, ...]
    owner: int  # 0 and 1; 2: both


class PairDeal(NamedTuple):
    """What one of two places holds: units, and rows `begin` to `end` of another, which may be none."""

    over: int  # work over the limit
    cost: int  # exchanged rows of the cut
    units: int  # bits
    cut: int
    begin: int
    end: int


def deal_anew(places: DealtPlaces, one: int, other: int, most: int) -> bool:
    """Deal the parts of two places anew where that exchanges fewer rows, or brings work nearer to the limit. At most
    `most` units change places. The rows of both stay as many as they are."""
    units, kept = _units(places, one, other, most)
    if not units:
        return False
    wanted = places.rows - places.left[one] - sum(unit.rows for unit in kept[0])
    both = places.work[one] + places.work[other]
    outside = sum(unit.work for unit in kept[0])
    choice = _best(places, units, wanted, both - places.limit - outside, places.limit - outside)
    if choice is None:
        return False
    before = _over(places, one, other), cost_of(places, one) + cost_of(places, other)
    held = [[*places.parts[each], *places.fixed[each]] for each in (one, other)]
    found: tuple[list[DealtPart], list[DealtPart]] = ([], [])
    for owner in (0, 1):
        found[owner].extend(part for unit in kept[owner] for part in unit.parts)
    for number, unit in enumerate(units):
        if number == choice.cut:
            (part,) = unit.parts
            end = part.begin + part.rows
            for owner, begin, last in (
                (1, part.begin, choice.begin),
                (0, choice.begin, choice.end),
                (1, choice.end, end),
            ):
                if begin < last:
                    found[owner].append(places.part(part.piece, begin, last))
        else:
            found[0 if choice.units >> number & 1 else 1].extend(unit.parts)
    places.hold(one, joined(places, found[0]))
    places.hold(other, joined(places, found[1]))
    after = _over(places, one, other), cost_of(places, one) + cost_of(places, other)
    if after < before:
        return True
    places.hold(one, held[0])
    places.hold(other, held[1])
    return False


def joined(places: DealtPlaces, parts: list[DealtPart]) -> list[DealtPart]:
    """The parts, those of a piece that lie one after the other as one."""
    found: list[DealtPart] = []
    for part in sorted(parts, key=lambda part: (part.piece, part.begin)):
        if found and found[-1].piece == part.piece and found[-1].begin + found[-1].rows == part.begin:
            found[-1] = places.part(part.piece, found[-1].begin, part.begin + part.rows)
        else:
            found.append(part)
    return found


def cost_of(places: DealtPlaces, place: int) -> int:
    """The exchanged rows of a place."""
    needed: dict[int, int] = {}
    cost = 0
    for part in (*places.parts[place], *places.fixed[place]):
        end = part.begin + part.rows
        if places.keys is None:
            cost -= part.rows
            if needed.get(part.piece, 0) < end:
                needed[part.piece] = end
        else:
            key_rows = places.keys[part.piece]
            cost -= max(min(end, key_rows) - part.begin, 0)
            needed[part.piece] = key_rows
    return cost + sum(needed.values())


def _over(places: DealtPlaces, one: int, other: int) -> int:
    return max(places.work[one] - places.limit, places.work[other] - places.limit, 0)


def _units(
    places: DealtPlaces, one: int, other: int, most: int
) -> tuple[list[KeptTogether], tuple[list[KeptTogether], list[KeptTogether]]]:
    """The units that may change places, the longest and those of both; and what each place keeps."""
    by_piece: dict[int, list[tuple[DealtPart, int]]] = {}
    for owner, place in enumerate((one, other)):
        for part in (*places.parts[place], *places.fixed[place]):
            by_piece.setdefault(part.piece, []).append((part, owner))
    units = []
    for found in by_piece.values():
        if len(found) == 1:
            part, owner = found[0]
            units.append(KeptTogether(part.rows, part.work, (part,), owner))
            continue
        owners = {owner for _, owner in found}
        parts = joined(places, [part for part, _ in found])
        if len(owners) == 1:
            groups = [(tuple(parts), owners.pop())]
        else:  # what was joined of both is of both
            whose = dict(found)
            groups = [((part,), whose.get(part, 2)) for part in parts]
        for group, owner in groups:
            units.append(KeptTogether(sum(part.rows for part in group), sum(part.work for part in group), group, owner))
    units.sort(key=lambda unit: (unit.owner < 2, -unit.rows, unit.parts))
    kept: tuple[list[KeptTogether], list[KeptTogether]] = ([], [])
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
    """Every choice of so many: bool [2 ** number, number]."""
    return (np.arange(2**number)[:, None] >> np.arange(number) & 1).astype(bool)


def _best(places: DealtPlaces, units: list[KeptTogether], wanted: int, low: int, high: int) -> PairDeal | None:
    """The cheapest choice with so many rows, its work from `low` to `high` or as near as may be."""
    number = len(units)
    rows = np.array([unit.rows for unit in units], dtype=np.int64)
    work = np.array([unit.work for unit in units], dtype=np.int64)
    whole = np.array([len(unit.parts) == 1 for unit in units])
    choices = _choices(number)
    lacking = wanted - choices @ rows
    its_work = choices @ work
    best: PairDeal | None = None
    exact = np.flatnonzero(lacking == 0)
    if len(exact):
        over = _outside(its_work[exact], low, high)
        first = int(np.argmin(over))
        best = PairDeal(int(over[first]), 0, int(exact[first]), -1, 0, 0)
        if not best.over:
            return best
    chosen, cut = np.nonzero(~choices & whole & (lacking[:, None] > 0) & (lacking[:, None] < rows))
    if not len(chosen):
        return best
    begins = np.array([unit.parts[0].begin for unit in units], dtype=np.int64)[cut]
    pieces = np.array([unit.parts[0].piece for unit in units], dtype=np.int64)[cut]
    ends, missing = begins + rows[cut], lacking[chosen]
    lower, upper = low - its_work[chosen], high - its_work[chosen]
    first_work = places.works_of(pieces, begins, begins + missing)
    last_work = places.works_of(pieces, ends - missing, ends)
    if places.keys is None:
        first_cost, last_cost = begins + missing, ends - missing
    else:
        first_cost = last_cost = np.array(places.keys, dtype=np.int64)[pieces]
    for cost, at, found in ((first_cost, begins, first_work), (last_cost, ends - missing, last_work)):
        over = _outside(found, lower, upper)
        i = int(np.lexsort((cost, over))[0])
        choice = PairDeal(int(over[i]), int(cost[i]), int(chosen[i]), int(cut[i]), int(at[i]), int(at[i] + missing[i]))
        best = choice if best is None or choice < best else best
    if places.keys is not None or best is None:
        return best
    # Inside: the first row from which on so many rows are work enough.
    inside = np.flatnonzero((first_work < lower) & (last_work > upper) & ((best.over > 0) | (first_cost < best.cost)))
    inside = inside[np.argsort(first_cost[inside], kind="stable")[:MOST_TRIED]]
    if not len(inside):
        return best
    at = places.first_rows(begins[inside], ends[inside] - missing[inside], missing[inside], lower[inside])
    found = places.works_of(pieces[inside], at, at + missing[inside])
    over, cost = _outside(found, lower[inside], upper[inside]), at + missing[inside]
    i = int(np.lexsort((cost, over))[0])
    k = int(inside[i])
    choice = PairDeal(int(over[i]), int(cost[i]), int(chosen[k]), int(cut[k]), int(at[i]), int(at[i] + missing[k]))
    return choice if choice < best else best


def _outside(work: np.ndarray, low: np.ndarray | int, high: np.ndarray | int) -> np.ndarray:
    """How far work is off a range."""
    return np.maximum(np.maximum(low - work, work - high), 0)
