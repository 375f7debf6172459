"""How planner_pick grades: which plans run on, and what a pick is compared with when plans ran for different numbers of
rounds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.speed.planner_pick import LAYERS, contenders, grade, regret, whole_step_regret
from moe.chunk_plan import Plan

pytestmark = pytest.mark.fast


def test_plans_that_are_near_in_a_pass_or_in_a_step_run_on() -> None:
    seconds = {
        "best forward": {"forward": [1.0, 1.0, 9.0], "backward": [4.0, 4.0, 4.0]},
        "best backward": {"forward": [3.0, 3.0, 3.0], "backward": [1.0, 1.0, 1.0]},
        "near forward": {"forward": [1.09, 1.09, 1.09], "backward": [5.0, 5.0, 5.0]},
        "best step": {"forward": [1.3, 1.3, 1.3], "backward": [1.3, 1.3, 1.3]},
        "far": {"forward": [1.5, 1.5, 1.5], "backward": [1.5, 1.5, 1.5]},
    }
    assert contenders(seconds) == set(seconds) - {"far"}


def test_a_regret_is_over_the_rounds_that_both_ran_in() -> None:
    assert regret([2.0, 2.2, 2.0], [1.0, 1.1, 1.0, 5.0, 5.0]) == pytest.approx(1.0)


def _record(plans: dict[Plan, tuple[list[float], list[float]]], pick: Plan, fixed: list[Plan]) -> dict[str, Any]:
    return {
        "layer": asdict(LAYERS[0]),
        "plans": [
            {
                "plan": asdict(plan),
                "predicted": {"forward": 1.0, "backward": 1.0},
                "seconds": {"forward": forward, "backward": backward},
            }
            for plan, (forward, backward) in plans.items()
        ],
        "fixed": [asdict(plan) for plan in fixed],
        "pick": asdict(pick),
    }


def test_a_plan_that_left_counts_in_the_rounds_it_ran_in() -> None:
    # The forward pass of two chunks is the same with and without a lag: 2.0 on average in the first two rounds, then
    # 3.0.
    one, two, late = Plan(1, 1), Plan(2, 2), Plan(2, 2, weight_lag=1)
    times = {
        one: ([4.0, 4.0], [5.0, 5.0]),
        two: ([1.0, 1.0], [4.0, 4.0]),
        late: ([3.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]),
    }
    forward, backward = grade(_record(times, one, [one, late]))
    assert (forward.best, forward.pick, backward.best) == (2, 1, 2)
    assert forward.seconds == {1: 4.0, 2: 2.5}
    assert forward.regret == pytest.approx(1.0) and backward.regret == pytest.approx(1.5)
    assert forward.regrets == pytest.approx({1: 1.0, 2: 0.0})


@pytest.mark.parametrize(("pick", "expected"), [(Plan(2, 1), 0.0), (Plan(1, 1), 0.5)])
def test_a_whole_step_is_compared_with_the_fastest_of_all_plans(pick: Plan, expected: float) -> None:
    times = {
        Plan(1, 1): ([2.0, 2.0], [1.0, 1.0]),
        Plan(2, 2): ([1.0, 1.0], [2.0, 2.0]),
        Plan(2, 1): ([1.0] * 4, [1.0] * 4),
    }
    assert whole_step_regret(_record(times, pick, []), "pick") == pytest.approx(expected)
