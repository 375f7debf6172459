"""Trainings whose experts are computed at copies, beside those whose experts stay at home."""

from __future__ import annotations

import pytest

from benchmarks.placement_parity import PASSES, SCATTERED, Case, compare

# All of them: python -m benchmarks.placement_parity
CASES = [
    Case("EP2", "least_loaded", PASSES[4]),
    Case("EP2", "flex", PASSES[5]),
    Case("EP4", SCATTERED, PASSES[1]),
    Case("DP2xEP2", "quota", PASSES[0]),
    Case("DP2xPP2xEP2", SCATTERED, PASSES[2]),
    Case("DP2xPP2xVPP2xEP2", SCATTERED, PASSES[0]),
    Case("TP2+SPxEP2xETP1", SCATTERED, PASSES[3]),
    Case("TP2+SPxEP2xETP2", "solve", PASSES[3]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}, {case.policy}")
def test_copies_change_no_loss(data: list[str], case: Case) -> None:
    row = compare(case, [*data, "training.steps=4"])
    assert row.passed and row.copies > 0, row
    assert case.policy == SCATTERED or row.placed < row.at_home
