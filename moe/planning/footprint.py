"""The bytes of a call: goes through its programs (schedule/program.py), buffer by buffer, without computing anything.

Tests hold the result to what a tracker of live tensors counts. Bytes on the busiest rank, beyond the layer's input,
weights and their gradients. What is offloaded is elsewhere. Chunks are taken to be equal: with random routing what is
measured is 0.98 to 1.002 of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from moe.chunk_plan import FP32, MAX_IN_FLIGHT, STRATEGIES, WHOLE, LayerLoad, Plan, Strategy
from moe.experts import sizes as expert_sizes
from moe.experts.sizes import SPARE_ROWS
from moe.schedule import program
from moe.schedule.program import Operation

INDEX_BYTES = 190  # of an assignment: who goes where, in all the forms that both passes need
LOCAL_INDEX_BYTES = 56  # of one that does not travel

# USE: take and give back at once. FLY: an exchange has begun, after which the oldest may be over
TAKE, GIVE, USE, FLY = range(4)
Step = tuple[int, str]  # what is done with a buffer, and its name among the sizes
Sizes = dict[str, int]  # by name: numbers of the load's kind


def _sum_combine(operation: program.SumCombine) -> list[Step]:
    # The result exists from the first part on.
    return [*([(TAKE, "output")] if operation.chunk == 0 else []), (USE, "part"), (GIVE, "sums")]


def _local(operation: program.LocalExperts | program.LocalGrads) -> list[Step]:
    result = [(TAKE, "output")] if operation.chunk == 0 else []
    computed = [(TAKE, "expert_rows"), (USE, "scratch"), (TAKE, "sums"), (USE, "part"), (GIVE, "expert_rows")]
    return [*result, (TAKE, "regrouped"), *computed]


LINES: dict[type[Operation], Callable[[Any], list[Step]]] = {
    # Slots and the link are the rank's, not the layer's: simulator/clock/streams.py counts what comes and goes.
    program.FetchExpert: lambda operation: [],
    program.WaitExpert: lambda operation: [],
    program.StoreExpert: lambda operation: [],
    # What is sent is packed, and what comes is taken apart.
    program.FetchCopies: lambda operation: [(TAKE, "copies")],
    program.WaitCopies: lambda operation: [(GIVE, "copies")],
    program.ReturnGrads: lambda operation: [(GIVE, "new_copy_grads"), (TAKE, "copy_grads")],
    program.WaitGrads: lambda operation: [(GIVE, "copy_grads")],
    program.SendAssignments: lambda operation: [(FLY, "nothing")],
    program.Expect: lambda operation: [(TAKE, "received")],
    program.Dispatch: lambda operation: [(TAKE, "sent"), (FLY, "sent")],
    program.SharedExpert: lambda operation: [],
    program.TakeAssignments: lambda operation: [],
    program.WaitDispatch: lambda operation: [],
    program.Experts: lambda operation: [
        (TAKE, "offloaded"),
        (TAKE, "expert_rows"),
        (USE, "scratch"),
        (TAKE, "sums"),
        (GIVE, "expert_rows"),
    ],
    # room for those that come home; those that are there set out
    program.Combine: lambda operation: [(TAKE, "sums"), (FLY, "sums")],
    program.Offload: lambda operation: [],
    program.SumCombine: _sum_combine,
    program.Fetch: lambda operation: [(TAKE, "fetched")],
    program.SharedExpertGrad: lambda operation: [],
    program.InputGrads: lambda operation: [
        (TAKE, "regrouped"),
        (TAKE, "expert_rows"),
        (TAKE, "work"),
        (USE, "scratch"),
        (TAKE, "sums"),
        (GIVE, "expert_rows"),
    ],
    program.Release: lambda operation: [(GIVE, "offloaded"), (GIVE, "released")],
    program.SendProbsGrad: lambda operation: [(FLY, "nothing")],
    program.ExpertWeightGrads: lambda operation: [
        *([(TAKE, "new_copy_grads")] if operation.chunk == 0 else []),
        (USE, "weight_scratch"),
        (GIVE, "work"),
        (GIVE, "read"),
    ],
    program.TakeProbsGrad: lambda operation: [],
    program.LocalExperts: lambda operation: [(TAKE, "offloaded"), *_local(operation)],
    program.LocalGrads: _local,
}


def ledger(operations: Sequence[Operation]) -> tuple[Step, ...]:
    """The buffers that a program takes and gives back. Raises UnknownOperation for an operation that has no line
    here."""
    steps: list[Step] = []
    flying: list[str] = []
    for operation in operations:
        for kind, name in program.line_for(LINES, operation, "planning/footprint.py")(operation):
            if kind != FLY:
                steps.append((kind, name))
                continue
            flying.append(name)
            if len(flying) > MAX_IN_FLIGHT:
                steps.append((GIVE, flying.pop(0)))
    return tuple(steps)


@cache
def _forward_ledger(degree: int, strategy: Strategy, copies: bool) -> tuple[Step, ...]:
    return ledger(program.forward(degree, strategy, copies))


@cache
def _backward_ledger(degree: int, strategy: Strategy, lag: int, copies: bool) -> tuple[Step, ...]:
    return ledger(program.backward(degree, strategy, lag, copies))


@cache
def _local_forward_ledger(degree: int, strategy: Strategy) -> tuple[Step, ...]:
    return ledger(program.local_forward(degree, strategy))


@cache
def _local_backward_ledger(degree: int, strategy: Strategy) -> tuple[Step, ...]:
    return ledger(program.local_backward(degree, strategy))


def peak(steps: Sequence[Step], sizes: Mapping[str, int]) -> int:
    """The most that is in use at once."""
    now = most = 0
    for kind, name in steps:
        if kind == TAKE:
            now += sizes[name]
            if now > most:
                most = now
        elif kind == GIVE:
            now -= sizes[name]
        elif now + sizes[name] > most:
            most = now + sizes[name]
    return most


# ---------------------------------------------------------------------------------------------------------------------
# Experts on several ranks
# ---------------------------------------------------------------------------------------------------------------------


def kept_bytes(load: LayerLoad, strategy: Strategy) -> int:
    """What lives from the forward to the backward pass."""
    rows = load.rows * load.hidden_size if strategy.rows == "keep" else 0
    preactivations = (load.assignments + _spare(load)) * load.hidden_columns if strategy.preactivations == "keep" else 0
    return (rows + preactivations) * load.element_size + load.assignments * INDEX_BYTES


def forward_bytes(load: LayerLoad, strategy: Strategy, degree: int) -> int:
    """The most that the forward pass has beside that."""
    chunk = _Chunk(load, degree)
    received = 0 if strategy.rows == "keep" else chunk.rows
    sizes = chunk.sizes | {
        "received": received,
        "released": received,
        "offloaded": chunk.preactivations if strategy.preactivations == "offload" else 0,
        "scratch": expert_sizes.forward_scratch(load, chunk.block, strategy.preactivations == "recompute"),
    }
    return peak(_forward_ledger(degree, strategy, load.has_copies), sizes) * load.element_size


def backward_bytes(load: LayerLoad, strategy: Strategy, degree: int, weight_lag: int, same: bool) -> int:
    """The most that the backward pass has beside that; `same`: the forward pass had as many chunks."""
    chunk = _Chunk(load, degree)
    offloaded = chunk.preactivations if strategy.preactivations == "offload" else 0
    copied = chunk.assignments * load.hidden_columns + 16 * load.assignments // load.element_size
    regrouped = 0 if same or strategy.preactivations != "keep" else copied
    sizes = chunk.sizes | {
        "received": chunk.rows,
        "offloaded": offloaded,
        "fetched": (chunk.rows if strategy.rows == "offload" else 0) + offloaded,
        "regrouped": regrouped,
        "released": regrouped,
        "scratch": expert_sizes.input_scratch(load, chunk.block, strategy.preactivations == "recompute"),
        "work": (chunk.assignments + _spare(load)) * (load.hidden_columns + load.width),
        "read": chunk.rows * (1 if strategy.rows == "keep" else 2),  # gradients, and rows that nobody else keeps
        "weight_scratch": expert_sizes.weight_scratch(load, chunk.block),
    }
    return peak(_backward_ledger(degree, strategy, weight_lag, load.has_copies), sizes) * load.element_size


def memory_bytes(load: LayerLoad, plan: Plan, live_calls: int = 1) -> int:
    """Peak bytes of buffers on the busiest rank: what `live_calls` calls keep between their passes, and the workspaces
    of one of their passes, the larger one's: passes follow one another."""
    strategy, same = STRATEGIES[plan.memory_strategy], plan.degree == plan.backward_degree
    forward = forward_bytes(load, strategy, plan.degree)
    backward = backward_bytes(load, strategy, plan.backward_degree, plan.weight_lag, same)
    return live_calls * kept_bytes(load, strategy) + max(forward, backward)


# ---------------------------------------------------------------------------------------------------------------------
# All experts on one rank
# ---------------------------------------------------------------------------------------------------------------------


def local_bytes(load: LayerLoad, plan: Plan) -> tuple[int, int, int]:
    """(what lives from the forward to the backward pass, the most of the forward pass, of the backward pass beside the
    weights' gradients) of a call without other ranks."""
    strategy, element = STRATEGIES[plan.memory_strategy], load.element_size
    keeps = strategy.preactivations == "keep"
    preactivations = (load.assignments + _spare(load)) * load.hidden_columns if keeps else 0
    kept = load.assignments * LOCAL_INDEX_BYTES + preactivations * element

    offloads = strategy.preactivations == "offload"

    def sizes(
        degree: int, regrouped: int, scratch: Callable[[LayerLoad, int, bool], int], computes_again: bool
    ) -> Sizes:
        chunk = _Chunk(load, degree)
        offloaded = chunk.preactivations if offloads else 0
        result = chunk.sizes | {
            "offloaded": offloaded,
            "fetched": offloaded,
            "regrouped": regrouped,
            "released": regrouped,
        }
        # The only chunk's sums are the result; of several, the result is there before the first.
        result |= {"sums": chunk.sizes["output"], "output": 0} if degree == 1 else {"sums": 0}
        return result | {"scratch": scratch(load, chunk.block, computes_again)}

    degree, backward_degree = plan.degree, plan.backward_degree
    regrouped = (
        _Chunk(load, backward_degree).assignments * load.hidden_columns if keeps and degree != backward_degree else 0
    )
    forward = sizes(degree, 0, expert_sizes.forward_scratch, not keeps)
    backward = sizes(backward_degree, regrouped, expert_sizes.both_scratch, not keeps)
    most = (
        peak(_local_forward_ledger(degree, strategy), forward),
        peak(_local_backward_ledger(backward_degree, strategy), backward),
    )
    return kept, most[0] * element, most[1] * element


def _spare(load: LayerLoad) -> int:
    return SPARE_ROWS if load.block < WHOLE else 0


class _Chunk:
    """Numbers in the buffers of one of `degree` chunks."""

    def __init__(self, load: LayerLoad, degree: int) -> None:
        self.assignments = -(-load.assignments // degree)
        self.rows = -(-load.rows // degree) * load.hidden_size
        # of one expert, or of all where one product takes them all
        of_expert = min(self.assignments, load.block, -(-load.expert_assignments // degree))
        self.block = self.assignments if load.block == WHOLE else of_expert
        with_spare = self.assignments + _spare(load)
        self.preactivations = with_spare * load.hidden_columns
        output = load.tokens * load.hidden_size
        self.sizes: Sizes = {
            "nothing": 0,
            "copies": 2 * load.slot_numbers,
            "new_copy_grads": load.slot_numbers,
            "copy_grads": 2 * load.slot_numbers * max(load.element_size, FP32) // load.element_size,
            "sent": -(-load.away_rows // degree) * load.hidden_size,
            "sums": self.rows,
            "expert_rows": with_spare * load.hidden_size,
            "output": output,
            # A part of it that is not added up in its place, as it is on the host.
            "part": output // degree if degree > 1 and load.block == WHOLE else 0,
        }
