"""A layer whose assignments go to copies of their experts, against the loop over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe.alltoall.flat import FlatAllToAll
from moe.alltoall.hierarchical import HierarchicalAllToAll
from moe.chunk_plan import Plan
from moe.placement.live import OVER, LayerPlacement
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, ReplicaLimits
from moe.placement.whole_blocks import assign, in_blocks, num_blocks
from tests.distributed import run
from tests.moe.oracle import Case, expected_on, largest_error, ours, plans, problem
from tests.moe.placement.scattered import Scattered
from tests.tolerances import MOE

REPLICA_SLOTS = 2


def _scattered_calls(routing: str, bias: bool, ranks_per_node: int = 0) -> float:
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, ranks, worst = group.rank(), group.size(), 0.0
    case = Case(routing=routing, bias=bias, activation="gelu" if bias else "swiglu", shared=True)
    placement = LayerPlacement(group, case.num_experts, Scattered(), Costs(), ReplicaLimits(REPLICA_SLOTS, ranks))
    exchange = HierarchicalAllToAll(group, ranks_per_node) if ranks_per_node else FlatAllToAll(group)
    expected = expected_on(case, rank, ranks)
    for number, plan in enumerate(plans([(1, 1), (2, 3)])[:: 4 if ranks_per_node else 1]):
        if number % 4 == 0:
            placement.begin_passes()
        actual = ours(case, problem(case, rank), plan, exchange, rank, ranks, placement)
        error = largest_error(actual, expected)
        assert error < MOE["float64"], (plan, error)
        worst = max(worst, error)
    return worst


def _bitwise_calls(routing: str, bias: bool, dtype: torch.dtype, degree: int) -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, ranks, block_rows = group.rank(), group.size(), 5
    case = Case(routing=routing, bias=bias, activation="gelu" if bias else "swiglu", shared=True, dtype=dtype)
    placement = LayerPlacement(
        group, case.num_experts, Scattered(), Costs(), ReplicaLimits(REPLICA_SLOTS, ranks), block_rows
    )
    plan, exchange = Plan(degree, degree, "recompute", degree - 1), FlatAllToAll(group)
    given, expected = problem(case, rank), expected_on(case, rank, ranks)
    at_primaries = ours(case, given, plan, exchange, rank, ranks, block_rows=block_rows)
    assert largest_error(at_primaries, expected) < MOE[str(dtype).removeprefix("torch.")]
    for _ in range(4):
        placement.begin_passes()
        placed = ours(case, given, plan, exchange, rank, ranks, placement, block_rows)
        assert all(torch.equal(a, b) for a, b in zip(placed, at_primaries, strict=True))
    assert placement.tally[3] > 0 or routing == "one_expert"


@pytest.mark.parametrize(
    "routing,bias,dtype,degree",
    [
        ("skewed", False, torch.float32, 2),
        ("one_expert", True, torch.float64, 3),
        ("dropped", False, torch.bfloat16, 1),
    ],
)
def test_blocks_have_the_same_bits_wherever_they_are_computed(
    routing: str, bias: bool, dtype: torch.dtype, degree: int
) -> None:
    run(_bitwise_calls, 4, routing, bias, dtype, degree)


def test_every_block_has_one_rank_and_every_rank_its_quota() -> None:
    generator = np.random.default_rng(3)
    counts_RDE = generator.integers(0, 40, (4, 3, 6))
    counts_RDE[1] = 0
    blocks_RE, block_rows = num_blocks(counts_RDE, 7).sum(1), 7
    quotas_ER = np.zeros((6, 4), np.int64)
    for expert, total in enumerate(blocks_RE.sum(0) * block_rows):
        quotas_ER[expert] = generator.multinomial(total, [0.5, 0.3, 0.0, 0.2])
    quotas_ER = in_blocks(quotas_ER, blocks_RE.sum(0))
    assert (quotas_ER.sum(1) == blocks_RE.sum(0)).all() and (quotas_ER[:, 2] == 0).all()
    blocks = assign(counts_RDE, quotas_ER, block_rows, ranks_per_node=2)
    assert (np.bincount(blocks.experts * 4 + blocks.ranks, minlength=24).reshape(6, 4) == quotas_ER).all()
    sizes_RED = np.zeros((4, 6, 3), np.int64)
    np.add.at(sizes_RED, (blocks.sources, blocks.experts, blocks.chunks), blocks.sizes)
    assert (
        (sizes_RED.swapaxes(1, 2) == counts_RDE).all() and blocks.sizes.min() > 0 and blocks.sizes.max() == block_rows
    )
    assert blocks.loads_R(4).sum() == counts_RDE.sum()
    assert all(len(blocks.ranks_in_order(expert)) == blocks_RE[:, expert].sum() for expert in range(6))


@pytest.mark.parametrize("routing,bias", [("skewed", False), ("one_expert", True), ("dropped", False)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_quotas_give_the_sums_and_gradients_of_the_loop(ranks: int, routing: str, bias: bool) -> None:
    run(_scattered_calls, ranks, routing, bias)


def test_rows_to_copies_pass_through_relays() -> None:
    run(_scattered_calls, 4, "skewed", False, 2)


def test_blocks_keep_the_limit_in_assignments() -> None:
    """Their padding is no one's load: of 300 assignments 212 are a block of their own 256."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 4)
    generator, over = np.random.default_rng(7), 0
    for number in range(20):
        popularity = generator.dirichlet(np.full(16, 2.0))
        counts_RDE = np.stack([generator.multinomial(3000, popularity)[None] for _ in range(4)]).astype(np.int64)
        placement = LayerPlacement(group, 16, solve, Costs(8, 32, 256), ReplicaLimits(2, 4), 256, max_load=1.3)
        plan = placement._plan(counts_RDE)
        assert plan.blocks is not None
        loads_R = plan.blocks.loads_R(4)
        assert loads_R.sum() == 12_000 and loads_R.max() <= 3900, (number, loads_R)
        padded_R = np.bincount(plan.blocks.ranks, minlength=4) * 256
        over += bool(padded_R.max() > 1.3 * padded_R.mean())
        placement._count(plan)
        assert placement.tally[OVER] == 0 and placement.worst == 0
        tight = LayerPlacement(group, 16, solve, Costs(8, 32, 256), ReplicaLimits(0, 4), 256, max_load=1.0)
        tight._count(tight._plan(counts_RDE))
        assert tight.tally[OVER] == 1 and tight.worst == tight.tally[2] > 1


def test_copies_that_backward_passes_need_are_planned_for() -> None:
    """A plan that counted on their slots would be sent home, over the limit."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    counts_RDE = np.array([[[60, 10, 5, 5, 5, 5]], [[60, 10, 5, 5, 5, 5]]])
    placement = LayerPlacement(group, 6, solve, Costs(), ReplicaLimits(1, 2), max_load=1.0)
    placement._held[1], placement._pinned[0, 1] = [0], 1
    assert placement._plan(counts_RDE).quotas_ER.sum(0).tolist() == [90, 90]
    placement._held[1] = [1]
    placement._pinned.clear()
    placement._pinned[1, 1] = 1
    quotas_ER = placement._plan(counts_RDE).quotas_ER
    assert quotas_ER.sum(0).tolist() == [130, 50] and quotas_ER[1].tolist() == [0, 20]
