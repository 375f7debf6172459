"""Which plans of the memory benchmark are measured for longer."""

from __future__ import annotations

import pytest

from benchmarks.kit.rounds import Rounds
from benchmarks.speed.memory_reuse import contenders

pytestmark = pytest.mark.fast


def test_plans_that_may_be_fastest_within_some_budget_run_on() -> None:
    seconds = {
        "large": 1.0,
        "large and slow": 1.2,
        "middle": 1.09,
        "small": 2.0,
        "small and slow": 2.3,
        "smallest": 2.1,
    }
    memory = {"large": 60, "large and slow": 61, "middle": 50, "small": 40, "small and slow": 39, "smallest": 30}
    result = Rounds({name: {"together": [value] * 3} for name, value in seconds.items()}, num_rounds=3, num_dropped=0)
    assert contenders(result, memory) == {"large", "middle", "small", "smallest", "small and slow"}
