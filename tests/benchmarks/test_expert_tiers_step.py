"""What the measurement of streamed experts counts: bytes as the plan says, bounds from them."""

from __future__ import annotations

import pytest

from benchmarks.kit.expert_tiers_rig import Ranks, Rates, StepMoves
from benchmarks.speed.expert_tiers_step import RatioRow, Shape, exact_bytes, filling, in_turns, phases
from configs.compose import compose
from optim.arrangement.experts import ExpertTraffic, expert_traffic

TINY = Shape(layers=2, hidden=64, width=32, experts=4, length=16, samples=2, bucket=4096)


def test_a_step_moves_what_its_plan_says() -> None:
    with Ranks(TINY.overrides("disk", "by_layer"), disk=True) as ranks:
        counted, expected = exact_bytes(ranks)  # which compares them
    weights = 2 * TINY.weights
    assert expected.total.up == (2 * TINY.layers - 2) * weights and expected.total.down == 2 * TINY.layers * weights
    assert counted.up >= expected.total.up and counted.read >= expected.total.read > 0


def _traffic(order: str, tier: str) -> ExpertTraffic:
    found = expert_traffic(compose(TINY.overrides(tier, order)), 1, 0)
    assert found is not None
    return found


@pytest.mark.fast
@pytest.mark.parametrize("order", ["by_micro_batch", "by_layer"])
def test_phases_are_all_of_a_step_where_one_thing_binds(order: str) -> None:
    host = _traffic(order, "host")
    assert phases(host, Rates(1.0, 1e30), 8.0, TINY, order) == 8.0
    slow = phases(host, Rates(1.0, 1.0), 0.0, TINY, order)
    assert max(host.total.up, host.total.down) <= slow <= host.total.up + host.total.down
    assert phases(_traffic(order, "disk"), Rates(1.0, 1.0, 1.0), 0.0, TINY, order) > slow


@pytest.mark.fast
def test_filling_is_one_layer() -> None:
    weights = 2 * TINY.weights
    assert filling(_traffic("by_layer", "host"), Rates(1.0, 1.0), 4.0) == 3 * weights + 2.0


@pytest.mark.fast
def test_a_bar_holds_within_two_errors() -> None:
    numbers = dict(zip(("alone", "link", "disk", "filling", "phases"), (1.0, 2.0, 0.0, 0.5, 3.0), strict=True))

    def row(step: float, error: float) -> RatioRow:
        return RatioRow(
            "host", "by_layer", 1.0, 1e6, **numbers, step=step, error=error, weights_waited=0, grads_waited=0
        )

    assert row(2.5, 0).bound == 2.5 and row(2.5, 0).binds == "link"
    assert row(2.7, 0).holds and not row(2.72, 0).holds and row(2.72, 0.02).holds


@pytest.mark.fast
def test_each_round_begins_with_another_call() -> None:
    order: list[int] = []

    def call(number: int) -> StepMoves:
        order.append(number)
        return StepMoves(seconds=number)

    found = in_turns([lambda: call(0), lambda: call(1)], 2)
    assert order == [0, 1, 1, 0] and [[each.seconds for each in moves] for moves in found] == [[0, 0], [1, 1]]
