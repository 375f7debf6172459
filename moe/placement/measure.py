"""What planners reckon with, measured: an assignment's computation, what a further piece costs, and copies' ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from moe.experts.weights import Weights
from moe.placement.quotas import Costs
from moe.schedule.chunk_plan import Plan

SMALL, LARGE = 64, 512  # assignments of a piece
REPEATS = 5


def measure(weights: Weights | None, group: dist.ProcessGroup, node: int, device: torch.device) -> Costs:
    """The costs of layers like this one (None: this rank has none), the same on all ranks of the job: of the slowest of
    them. A collective call of all; node: ranks of the group that follow one another on one."""
    own = torch.zeros(4, dtype=torch.float64)
    if weights is not None:
        own[0], own[1] = (_seconds(partial(_piece, weights, number), device) for number in (SMALL, LARGE))
        own[2] = _seconds(partial(_copy, weights, group, 1), device) if node > 1 else 0.0
        own[3] = _seconds(partial(_copy, weights, group, node), device) if node < group.size() else 0.0
    own = own.to(device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    small, large, in_node, between = own.tolist()
    assignment = max((large - small) / (LARGE - SMALL), 1e-9)
    in_node, between = in_node or between, between or in_node
    return Costs(
        piece=max(0, round(small / assignment - SMALL)),
        copy_in_node=round(in_node / assignment),
        copy_between=round(between / assignment),
    )


def _seconds(function: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(1 + REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _piece(weights: Weights, assignments: int) -> None:
    """Both passes of one expert."""
    from moe.layer import routed_experts  # which places experts itself

    tensors = [each[:1].clone().requires_grad_() for each in weights.tensors]
    x = weights.fc1.detach().new_ones(assignments, weights.fc1.size(2)).requires_grad_()
    probs = x.new_ones(assignments, 1, dtype=torch.float32)
    with torch.enable_grad():
        output = routed_experts(x, probs, probs.bool(), weights.like(*tensors), Plan(), None, None, 1)
        output.backward(torch.ones_like(output))


def _copy(weights: Weights, group: dist.ProcessGroup, distance: int) -> None:
    """An expert's weights to the rank so far behind, and as much back."""
    rank, ranks = group.rank(), group.size()
    for way in (distance, -distance):
        operations = []
        for each in weights.tensors:
            operations.append(dist.P2POp(dist.isend, each[0], group=group, group_peer=(rank + way) % ranks))
            arrival = torch.empty_like(each[0])
            operations.append(dist.P2POp(dist.irecv, arrival, group=group, group_peer=(rank - way) % ranks))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
