"""Lists of rows in which every pair of options meets."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.kit.covering import Row, covering_rows, excluded_pairs, pairs_of

pytestmark = pytest.mark.fast

FACTORS = {"a": ["0", "1", "2"], "b": ["0", "1", "2"], "c": ["0", "1"], "d": ["0", "1", "2", "3"]}


def no_conflict(_row: Row) -> str | None:
    return None


def conflict(row: Row) -> str | None:
    return "a 2 goes with c 0 alone" if row.get("a") == "2" and row.get("c", "0") != "0" else None


@pytest.mark.parametrize("rule", [no_conflict, conflict])
def test_every_pair_that_may_meet_does(rule: object) -> None:
    chosen = conflict if rule is conflict else no_conflict
    covering = covering_rows(FACTORS, chosen)
    found = {pair for row in covering for pair in pairs_of(row, FACTORS)}
    every = {
        pair
        for one, other in itertools.combinations(FACTORS, 2)
        for pair in itertools.product(((one, x) for x in FACTORS[one]), ((other, y) for y in FACTORS[other]))
    }
    without = excluded_pairs(FACTORS, chosen)
    assert found == every - without.keys()
    assert without == ({(("a", "2"), ("c", "1")): "a 2 goes with c 0 alone"} if chosen is conflict else {})
    assert 12 <= len(covering) <= 16  # at least 3 x 4; all combinations are 72
    assert covering == covering_rows(FACTORS, chosen)


def test_what_costs_less_is_preferred() -> None:
    def cost(row: Row) -> float:
        return 10.0 if row["c"] == "1" and row["d"] == "3" else 1.0

    dear = [row for row in covering_rows(FACTORS, no_conflict, cost) if cost(row) > 1]
    assert len(dear) == 1  # the one that the pair asks for


def test_a_row_that_nothing_fills_is_an_error() -> None:
    def never(row: Row) -> str | None:
        return "a and d" if "a" in row and "d" in row and len(row) > 2 else None

    with pytest.raises(ValueError, match="no option of"):
        covering_rows(FACTORS, never)
