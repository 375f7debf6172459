"""Lists of rows in which every pair of options meets at least once: pairwise covering arrays.

Rows are made one by one, each from the pair of options that has waited longest: of several drafts, whose remaining
options are chosen one by one for the pairs that they add, the best is kept (Cohen et al. 1997, "The AETG system"). The
same factors give the same rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]  # factor -> option
Pair = tuple[tuple[str, str], tuple[str, str]]  # two factors' options, factors in their order


def excluded_pairs(factors: Mapping[str, Sequence[str]], conflict: Callable[[Row], str | None]) -> dict[Pair, str]:
    """Return the pairs that no row may hold, with the reason that `conflict` gives."""
    reasons = {pair: conflict(dict(pair)) for pair in _pairs(factors)}
    return {pair: reason for pair, reason in reasons.items() if reason is not None}


def covering_rows(
    factors: Mapping[str, Sequence[str]],
    conflict: Callable[[Row], str | None],
    cost: Callable[[Row], float] = lambda row: 1.0,
    num_drafts: int = 100,
) -> list[Row]:
    """Return rows that hold every pair that `conflict` allows. Of the drafts, the one with most new pairs for its cost
    is kept.

    conflict: the reason why some options of a row (not of all factors) exclude each other; None: they do not. Raises
    ValueError if a row cannot be filled: conflicts must leave each factor an option next to any others.
    """
    draw = random.Random(0)
    waiting = dict.fromkeys(pair for pair in _pairs(factors) if conflict(dict(pair)) is None)
    covering = []
    while waiting:
        first = dict(next(iter(waiting)))
        drafts = [_filled(first, factors, conflict, waiting, draw) for _ in range(num_drafts)]
        best = max(drafts, key=lambda row: sum(pair in waiting for pair in pairs_of(row, factors)) / cost(row))
        for pair in pairs_of(best, factors):
            waiting.pop(pair, None)
        covering.append(best)
    return covering


def pairs_of(row: Row, factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Return the pairs of options that a row holds."""
    return list(itertools.combinations(((name, row[name]) for name in factors if name in row), 2))


def _filled(
    first: Row,
    factors: Mapping[str, Sequence[str]],
    conflict: Callable[[Row], str | None],
    waiting: Mapping[Pair, None],
    draw: random.Random,
) -> Row:
    row, rest = dict(first), [name for name in factors if name not in first]
    draw.shuffle(rest)
    for name in rest:
        fits = [option for option in factors[name] if conflict({**row, name: option}) is None]
        if not fits:
            raise ValueError(f"no option of {name} fits {row}")
        draw.shuffle(fits)
        row[name] = max(fits, key=lambda option: sum(p in waiting for p in pairs_of({**row, name: option}, factors)))
    return {name: row[name] for name in factors}


def _pairs(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    options = [[(name, option) for option in factors[name]] for name in factors]
    return [pair for a, b in itertools.combinations(options, 2) for pair in itertools.product(a, b)]
