"""A layer whose assignments go to copies of their experts, against the loop over tokens."""

from __future__ import annotations

import pytest
import torch

from moe.alltoall.flat import FlatAllToAll
from moe.alltoall.hierarchical import HierarchicalAllToAll
from moe.placement.live import LayerPlacement
from moe.placement.quotas import Costs, Limits
from tests.distributed import run
from tests.moe.oracle import Case, expected_on, largest_error, ours, plans, problem
from tests.moe.placement.scattered import Scattered
from tests.tolerances import MOE

SLOTS = 2


def _scattered_calls(routing: str, bias: bool, ranks_per_node: int = 0) -> float:
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, ranks, worst = group.rank(), group.size(), 0.0
    case = Case(routing=routing, bias=bias, activation="gelu" if bias else "swiglu", shared=True)
    placement = LayerPlacement(group, case.num_experts, Scattered(), Costs(), Limits(SLOTS, ranks))
    exchange = HierarchicalAllToAll(group, ranks_per_node) if ranks_per_node else FlatAllToAll(group)
    expected = expected_on(case, rank, ranks)
    for number, plan in enumerate(plans([(1, 1), (2, 3)])[:: 4 if ranks_per_node else 1]):
        if number % 4 == 0:
            placement.begin_step()
        actual = ours(case, problem(case, rank), plan, exchange, rank, ranks, placement)
        error = largest_error(actual, expected)
        assert error < MOE["float64"], (plan, error)
        worst = max(worst, error)
    return worst


@pytest.mark.parametrize("routing,bias", [("skewed", False), ("one_expert", True), ("dropped", False)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_quotas_give_the_sums_and_gradients_of_the_loop(ranks: int, routing: str, bias: bool) -> None:
    run(_scattered_calls, ranks, routing, bias)


def test_rows_to_copies_pass_through_relays() -> None:
    run(_scattered_calls, 4, "skewed", False, 2)
