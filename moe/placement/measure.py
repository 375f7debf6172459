"""What planners reckon with, measured: an assignment's computation, what a further piece costs, and copies' ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from moe.alltoall.messages import Messages
from moe.chunk_plan import Plan
from moe.experts.weights import Slab
from moe.placement.quotas import Costs

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
    weights: Slab | None, group: dist.ProcessGroup, node: int, device: torch.device, assumed: Costs
) -> Measured:
    """The costs of layers like this one (None: this rank has none), the same on all ranks of the job: of the slowest of
    them. A collective call of all; node: ranks of the group that follow one another on one."""
    measured: list[Callable[[], None] | None] = [None] * 6
    if weights is not None:
        size = group.size()
        rings = [(1, node) if node > 1 else None, (node, size) if node < size else None]
        measured = [partial(_piece, weights, number) for number in (SMALL, LARGE)]
        for num_bytes in (weights.expert_bytes, weights.grad_bytes):
            measured += [None if ring is None else partial(_trip, num_bytes, group, device, *ring) for ring in rings]
    seconds = torch.zeros(ROUNDS, len(measured), dtype=torch.float64)
    for number in range(-1, ROUNDS):  # the first round makes buffers and connections
        for i, function in enumerate(measured):
            if function is not None:
                seconds[number, i] = _seconds(function, device)
    seconds = seconds.to(device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return judged(seconds.tolist(), assumed)


def judged(rounds: Sequence[Sequence[float]], assumed: Costs) -> Measured:
    """The costs of rounds, and whether they are plausible. Each has the seconds of SMALL and of LARGE assignments, of a
    copy's weights inside a node and between nodes, and of its gradient; 0: there is no such way."""
    small, large, *trips = (median(column) for column in zip(*rounds, strict=True))
    assignment = (large - small) / (LARGE - SMALL)
    if assignment <= 0:
        problem = f"{LARGE} assignments took {large:.2g} s and {SMALL} took {small:.2g} s"
        return Measured(assumed, assignment, problem)
    in_node, between, grad_in_node, grad_between = (round(seconds / assignment) for seconds in trips)
    costs = Costs(
        piece=max(0, round(small / assignment - SMALL)),
        # One that was not measured is the other way's.
        copy_in_node=in_node or between,
        copy_between=between or in_node,
        grad_in_node=grad_in_node or grad_between,
        grad_between=grad_between or grad_in_node,
    )
    return Measured(costs, assignment, implausible(costs, assumed, ways=(trips[0] > 0, trips[1] > 0)))


def implausible(costs: Costs, assumed: Costs, ways: tuple[bool, bool] = (True, True)) -> str | None:
    """Why costs are none that a machine has, in words; None where they may be. `ways`: which of a copy's costs are its
    own."""
    costs, assumed = costs.of_call(trains=True), assumed.of_call(trains=True)
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


def _piece(weights: Slab, assignments: int) -> None:
    """Both passes of one expert."""
    from moe.layer import Setting, routed_experts  # which places experts itself

    tensors = [each[:1].clone().requires_grad_() for each in weights.tensors]
    x = weights.fc1.detach().new_ones(assignments, weights.fc1.size(2)).requires_grad_()
    probs = x.new_ones(assignments, 1, dtype=torch.float32)
    with torch.enable_grad():
        output = routed_experts(
            x, probs, probs.bool(), weights.like(*tensors), Plan(), Setting(assignments_per_token=1)
        )
        output.backward(torch.ones_like(output))


def peer_of(rank: int, way: int, ranks: int) -> int:
    """The rank so far behind, among the `ranks` that follow one another."""
    return rank // ranks * ranks + (rank + way) % ranks


def _trip(num_bytes: int, group: dist.ProcessGroup, device: torch.device, distance: int, ranks: int) -> None:
    """So many bytes to the rank so far behind, in a ring of so many ranks."""
    rank, sent = group.rank(), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    to, source = peer_of(rank, distance, ranks), peer_of(rank, -distance, ranks)
    Messages(group, {to: [sent]}, {source: [torch.empty_like(sent)]}).wait()
