"""A copy's gradients add up beside it and go home once a step: how often, in how many bytes, and to the home's sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moe.alltoall.flat import FlatAllToAll
from moe.alltoall.messages import Messages
from moe.chunk_plan import Plan
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.placement import replicas
from moe.placement.live import TALLY, LayerPlacement
from moe.placement.planners.solve import reference, solve
from moe.placement.policy import ASSUMED
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, outcome
from moe.placement_map import PlacementMap
from parallel.megatron.grad_buffers import add_with_next
from tests.distributed import run
from tests.moe.oracle import Case, largest_error, problem
from tests.moe.placement.scattered import Scattered, slab_of
from tests.tolerances import MOE

REPLICA_SLOTS = 2
TRAIN, AGAIN, EVALUATE = "train", "again", "evaluate"


def _step(kinds: list[str], dtype: torch.dtype, block_rows: int | None = None) -> dict[str, Any]:
    """Gradients of what is at home after a step of calls of these kinds, without copies and with them; what the layer
    counted, and the most messages of copies that a pass had for a pair of ranks and a direction."""
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    case = Case(routing="skewed", dtype=dtype)
    num_home, plan = case.num_experts // ranks, Plan(2, 2, "recompute", 1)
    placement = LayerPlacement(
        group, case.num_experts, Scattered(), Costs(), ReplicaLimits(REPLICA_SLOTS, ranks), block_rows
    )
    most, plain = 0, replicas.Messages

    class Counted(Messages):
        def __init__(self, group: Any, sends: Any, receives: Any) -> None:
            super().__init__(group, sends, receives)
            nonlocal most
            pairs = sum(bool(tensors) for side in (sends, receives) for tensors in side.values())
            most = max(most, -(-len(self._works) // max(pairs, 1)))

    replicas.Messages = Counted  # type: ignore[misc]
    result: dict[str, Any] = {}
    for name, placed in (("home", None), ("placed", placement)):
        parameters = [each[rank * num_home : (rank + 1) * num_home].clone() for each in problem(case).parameters]
        fc1, fc2 = (torch.nn.Parameter(each) for each in parameters)
        slab = Slab(fc1, fc2, None, None, "swiglu", block_rows)
        placement.begin_passes(sum(kind != EVALUATE for kind in kinds))
        for number, kind in enumerate(kinds):
            given = problem(case, rank + 10 * number)
            setting = Setting(FlatAllToAll(group), assignments_per_token=2, placement=placed, comes_again=kind == AGAIN)
            x = given.x.clone().requires_grad_()
            call = x, given.probs, given.routing_map, slab, plan, setting
            if kind != TRAIN:
                with torch.no_grad():
                    routed_experts(*call)
            if kind != EVALUATE:
                routed_experts(*call).backward(given.output_grad)
        result[name] = [each.grad for each in slab.given]
    replicas.Messages = plain  # type: ignore[misc]
    result["tally"] = dict(zip(TALLY, placement.tally.tolist(), strict=True))
    result["most"], result["bytes"] = most, (slab.expert_bytes, slab.grad_bytes)
    result["left"] = len(placement._owing) + len(placement.replica_buffers._written)  # type: ignore[union-attr]
    return result


@pytest.mark.parametrize("kinds", [[TRAIN], [TRAIN] * 5, [AGAIN] * 4], ids=["one", "five", "recompute"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_go_home_once_for_each_copy_that_came(ranks: int, kinds: list[str]) -> None:
    found = run(_step, ranks, kinds, torch.float64)
    tallies = [each["tally"] for each in found]
    fetched, returned = (sum(tally[name] for tally in tallies) for name in ("copies", "returned"))
    assert fetched == returned > 0
    weights, grads = found[0]["bytes"]
    for name in ("sent_bytes", "charged_bytes"):
        assert sum(tally[name] for tally in tallies) == fetched * (weights + grads)
    for each in found:
        assert each["left"] == 0 and each["most"] <= 1
        assert largest_error(each["placed"], each["home"]) < MOE["float64"]


def test_half_precision_adds_up_in_fp32() -> None:
    for each in run(_step, 2, [TRAIN] * 6, torch.bfloat16):
        weights, grads = each["bytes"]
        assert grads == 2 * weights
        assert largest_error(each["placed"], [grad.double() for grad in each["home"]]) < MOE["bfloat16"]


def test_what_is_evaluated_returns_nothing_and_is_charged_weights_alone() -> None:
    for each in run(_step, 2, [EVALUATE] * 3, torch.float64):
        tally, (weights, _) = each["tally"], each["bytes"]
        assert tally["returned"] == 0 < tally["copies"] and tally["charged_bytes"] == tally["copies"] * weights
    sent = sum(each["tally"]["sent_bytes"] for each in run(_step, 2, [EVALUATE] * 3, torch.float64))
    assert sent == sum(each["tally"]["charged_bytes"] for each in run(_step, 2, [EVALUATE] * 3, torch.float64))


def test_blocks_are_charged_in_each_call() -> None:
    found = run(_step, 2, [TRAIN] * 3, torch.float32, 5)
    tallies = [each["tally"] for each in found]
    weights, grads = found[0]["bytes"]
    fetched, returned = (sum(tally[name] for tally in tallies) for name in ("copies", "returned"))
    assert grads == weights and returned > fetched > 0
    for name in ("sent_bytes", "charged_bytes"):
        assert sum(tally[name] for tally in tallies) == fetched * weights + returned * grads
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each["placed"], each["home"], strict=True))


def test_no_expert_s_weights_are_copied_in_a_call() -> None:
    """Slots and homes are read where they lie."""
    group: Any = torch.distributed.ProcessGroup(0, 1)
    fc1, fc2 = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    home = Slab(fc1, fc2, None, None, "swiglu")
    buffers = replicas.ReplicaBuffers(group, 3, home)
    weights = replicas.CallReplicas(buffers, [], [], []).weights(home)
    assert weights.primaries is home and weights.num_experts == 5
    addresses = {buffers.weights.untyped_storage().data_ptr()}
    for number in range(2, 5):
        slab, index = slab_of(weights, number)
        assert {each[index].untyped_storage().data_ptr() for each in slab.tensors} == addresses
        assert slab.fc1.is_contiguous()  # as the host's kernels need them
        assert slab.fc1[index].data_ptr() == buffers.weights[number - 2].data_ptr()


def test_a_held_copy_costs_nothing_more_and_blocks_cost_each_time() -> None:
    """Planners charge what is sent: with a copy held a small gain is a gain, as its gradient will travel anyway; where
    blocks' gradients travel in each call it is none."""
    counts_RE, limits = np.full((2, 8), 512), ReplicaLimits(replica_slots=2, ranks_per_node=2)
    counts_RE[:, 0] += 150
    held = PlacementMap(8, 2, replicas=((0, 1),))
    costs = ASSUMED["cuda"]
    for plan in (solve, reference):
        once, blocks = costs.of_call(trains=True), costs.of_call(trains=True, block_rows=256)
        quotas_ER = plan(counts_RE, held, once, limits)
        assert quotas_ER[0, 1] > 0
        before = outcome(at_primaries(counts_RE, held), held, once, limits).seconds
        assert outcome(quotas_ER, held, once, limits).seconds < before
        assert plan(counts_RE, held, blocks, limits)[0, 1] == 0
        assert outcome(quotas_ER, held, blocks, limits).seconds > before
    assert costs.of_call(trains=True).replica_in_node == costs.replica_in_node + costs.grad_in_node
    assert costs.of_call(trains=False).replica_in_node == costs.replica_in_node


def test_a_part_without_a_buffer_is_left_to_the_caller() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(2, 3))
    assert not add_with_next(parameter, 1, torch.ones(3))
    parameter.main_grad = torch.zeros(2, 3)
    assert add_with_next(parameter, 1, torch.ones(3))
