"""What planners reckon with, measured: an assignment's computation, what a further piece costs, and copies' ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from moe.experts.weights import Weights
from moe.placement.quotas import Costs
from moe.schedule.chunk_plan import Plan

SMALL, LARGE = 64, 512  # assignments of a piece
ROUNDS = 9  # in each of which everything is measured once, so that a busy moment of the machine spoils all alike
FACTOR = 64  # by which a cost may be off from the assumed one; beyond it was noise, or another program's work


@dataclass(frozen=True)
class Measured:
    """What came of a measurement."""

    costs: Costs
    assignment: float  # seconds that an expert takes for one more
    problem: str | None  # why these costs are not plausible


def measure(
    weights: Weights | None, group: dist.ProcessGroup, node: int, device: torch.device, assumed: Costs
) -> Measured:
    """The costs of layers like this one (None: this rank has none), the same on all ranks of the job: of the slowest of
    them. A collective call of all; node: ranks of the group that follow one another on one."""
    seconds = torch.zeros(ROUNDS, 4, dtype=torch.float64)
    if weights is not None:
        measured: list[Callable[[], None] | None] = [partial(_piece, weights, number) for number in (SMALL, LARGE)]
        measured.append(partial(_copy, weights, group, 1, node) if node > 1 else None)
        measured.append(partial(_copy, weights, group, node, group.size()) if node < group.size() else None)
        for number in range(-1, ROUNDS):  # the first round makes buffers and connections
            for i, function in enumerate(measured):
                if function is not None:
                    seconds[number, i] = _seconds(function, device)
    seconds = seconds.to(device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return judged(seconds.tolist(), assumed)


def judged(rounds: Sequence[Sequence[float]], assumed: Costs) -> Measured:
    """The costs of rounds, and whether they are plausible. Each has the seconds of SMALL and of LARGE assignments, of a
    copy inside a node and of one between nodes; 0: there is no such way."""
    small, large, in_node, between = (median(column) for column in zip(*rounds, strict=True))
    assignment = (large - small) / (LARGE - SMALL)
    if assignment <= 0:
        problem = f"{LARGE} assignments took {large:.2g} s and {SMALL} took {small:.2g} s"
        return Measured(assumed, assignment, problem)
    costs = Costs(
        piece=max(0, round(small / assignment - SMALL)),
        copy_in_node=round((in_node or between) / assignment),
        copy_between=round((between or in_node) / assignment),
    )
    # One that was not measured is the other way's.
    return Measured(costs, assignment, implausible(costs, assumed, ways=(in_node > 0, between > 0)))


def implausible(costs: Costs, assumed: Costs, ways: tuple[bool, bool] = (True, True)) -> str | None:
    """Why costs are none that a machine has, in words; None where they may be. `ways`: which of a copy's costs are its
    own."""
    least = min(assumed.copy_in_node, assumed.copy_between or assumed.copy_in_node)
    most = max(assumed.copy_in_node, assumed.copy_between or assumed.copy_in_node)
    for name, value, low, high in (
        ("a piece", costs.piece, 0, FACTOR * assumed.piece),
        ("a copy inside a node", costs.copy_in_node if ways[0] else most, -(-least // FACTOR), FACTOR * most),
        ("a copy between nodes", costs.copy_between if ways[1] else most, -(-least // FACTOR), FACTOR * most),
    ):
        if value is not None and not low <= value <= high:
            return f"{value} for {name}, where {low} to {high} was expected"
    return None


def _seconds(function: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _piece(weights: Weights, assignments: int) -> None:
    """Both passes of one expert."""
    from moe.layer import routed_experts  # which places experts itself

    tensors = [each[:1].clone().requires_grad_() for each in weights.tensors]
    x = weights.fc1.detach().new_ones(assignments, weights.fc1.size(2)).requires_grad_()
    probs = x.new_ones(assignments, 1, dtype=torch.float32)
    with torch.enable_grad():
        output = routed_experts(x, probs, probs.bool(), weights.like(*tensors), Plan(), None, None, 1)
        output.backward(torch.ones_like(output))


def peer_of(rank: int, way: int, ranks: int) -> int:
    """The rank so far behind, among the `ranks` that follow one another."""
    return rank // ranks * ranks + (rank + way) % ranks


def _copy(weights: Weights, group: dist.ProcessGroup, distance: int, ranks: int) -> None:
    """An expert's weights to the rank so far behind, in a ring of so many, and as much back."""
    rank = group.rank()
    for way in (distance, -distance):
        operations = []
        for each in weights.tensors:
            operations.append(dist.P2POp(dist.isend, each[0], group=group, group_peer=peer_of(rank, way, ranks)))
            arrival = torch.empty_like(each[0])
            operations.append(dist.P2POp(dist.irecv, arrival, group=group, group_peer=peer_of(rank, -way, ranks)))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
