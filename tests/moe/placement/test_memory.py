"""What a rank holds between its passes with placed experts: rows, what the experts keep of them, and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe.alltoall.flat import FlatAllToAll
from moe.chunk_plan import Plan
from moe.experts.blocks import SPARE_ROWS
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.placement.live import LayerPlacement
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, ReplicaLimits
from tests.distributed import run

RANKS, HOME, REPLICA_SLOTS, TOKENS, HIDDEN, WIDTH, CAP = 4, 4, 2, 1500, 16, 24, 1.05


def _held(skew: float) -> dict[str, Any]:
    """Of this rank: bytes that its call holds for rows and preactivations, and its slots', static and placed."""
    group = torch.distributed.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(1 + group.rank())
    popularity = torch.arange(1, RANKS * HOME + 1, dtype=torch.float32) ** -skew
    chosen = torch.multinomial(popularity, TOKENS, replacement=True, generator=generator)
    routing_map = torch.nn.functional.one_hot(chosen, RANKS * HOME).bool()
    x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    shapes = (HOME, 2 * WIDTH, HIDDEN), (HOME, HIDDEN, WIDTH)
    fc1, fc2 = (torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
    weights, result = Slab(fc1, fc2, None, None, "swiglu"), dict[str, Any]()
    limits = ReplicaLimits(REPLICA_SLOTS, RANKS)
    placement = LayerPlacement(group, RANKS * HOME, solve, Costs(), limits, max_load=CAP)
    for name, placed in (("static", None), ("placed", placement)):
        probs = torch.rand(TOKENS, RANKS * HOME, generator=generator).requires_grad_()
        setting = Setting(FlatAllToAll(group), assignments_per_token=1, placement=placed)
        output = routed_experts(x, probs, routing_map, weights, Plan(2, 2), setting)
        call: Any = output.grad_fn.call  # type: ignore[union-attr]
        received_rows = sum(call.forward_sizes.received_rows)
        kept = call.dispatched_rows._buffer.nbytes + call.arrived.preactivations._buffer.nbytes
        result[name] = {"rows": received_rows, "kept": kept}
        output.sum().backward()
    assert placement.replica_buffers is not None
    result["slots"] = placement.replica_buffers.nbytes
    return result


@pytest.mark.parametrize("skew", [0.6, 1.1])
def test_the_busiest_rank_holds_its_rows_and_slots(skew: float) -> None:
    ranks = run(_held, RANKS, skew)
    row, spare = 4 * (HIDDEN + 2 * WIDTH), 4 * SPARE_ROWS * 2 * WIDTH
    for each in ranks:
        for name in ("static", "placed"):
            assert each[name]["kept"] == each[name]["rows"] * row + spare
        assert each["slots"] in (REPLICA_SLOTS * 4 * 3 * HIDDEN * WIDTH, REPLICA_SLOTS * 8 * 3 * HIDDEN * WIDTH)
        assert each["placed"]["rows"] <= CAP * TOKENS + 1
    at_primaries, placed = (max(each[name]["rows"] for each in ranks) for name in ("static", "placed"))
    mean = sum(each["static"]["rows"] for each in ranks) / RANKS
    assert at_primaries > 1.5 * mean and mean == TOKENS
    # Costs nothing, a copy is made for any gain: the activations are those of perfect balance.
    assert placed * row <= 1.02 * mean / at_primaries * (at_primaries * row)
