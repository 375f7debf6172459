"""Device memory of a call: an interpreter of its programs (schedule/program.py) that only counts buffers.

Tests compare the result with a tracker of live tensors. Bytes are those of the busiest rank, without the layer's input,
weights, weight gradients and offloaded tensors. Chunks are assumed to be equal: with random routing the measured memory
is 0.98 to 1.002 times the result.
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

INDEX_BYTES = 190  # per assignment: its token, rank and expert slot, in all the forms that both passes need
LOCAL_INDEX_BYTES = 56  # per assignment that stays on its rank

# USE: take and give back at once. FLY: an exchange starts; with too many in flight, the oldest one finishes.
TAKE, GIVE, USE, FLY = range(4)
Step = tuple[int, str]  # a kind of access to a buffer, and its name among the sizes
Sizes = dict[str, int]  # elements (in the load's dtype) of each buffer, by name

_EXPERTS: list[Step] = [(TAKE, "expert_rows"), (USE, "scratch"), (TAKE, "sums"), (GIVE, "expert_rows")]
_no_buffer: Callable[[Any], list[Step]] = lambda operation: []  # noqa: E731


def _with_first(operation: program.ChunkOperation, name: str) -> list[Step]:
    """Return the access to a buffer that exists from the first chunk on."""
    return [(TAKE, name)] if operation.chunk == 0 else []


def _local(operation: program.LocalExperts | program.LocalGrads) -> list[Step]:
    computed = [(TAKE, "expert_rows"), (USE, "scratch"), (TAKE, "sums"), (USE, "chunk_sum"), (GIVE, "expert_rows")]
    return [*_with_first(operation, "output"), (TAKE, "regrouped"), *computed]


LINES: dict[type[Operation], Callable[[Any], list[Step]]] = {
    **dict.fromkeys((program.TakeAssignments, program.WaitDispatch, program.TakeProbsGrad), _no_buffer),
    **dict.fromkeys((program.SharedExpert, program.SharedExpertGrad, program.Offload), _no_buffer),
    # Slots and the link belong to the rank, not to the layer: simulator/clock/streams.py counts these transfers.
    **dict.fromkeys((program.FetchExpert, program.WaitExpert, program.StoreExpert), _no_buffer),
    # Messages are packed before they are sent and unpacked after they arrive.
    program.FetchReplicas: lambda operation: [(TAKE, "copies")],
    program.WaitReplicas: lambda operation: [(GIVE, "copies")],
    program.ReturnGrads: lambda operation: [(GIVE, "new_copy_grads"), (TAKE, "copy_grads")],
    program.WaitGrads: lambda operation: [(GIVE, "copy_grads")],
    program.SendAssignments: lambda operation: [(FLY, "nothing")],
    program.Expect: lambda operation: [(TAKE, "received")],
    program.Dispatch: lambda operation: [(TAKE, "sent"), (FLY, "sent")],
    program.Experts: lambda operation: [(TAKE, "offloaded"), *_EXPERTS],
    # a buffer for the rows that return; the computed ones are sent
    program.Combine: lambda operation: [(TAKE, "sums"), (FLY, "sums")],
    program.SumCombine: lambda operation: [*_with_first(operation, "output"), (USE, "chunk_sum"), (GIVE, "sums")],
    program.Fetch: lambda operation: [(TAKE, "fetched")],
    program.InputGrads: lambda operation: [(TAKE, "regrouped"), (TAKE, "work"), *_EXPERTS],
    program.Release: lambda operation: [(GIVE, "offloaded"), (GIVE, "released")],
    program.SendProbsGrad: lambda operation: [(FLY, "nothing")],
    program.ExpertWeightGrads: lambda operation: [
        *_with_first(operation, "new_copy_grads"),
        (USE, "weight_scratch"),
        (GIVE, "work"),
        (GIVE, "read"),
    ],
    program.LocalExperts: lambda operation: [(TAKE, "offloaded"), *_local(operation)],
    program.LocalGrads: _local,
}


def ledger(operations: Sequence[Operation]) -> tuple[Step, ...]:
    """Return a program's accesses to buffers, in order: the kind (TAKE, GIVE or USE) and the buffer's name.

    Raises UnknownOperation for an operation that is not in LINES.
    """
    steps: list[Step] = []
    in_flight: list[str] = []
    for operation in operations:
        for kind, name in program.line_for(LINES, operation, "planning/footprint.py")(operation):
            if kind != FLY:
                steps.append((kind, name))
                continue
            in_flight.append(name)
            if len(in_flight) > MAX_IN_FLIGHT:
                steps.append((GIVE, in_flight.pop(0)))
    return tuple(steps)


@cache
def _ledger(make_program: Callable[..., Sequence[Operation]], *arguments: Any) -> tuple[Step, ...]:
    """Return the buffer accesses of the program that `make_program` makes; results are cached."""
    return ledger(make_program(*arguments))


def peak(steps: Sequence[Step], sizes: Mapping[str, int]) -> int:
    """Return the peak total size of the buffers in use, in elements."""
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


def kept_bytes(load: LayerLoad, strategy: Strategy) -> int:
    """Return the bytes that a call keeps from its forward to its backward pass, on the busiest rank."""
    token_rows = load.token_rows * load.hidden_size if strategy.token_rows == "keep" else 0
    preactivations = (load.assignments + _spare(load)) * load.hidden_columns if strategy.preactivations == "keep" else 0
    return (token_rows + preactivations) * load.element_size + load.assignments * INDEX_BYTES


def forward_bytes(load: LayerLoad, strategy: Strategy, degree: int) -> int:
    """Return the peak bytes of a forward pass in `degree` chunks, without the bytes that `kept_bytes` counts."""
    chunk = _Chunk(load, degree, strategy)
    received = 0 if strategy.token_rows == "keep" else chunk.token_rows
    sizes = chunk.sizes | {
        "received": received,
        "released": received,
        "scratch": expert_sizes.forward_scratch(load, chunk.block, strategy.preactivations == "recompute"),
    }
    return peak(_ledger(program.forward, degree, strategy, load.has_replicas), sizes) * load.element_size


def backward_bytes(load: LayerLoad, strategy: Strategy, degree: int, weight_lag: int, same: bool) -> int:
    """Return the peak bytes of a backward pass, without those of `kept_bytes`. `same`: both passes have the
    same number of chunks."""
    chunk = _Chunk(load, degree, strategy)
    copied = chunk.assignments * load.hidden_columns + 16 * load.assignments // load.element_size
    regrouped = 0 if same or strategy.preactivations != "keep" else copied
    sizes = chunk.sizes | {
        "received": chunk.token_rows,
        "fetched": (chunk.token_rows if strategy.token_rows == "offload" else 0) + chunk.offloaded,
        "regrouped": regrouped,
        "released": regrouped,
        "scratch": expert_sizes.input_scratch(load, chunk.block, strategy.preactivations == "recompute"),
        "work": (chunk.assignments + _spare(load)) * (load.hidden_columns + load.width),
        # gradients, and token rows that are not kept
        "read": chunk.token_rows * (1 if strategy.token_rows == "keep" else 2),
        "weight_scratch": expert_sizes.weight_scratch(load, chunk.block),
    }
    return peak(_ledger(program.backward, degree, strategy, weight_lag, load.has_replicas), sizes) * load.element_size


def memory_bytes(load: LayerLoad, plan: Plan, live_calls: int = 1) -> int:
    """Return the peak bytes of a layer's buffers on the busiest rank with this chunk plan.

    `live_calls`: calls between their two passes, which all keep tensors. Only one pass runs at a time, so the larger
    workspace of the two passes is added once.
    """
    strategy, same = STRATEGIES[plan.memory_strategy], plan.degree == plan.backward_degree
    forward = forward_bytes(load, strategy, plan.degree)
    backward = backward_bytes(load, strategy, plan.backward_degree, plan.weight_lag, same)
    return live_calls * kept_bytes(load, strategy) + max(forward, backward)


def local_bytes(load: LayerLoad, plan: Plan) -> tuple[int, int, int]:
    """Return the bytes of a call without expert parallelism: (kept between the passes, forward peak, backward peak).

    Weight gradients are not included.
    """
    strategy, element = STRATEGIES[plan.memory_strategy], load.element_size
    keeps = strategy.preactivations == "keep"
    preactivations = (load.assignments + _spare(load)) * load.hidden_columns if keeps else 0
    kept = load.assignments * LOCAL_INDEX_BYTES + preactivations * element

    def sizes(degree: int, regrouped: int, scratch: Callable[[LayerLoad, int, bool], int]) -> Sizes:
        chunk = _Chunk(load, degree, strategy)
        result = chunk.sizes | {"fetched": chunk.offloaded, "regrouped": regrouped, "released": regrouped}
        # With one chunk its sums are the result; with several, the result exists before the first.
        result |= {"sums": chunk.sizes["output"], "output": 0} if degree == 1 else {"sums": 0}
        return result | {"scratch": scratch(load, chunk.block, not keeps)}

    degree, backward_degree = plan.degree, plan.backward_degree
    regroups = keeps and degree != backward_degree
    regrouped = _Chunk(load, backward_degree, strategy).assignments * load.hidden_columns if regroups else 0
    forward = sizes(degree, 0, expert_sizes.forward_scratch)
    backward = sizes(backward_degree, regrouped, expert_sizes.both_scratch)
    forward_peak = peak(_ledger(program.local_forward, degree, strategy), forward)
    backward_peak = peak(_ledger(program.local_backward, backward_degree, strategy), backward)
    return kept, forward_peak * element, backward_peak * element


def _spare(load: LayerLoad) -> int:
    return SPARE_ROWS if load.block < WHOLE else 0


class _Chunk:
    """Buffer sizes, in elements, of a call that is split into `degree` equal chunks."""

    def __init__(self, load: LayerLoad, degree: int, strategy: Strategy) -> None:
        self.assignments = -(-load.assignments // degree)
        self.token_rows = -(-load.token_rows // degree) * load.hidden_size
        # of one expert, or of all experts if one grouped matmul computes them
        of_expert = min(self.assignments, load.block, -(-load.expert_assignments // degree))
        self.block = self.assignments if load.block == WHOLE else of_expert
        with_spare = self.assignments + _spare(load)
        self.offloaded = with_spare * load.hidden_columns if strategy.preactivations == "offload" else 0
        output = load.tokens * load.hidden_size
        self.sizes: Sizes = {
            "nothing": 0,
            "copies": 2 * load.replica_numbers,
            "new_copy_grads": load.replica_numbers,
            "copy_grads": 2 * load.replica_numbers * max(load.element_size, FP32) // load.element_size,
            "sent": -(-load.away_rows // degree) * load.hidden_size,
            "sums": self.token_rows,
            "expert_rows": with_spare * load.hidden_size,
            "offloaded": self.offloaded,
            "output": output,
            # A chunk's sum, unless it is added in place, as on the host.
            "chunk_sum": output // degree if degree > 1 and load.block == WHOLE else 0,
        }
