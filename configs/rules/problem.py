"""The problem that a broken rule yields, and helpers that list candidate fixes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

Fix = dict[str, Any]  # new value by dotted key; the key WORLD_SIZE stands for the number of processes
WORLD_SIZE = "world_size"


class Problem:
    """A broken rule, with candidate fixes in order of preference: new values of the key, or dicts of values by key."""

    def __init__(self, key: str, rule: str, *fixes: Any):
        self.key = key
        self.rule = rule  # follows "key (value) " in the error message
        self.fixes: list[Fix] = [fix if isinstance(fix, dict) else {key: fix} for fix in fixes]


def divisors(number: int, near: int) -> list[int]:
    """Return the divisors of a number, the nearest to `near` first; of two equally near ones, the smaller first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))


def multiples(number: int, near: int) -> list[int]:
    """Return a few positive multiples of a number, the nearest to `near` first."""
    around = {number * max(1, near // number + step) for step in range(-1, 4)}
    return sorted(around, key=lambda m: (abs(m - near), m))


def set_to(key: str, values: Iterable[Any]) -> list[Fix]:
    """Return one fix per value, which sets the key to the value."""
    return [{key: value} for value in values]


def must_divide(divisor: tuple[str, int], number: tuple[str, int], *other_fixes: Fix) -> Iterator[Problem]:
    """Yield a problem if `divisor` does not divide `number`; both are given as (key, value). The candidate fixes are
    other values of the divisor's key, then `other_fixes`, then other values of the number's key."""
    (key, small), (other_key, large) = divisor, number
    if large % small:
        fixes = [*set_to(key, divisors(large, small)), *other_fixes, *set_to(other_key, multiples(small, large))]
        yield Problem(key, f"must divide {other_key} ({large})", *fixes)
