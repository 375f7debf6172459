"""The load that is planned for against the rows and assignments that a routing really makes."""

from __future__ import annotations

import pytest
import torch

from moe import route
from moe.placement_map import PlacementMap
from moe.planning.load import Shape
from moe.schedule.execute import MOST_MEASURED, PassTimer

pytestmark = pytest.mark.fast

TOKENS = 4000


def _shape(num_experts: int, num_ranks: int, top_k: int) -> Shape:
    return Shape(TOKENS, num_experts, num_ranks, top_k, hidden_size=16, width=24, gated=True, element_size=2)


def _in_order(shape: Shape) -> PlacementMap:
    return PlacementMap(shape.num_experts, shape.num_ranks)


def _route(shape: Shape, skew: float) -> tuple[list[float], int, int]:
    """(tokens per expert, rows, pairs of the busiest rank) of random routings of all ranks' tokens."""
    experts, ranks = shape.num_experts, shape.num_ranks
    counts = torch.zeros(experts)
    exchange_counts = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(rank)
        noise = -torch.log(-torch.log(torch.rand(TOKENS, experts, generator=generator)))  # drawing without putting back
        scores = noise + skew * torch.linspace(1, 0, experts)
        routing_map = torch.zeros(TOKENS, experts, dtype=torch.bool).scatter_(
            1, scores.topk(shape.top_k, dim=1).indices, True
        )
        counts += routing_map.sum(dim=0)
        choice = route.choose(routing_map, shape.top_k)
        order = route.dispatch_order(choice, route.Destinations.of_primaries(choice, PlacementMap(experts, ranks)), [1])
        exchange_counts.append(order.counts[:, :, 0])
    table = torch.stack(exchange_counts)  # [from, to, rows and assignments]
    token_rows = max(int(table[..., 0].sum(dim=0).max()), int(table[..., 0].sum(dim=1).max()))
    return counts.tolist(), token_rows, int(table[..., 1].sum(dim=0).max())


@pytest.mark.parametrize("num_experts,num_ranks,top_k", [(8, 2, 2), (8, 4, 1), (64, 4, 6), (32, 8, 8), (8, 1, 2)])
@pytest.mark.parametrize("skew,exact", [(0.0, 0.03), (1.5, 0.08)])
def test_load_of_the_busiest_rank(num_experts: int, num_ranks: int, top_k: int, skew: float, exact: float) -> None:
    shape = _shape(num_experts, num_ranks, top_k)
    counts, token_rows, assignments = _route(shape, skew)
    load = shape.at_primaries([count / 7 for count in counts], _in_order(shape))  # the scale does not matter
    assert load.assignments == pytest.approx(assignments, rel=0.001)
    assert load.token_rows == pytest.approx(token_rows, rel=exact)
    assert load.away_rows == pytest.approx(load.token_rows * (num_ranks - 1) / num_ranks, abs=1)
    assert (load.hidden_columns, load.width, load.tokens, load.element_size) == (48, 24, TOKENS, 2)


def test_extreme_loads() -> None:
    shape = _shape(8, 4, 2)
    even = shape.even()
    assert even.assignments == TOKENS * 2 and even.token_rows < TOKENS * 2
    one_rank = shape.at_primaries(
        [5.0, 5.0, 0, 0, 0, 0, 0, 0], _in_order(shape)
    )  # every token has both experts there: it travels once
    assert one_rank.assignments == 4 * TOKENS * 2 and one_rank.token_rows == 4 * TOKENS
    nothing = shape.at_primaries([0.0] * 8, _in_order(shape))
    assert nothing.assignments == nothing.token_rows == nothing.away_rows == 0


def test_clock_tells_medians_and_forgets() -> None:
    clock = PassTimer()
    for _ in range(MOST_MEASURED + 3):
        with clock.measure("forward", torch.device("cpu")):
            pass
    with clock.measure("backward", torch.device("cpu")):
        torch.ones(10).sum()
    seconds = clock.take()
    assert sorted(seconds) == ["backward", "forward"] and min(seconds.values()) >= 0.0
    assert clock.take() == {}
