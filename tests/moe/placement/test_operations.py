"""Calls, steps and moves of homes at random: every expert exists once, and every copy is its home to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from moe import route
from moe.experts.weights import Slab
from moe.placement.live import LayerPlacement
from moe.placement.migration import exchange_tensors, num_migrated, plan_migrations, rank_migrations
from moe.placement.quotas import Costs, ReplicaLimits
from moe.placement_map import PlacementMap
from tests.distributed import run
from tests.moe.placement.scattered import Scattered, slab_of

OPERATIONS, EXPERTS, REPLICA_SLOTS, TOKENS, TOP_K = 1000, 8, 2, 24, 2


@cache
def _values(expert: int, version: int) -> list[torch.Tensor]:
    """What an expert's home owns after so many steps: both matrices, and a master and two moments of each."""
    generator = torch.Generator().manual_seed(1000 * version + expert)
    shapes = (6, 4), (4, 3)
    return [torch.randn(shape, generator=generator) for _ in range(4) for shape in shapes]


def _operate() -> tuple[int, int, int]:
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    placement = LayerPlacement(group, EXPERTS, Scattered(), Costs(), ReplicaLimits(REPLICA_SLOTS, ranks))
    alike, own = np.random.default_rng(5), torch.Generator().manual_seed(rank)
    owned = [
        torch.stack(values) for values in zip(*(_values(e, 0) for e in placement.map.experts_of(rank)), strict=True)
    ]
    version = calls = replicas = moved = 0
    for _ in range(OPERATIONS):
        operation = alike.choice(["call", "step", "move"], p=[0.7, 0.15, 0.15])
        here = placement.map.experts_of(rank)
        if operation == "call":
            home = Slab(owned[0], owned[1], None, None, "gelu")
            chosen = torch.rand(TOKENS, EXPERTS, generator=own).topk(TOP_K).indices
            routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
            _, taken = placement.plan_call(route.choose(routing_map, TOP_K), routing_map, home, keep=False)
            taken.fetch(home)
            taken.wait()
            weights, held = taken.weights(home), placement.held(rank)
            assert weights.num_experts == len(here) + REPLICA_SLOTS
            for number, expert in enumerate([*here, *held]):
                if expert is not None:
                    slab, index = slab_of(weights, number)
                    fc1, fc2 = _values(expert, version)[:2]
                    assert torch.equal(slab.fc1[index], fc1) and torch.equal(slab.fc2[index], fc2)
            calls, replicas = calls + 1, replicas + len(taken._used)
        elif operation == "step":
            version += 1
            placement.begin_passes()
            for expert_slot, expert in enumerate(here):
                for tensor, value in zip(owned, _values(expert, version), strict=True):
                    tensor[expert_slot] = value
        else:
            after = plan_migrations(alike.integers(0, 1000, EXPERTS), placement.map, int(alike.choice([1, 2, ranks])))
            moves = rank_migrations(placement.map, after, rank)
            exchange_tensors(
                group, torch.device("cpu"), [(tensor[move.expert_slot], move) for move in moves for tensor in owned]
            )
            moved += num_migrated(placement.map, after)
            placement.map = after
            placement.begin_passes()
        for expert_slot, expert in enumerate(placement.map.experts_of(rank)):
            values = _values(expert, version)
            assert all(torch.equal(tensor[expert_slot], value) for tensor, value in zip(owned, values, strict=True))
    everywhere: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everywhere, placement.map.experts_of(rank))
    assert sorted(expert for of_rank in everywhere for expert in of_rank) == list(range(EXPERTS))
    return calls, replicas, moved


def test_a_thousand_operations_lose_nothing() -> None:
    calls, replicas, moved = run(_operate, 4)[0]
    assert calls > 600 and replicas > 300 and moved > 100


LOADS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "even": lambda rng: np.full(32, 1000),
    "noisy": lambda rng: rng.poisson(10000, 32),
    "skewed": lambda rng: (1e5 * rng.dirichlet(np.full(32, 0.5))).astype(np.int64),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("per_node", [1, 2, 8])
def test_homes_move_only_where_it_pays(name: str, per_node: int) -> None:
    loads_E, placement = LOADS[name](np.random.default_rng(2)), PlacementMap(32, 8)
    after = plan_migrations(loads_E, placement, per_node)
    assert plan_migrations(loads_E, after, per_node) == after == plan_migrations(loads_E, placement, per_node)
    assert (after.primary_slots == placement.primary_slots).all()
    assert sorted(expert for rank in range(8) for expert in after.experts_of(rank)) == list(range(32))

    def busiest(each: PlacementMap) -> int:
        return int(np.bincount(each.primary_ranks // per_node, loads_E).max())

    assert (num_migrated(placement, after) > 0) == (name == "skewed")
    assert name != "skewed" or per_node == 8 or busiest(after) < busiest(placement)


def test_a_map_keeps_slots_and_refuses_what_is_none() -> None:
    placement = PlacementMap(6, 3)
    moved = placement.moved_to([2, 0, 1, 1, 0, 2])
    assert moved.experts_of(0) == [4, 1] and moved.moved_to([0, 0, 1, 1, 2, 2]) == placement
    with pytest.raises(ValueError, match="gives two experts the same slot of a rank"):
        placement.moved_to([0, 0, 0, 1, 2, 2])
