"""The longest samples that devices hold, as planned."""

from __future__ import annotations

from base.units import GIB
from benchmarks.speed import longest_planned
from benchmarks.speed.longest_planned import STEP, best_heads, longest, need
from simulator.run_plan import TOLERANCE


def test_a_longer_sample_does_not_fit() -> None:
    found = longest("1B GPT", 2, 24)
    capacity, heads = (1 - TOLERANCE) * 24 * GIB, best_heads("1B GPT", 2)
    assert found.heads == heads and found.total <= capacity and found.host > 0
    assert need("1B GPT", 2, heads, found.tokens + found.tokens // 64 // STEP * STEP).total > capacity
    alone, eight = (longest("1B GPT", context, 24) for context in (1, 8))
    assert 1.7 < found.tokens / alone.tokens < 2.1 and 3 < eight.tokens / found.tokens < 4.2


def test_weights_that_do_not_fit_leave_no_memory_for_a_sample() -> None:
    found = longest("llama3_8b", 1, 40)
    assert (found.tokens, longest_planned.cell(found)) == (0, "-")
