"""A layer whose assignments go to copies of their experts, against the loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe.alltoall.flat import FlatAllToAll
from moe.placement.live import LayerPlacement
from moe.placement.map import Integers, PlacementMap
from moe.placement.quotas import Costs, Limits, check
from tests.distributed import run
from tests.moe.oracle import Case, expected_on, largest_error, ours, plans, problem
from tests.tolerances import MOE

SLOTS = 2


class Scattered:
    """A planner that answers something else at each call: any ranks, any quotas."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(3)

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: Limits) -> Integers:
        ranks, experts = counts_RE.shape
        quotas_ER = np.zeros((experts, ranks), np.int64)
        taken = np.zeros(ranks, np.int64)
        for expert in self._generator.permutation(experts):
            home = placement.home_ranks[expert]
            hosts = [
                r for r in range(ranks) if r == home or (taken[r] < limits.slots and self._generator.random() < 0.6)
            ]
            taken[[r for r in hosts if r != home]] += 1
            quotas_ER[expert, hosts] = self._generator.multinomial(
                counts_RE[:, expert].sum(), self._generator.dirichlet(np.ones(len(hosts)))
            )
        check(quotas_ER, counts_RE, placement, limits)
        return quotas_ER


def _scattered_calls(routing: str, bias: bool) -> float:
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, ranks, worst = group.rank(), group.size(), 0.0
    case = Case(routing=routing, bias=bias, activation="gelu" if bias else "swiglu", shared=True)
    placement = LayerPlacement(group, case.num_experts, Scattered(), Costs(), Limits(SLOTS, ranks))
    exchange, expected = FlatAllToAll(group), expected_on(case, rank, ranks)
    for number, plan in enumerate(plans([(1, 1), (2, 3), (3, 3)])):
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
