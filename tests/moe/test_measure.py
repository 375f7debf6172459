"""Measured costs of a small layer, on one rank and two: complete, equal on all ranks, kept on disk. No timings are
asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe.alltoall.flat import FlatAllToAll
from moe.experts.weights import Slab
from moe.planning.costs import LayerCosts, Limits
from moe.planning.layer_measurement import measure_costs
from moe.planning.load import Shape
from moe.planning.planner import best_plan
from parallel.costs.cache_files import read_cache
from parallel.costs.models import NOTHING, Curve
from tests.distributed import run

BUDGET = 0.4  # seconds; the numbers do not matter here


def _shape(num_ranks: int) -> Shape:
    return Shape(
        tokens=64, num_experts=4, num_ranks=num_ranks, top_k=2, hidden_size=16, width=32, gated=True, element_size=4
    )


def _weights(num_ranks: int, bias: bool = False) -> Slab:
    fc1, fc2 = torch.randn(4 // num_ranks, 64, 16), torch.randn(4 // num_ranks, 16, 32)
    return Slab(
        fc1, fc2, torch.zeros(fc1.shape[:2]) if bias else None, torch.zeros(fc2.shape[:2]) if bias else None, "swiglu"
    )


def _complete(measured: LayerCosts, shape: Shape) -> None:
    for curve in (measured.forward, measured.input_gradients, measured.weight_gradients):
        assert curve.seconds[0] > 0 and len(curve.sizes) >= 2 and curve.sizes[-1] <= shape.even().assignments
    assert (
        measured.recompute(64) >= 0
        and measured.prepare(64) > 0
        and measured.regroup(64) > 0
        and measured.copy_out(64) > 0
    )
    decision = best_plan(measured, shape.even(), Limits(memory_budget=10**9))
    assert decision.prediction.forward > 0 and decision.prediction.backward > 0


@pytest.mark.parametrize("bias", [False, True])
def test_one_rank(bias: bool) -> None:
    shape = _shape(1)
    measured = measure_costs(_weights(1, bias), None, None, shape, shared_width=32, budget=BUDGET)
    _complete(measured, shape)
    assert measured.exchange == measured.gather == measured.combine_sum == measured.post == NOTHING
    assert measured.forward_rest == measured.backward_rest == NOTHING and measured.mixed_rest == 0.0
    assert measured.compute_slowdown == measured.exchange_slowdown == 1.0
    assert measured.shared_forward == measured.forward(64) and measured.shared_backward > 0
    assert measured.copies_by_program and measured.copy_in == NOTHING
    # Without other ranks there is nothing to hide.
    plan = best_plan(measured, shape.even(), Limits(strategies=("keep",))).plan
    assert (plan.degree, plan.backward_degree) == (1, 1)


def _measure_on_rank(folder: str) -> tuple[LayerCosts, LayerCosts, LayerCosts]:
    group = dist.group.WORLD
    assert group is not None
    shape, exchange = _shape(2), FlatAllToAll(group)
    weights = _weights(2)
    from moe.planning import layer_measurement as measure

    measure.WHOLE_SHARE = 0.99  # operations have BUDGET seconds; whole passes, which end by their number, all they need
    budget = BUDGET / (1.0 - measure.WHOLE_SHARE)
    fresh = measure_costs(weights, exchange, group, shape, folder=folder, budget=budget)
    _complete(fresh, shape)
    assert fresh.exchange(1024) > 0 and fresh.gather(8) > 0 and fresh.combine_sum(8) > 0 and fresh.post(8) > 0
    for rest in (fresh.forward_rest, fresh.backward_rest):
        assert isinstance(rest, Curve) and rest.sizes == (1.0, 2.0, 4.0, 8.0, 16.0)
        assert rest.seconds[-1] >= rest.seconds[-2]
    assert fresh.mixed_rest >= 0
    assert fresh.count_exchange > 0 and fresh.compute_slowdown >= 1 and fresh.exchange_slowdown >= 1
    measure.TRUST = 1e9  # a busy machine is not another link
    kept = measure_costs(weights, exchange, group, shape, folder=folder, budget=budget)
    measure.TRUST = 1e-9  # now nothing holds
    again = measure_costs(weights, exchange, group, shape, folder=folder, budget=budget)
    measure.TRUST, measure.WHOLE_SHARE = 2.0, 0.4
    return fresh, kept, again


def test_ranks_end_with_the_same_costs(tmp_path: Path) -> None:
    (fresh, kept, again), other = run(_measure_on_rank, 2, str(tmp_path))
    assert other == (fresh, kept, again)
    assert kept == fresh != again
    (path,) = tmp_path.iterdir()
    assert read_cache(path, {}) is None  # another key
