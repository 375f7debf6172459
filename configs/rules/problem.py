"""What a rule yields, and the ways to write down candidate fixes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Fix = dict[str, Any]  # dotted key -> value; the key WORLD_SIZE stands for the number of processes
WORLD_SIZE = "world_size"


class Problem(NamedTuple):
    """A broken rule."""

    key: str
    rule: str  # reads on from "key (value) "
    fixes: list[Fix]


def divisors(number: int, near: int) -> list[int]:
    """Divisors of a number, those nearest to `near` first and the smaller of two equally near."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))


def multiples(number: int, near: int) -> list[int]:
    """A few positive multiples of a number, nearest to `near` first."""
    around = {number * max(1, near // number + step) for step in range(-1, 4)}
    return sorted(around, key=lambda m: (abs(m - near), m))


def set_to(key: str, values: Iterable[Any]) -> list[Fix]:
    """One fix for each value: the key set to it."""
    return [{key: value} for value in values]


def must_divide(divisor: tuple[str, int], number: tuple[str, int], *other_fixes: Fix) -> Iterator[Problem]:
    """The problem of a key's value that does not divide another's; fixes of either, and between them `other_fixes`."""
    (key, small), (other_key, large) = divisor, number
    if large % small:
        fixes = [*set_to(key, divisors(large, small)), *other_fixes, *set_to(other_key, multiples(small, large))]
        yield Problem(key, f"must divide {other_key} ({large})", fixes)
