"""Measurement of the costs of expert placement: time per assignment, overhead per expert, and sending replicas."""

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
ROUNDS = 9  # each measures everything once, so that a busy moment of the machine affects all values equally
FACTOR = 64  # greatest plausible ratio of a measured to an assumed cost; beyond it is noise or a busy machine


@dataclass(frozen=True)
class Measured:
    """The result of a measurement of placement costs, with an error text if the costs are not plausible."""

    costs: Costs
    assignment: float  # seconds per additional assignment of an expert
    problem: str | None  # error text if the costs are not plausible


def measure(
    weights: Slab | None, group: dist.ProcessGroup, node: int, device: torch.device, assumed: Costs
) -> Measured:
    """Measure the costs of expert placement for a layer's weights; each time is the maximum over all ranks of the job.

    `weights`: None on a rank without experts. `node`: consecutive ranks of `group` on one node. Collective over all
    ranks of the job.
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
    """Compute placement costs from the measured seconds of several rounds, and check that they are plausible.

    Each round has six values: the seconds of SMALL and of LARGE assignments; of sending a replica's weights inside a
    node and between nodes; of sending its gradient inside a node and between nodes. A link that does not exist has 0.
    """
    small, large, *trips = (median(column) for column in zip(*rounds, strict=True))
    assignment = (large - small) / (LARGE - SMALL)
    if assignment <= 0:
        problem = f"{LARGE} assignments of an expert took {large:.2g} s, no longer than {SMALL} ({small:.2g} s)"
        return Measured(assumed, assignment, problem)
    in_node, between, grad_in_node, grad_between = (round(seconds / assignment) for seconds in trips)
    costs = Costs(
        expert_overhead=max(0, round(small / assignment - SMALL)),
        # A link that was not measured gets the costs of the other one.
        replica_in_node=in_node or between,
        replica_between=between or in_node,
        grad_in_node=grad_in_node or grad_between,
        grad_between=grad_between or grad_in_node,
    )
    return Measured(costs, assignment, implausible(costs, assumed, is_measured=(trips[0] > 0, trips[1] > 0)))


def implausible(costs: Costs, assumed: Costs, is_measured: tuple[bool, bool] = (True, True)) -> str | None:
    """Return an error text for the first cost that differs too much from the assumed costs (see FACTOR), else None.

    `is_measured`: whether the cost of a replica was measured (inside a node, between nodes).
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
            return f"{name} took as long as {value} assignments; expected {least} to {most}"
    return None


def _run_expert(weights: Slab, assignments: int) -> None:
    """Run the forward and the backward pass of one expert on `assignments` rows."""
    from moe.layer import Setting, routed_experts  # imports placement

    tensors = [each[:1].clone().requires_grad_() for each in weights.tensors]
    x = weights.fc1.detach().new_ones(assignments, weights.fc1.size(2)).requires_grad_()
    probs = x.new_ones(assignments, 1, dtype=torch.float32)
    with torch.enable_grad():
        setting = Setting(assignments_per_token=1)
        output = routed_experts(x, probs, probs.bool(), weights.like(*tensors), Plan(), setting)
        output.backward(torch.ones_like(output))


def peer_of(rank: int, distance: int, ranks: int) -> int:
    """Return the rank `distance` steps after `rank` in its ring of `ranks` consecutive ranks."""
    return rank // ranks * ranks + (rank + distance) % ranks


def _trip(num_bytes: int, group: dist.ProcessGroup, device: torch.device, distance: int, ranks: int) -> None:
    """Send `num_bytes` to the rank `distance` ahead in a ring of `ranks` ranks, and receive `num_bytes` from behind."""
    rank, sent = group.rank(), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    to, source = peer_of(rank, distance, ranks), peer_of(rank, -distance, ranks)
    Messages(group, {to: [sent]}, {source: [torch.empty_like(sent)]}).wait()
