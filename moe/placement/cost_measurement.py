"""Measurement of a placement's costs: computing an assignment, the overhead per expert, and sending replicas."""

from __future__ import annotations

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
from parallel.costs.measure import time_call

SMALL, LARGE = 64, 512  # assignments of an expert in a measured call
ROUNDS = 9  # each measures everything once, so that a busy moment of the machine affects all alike
FACTOR = 64  # greatest ratio of a cost to the assumed one; beyond it is noise, or another program's work


@dataclass(frozen=True)
class Measured:
    """Measured costs of expert placement, and the reason if they are not plausible."""

    costs: Costs
    assignment: float  # seconds that an expert takes for one more assignment
    problem: str | None  # why the costs are not plausible; None: they are


def measure(
    weights: Slab | None, group: dist.ProcessGroup, node: int, device: torch.device, assumed: Costs
) -> Measured:
    """Return the placement costs of layers with these weights, measured on the slowest rank of the job.

    `weights`: None if this rank has no experts. `node`: the number of consecutive ranks of the group on one node.
    Collective over all ranks of the job.
    """
    measured: list[Callable[[], None] | None] = [None] * 6
    if weights is not None:
        size = group.size()
        rings = [(1, node) if node > 1 else None, (node, size) if node < size else None]
        measured = [partial(_run_expert, weights, number) for number in (SMALL, LARGE)]
        for num_bytes in (weights.expert_bytes, weights.grad_bytes):
            measured += [None if ring is None else partial(_trip, num_bytes, group, device, *ring) for ring in rings]
    seconds = torch.zeros(ROUNDS, len(measured), dtype=torch.float64)
    for number in range(-1, ROUNDS):  # the first round makes buffers and connections
        for i, function in enumerate(measured):
            if function is not None:
                seconds[number, i] = time_call(function, device)
    seconds = seconds.to(device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return grade(seconds.tolist(), assumed)


def grade(rounds: Sequence[Sequence[float]], assumed: Costs) -> Measured:
    """Return the costs that follow from the seconds of measured rounds, and whether they are plausible.

    A round has the seconds of SMALL and of LARGE assignments, of sending a replica's weights inside a node and between
    nodes, and of its gradient likewise; 0 if the group has no such link.
    """
    small, large, *trips = (median(column) for column in zip(*rounds, strict=True))
    assignment = (large - small) / (LARGE - SMALL)
    if assignment <= 0:
        problem = f"{LARGE} assignments of an expert took {large:.2g} s, not longer than {SMALL} ({small:.2g} s)"
        return Measured(assumed, assignment, problem)
    in_node, between, grad_in_node, grad_between = (round(seconds / assignment) for seconds in trips)
    costs = Costs(
        expert_overhead=max(0, round(small / assignment - SMALL)),
        # A link that was not measured has the costs of the other.
        replica_in_node=in_node or between,
        replica_between=between or in_node,
        grad_in_node=grad_in_node or grad_between,
        grad_between=grad_between or grad_in_node,
    )
    return Measured(costs, assignment, implausible(costs, assumed, is_measured=(trips[0] > 0, trips[1] > 0)))


def implausible(costs: Costs, assumed: Costs, is_measured: tuple[bool, bool] = (True, True)) -> str | None:
    """Return an error text for the first measured cost that differs from the assumed one by more than FACTOR times,
    else None.

    `is_measured`: whether the costs of a replica inside a node, and between nodes, were measured.
    """
    costs, assumed = costs.of_call(trains=True), assumed.of_call(trains=True)
    between = assumed.replica_between or assumed.replica_in_node
    low, high = min(assumed.replica_in_node, between), max(assumed.replica_in_node, between)
    of_replica = -(-low // FACTOR), FACTOR * high
    for name, value, (least, most) in (
        ("the overhead per expert", costs.expert_overhead, (0, FACTOR * assumed.expert_overhead)),
        ("a replica inside a node", costs.replica_in_node if is_measured[0] else high, of_replica),
        ("a replica between nodes", costs.replica_between if is_measured[1] else high, of_replica),
    ):
        if value is not None and not least <= value <= most:
            return f"{name} took as long as {value} assignments, and {least} to {most} are plausible"
    return None


def _run_expert(weights: Slab, assignments: int) -> None:
    """Run the forward and the backward pass of one expert with `assignments` rows."""
    from moe.layer import Setting, routed_experts  # imports placement

    tensors = [each[:1].clone().requires_grad_() for each in weights.tensors]
    x = weights.fc1.detach().new_ones(assignments, weights.fc1.size(2)).requires_grad_()
    probs = x.new_ones(assignments, 1, dtype=torch.float32)
    with torch.enable_grad():
        output = routed_experts(
            x, probs, probs.bool(), weights.like(*tensors), Plan(), Setting(assignments_per_token=1)
        )
        output.backward(torch.ones_like(output))


def peer_of(rank: int, distance: int, ranks: int) -> int:
    """Return the rank that is `distance` after `rank` in a ring of `ranks` consecutive ranks."""
    return rank // ranks * ranks + (rank + distance) % ranks


def _trip(num_bytes: int, group: dist.ProcessGroup, device: torch.device, distance: int, ranks: int) -> None:
    """Send bytes to the rank `distance` ahead in a ring of `ranks` ranks, and receive as many from behind."""
    rank, sent = group.rank(), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    to, source = peer_of(rank, distance, ranks), peer_of(rank, -distance, ranks)
    Messages(group, {to: [sent]}, {source: [torch.empty_like(sent)]}).wait()
