"""Problems that rules yield, and helpers to list candidate fixes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Fix = dict[str, Any]  # dotted key -> value; the key WORLD_SIZE stands for the number of processes
WORLD_SIZE = "world_size"


class Problem(NamedTuple):
    """A broken rule and candidate fixes, the preferred one first."""

    key: str
    rule: str  # follows "key (value) " in the message
    fixes: list[Fix]


def divisors(number: int, near: int) -> list[int]:
    """Return the divisors of a number, nearest to `near` first, the smaller of two equally near first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))


def multiples(number: int, near: int) -> list[int]:
    """Return a few positive multiples of a number, nearest to `near` first."""
    around = {number * max(1, near // number + step) for step in range(-1, 4)}
    return sorted(around, key=lambda m: (abs(m - near), m))


def set_to(key: str, values: Iterable[Any]) -> list[Fix]:
    """Return one fix per value: the key set to it."""
    return [{key: value} for value in values]


def must_divide(divisor: tuple[str, int], number: tuple[str, int], *other_fixes: Fix) -> Iterator[Problem]:
    """Yield a problem if the first key's value does not divide the second's. Its fixes are other values of the first
    key, then `other_fixes`, then other values of the second key."""
    (key, small), (other_key, large) = divisor, number
    if large % small:
        fixes = [*set_to(key, divisors(large, small)), *other_fixes, *set_to(other_key, multiples(small, large))]
        yield Problem(key, f"must divide {other_key} ({large})", fixes)
