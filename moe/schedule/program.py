"""Programs: the ordered operations of an MoE layer's passes, which several interpreters compute or estimate.

The interpreters are over_ranks.py and on_one_rank.py with tensors, planning/timing.py with seconds,
planning/footprint.py with bytes in memory, and planning/traffic.py with bytes sent. Each has a table with an entry for
every operation, and raises UnknownOperation if an entry is missing. A program depends on the plan, and on whether there
may be replicas or offloaded weights, never on the load.

The order is PipeMoE's (Shi et al., INFOCOM 2023) with a look-ahead of DEPTH chunks. Forward: while the experts compute
chunk i, the next chunks are dispatched and the last ones combined; the shared expert fills the first wait. Backward is
the same with gradients: a chunk's input gradients are sent before its weight gradients, which fill the waits, are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from moe.chunk_plan import AHEAD, DEPTH, Strategy

Line = TypeVar("Line")
Lines = Mapping[type["Operation"], Callable[[Any, Any], None]]


@dataclass(frozen=True)
class Operation:
    """One operation in a pass of an MoE layer, e.g. dispatching a chunk."""


@dataclass(frozen=True)
class ChunkOperation(Operation):
    """An operation on one chunk of a pass."""

    chunk: int


@dataclass(frozen=True)
class TransferOperation(ChunkOperation):
    """An operation of a chunk's dispatch; `tensor`: "rows" (the layer's input) or "grads" (gradients of its output)."""

    tensor: str


class Expect(TransferOperation):
    """Prepare the buffer that receives a chunk's dispatch."""


class Dispatch(TransferOperation):
    """Gather the chunk's rows and send them to their experts' ranks."""


class WaitDispatch(TransferOperation):
    """Wait for the rows of a chunk that other ranks send to this rank."""


class FetchExpert(Operation):
    """Start copying the next layers' offloaded expert weights to the device; this layer's copy has started already."""


class WaitExpert(Operation):
    """Wait for this layer's offloaded expert weights."""


class StoreExpert(Operation):
    """Add the call's gradients of offloaded experts to the step's sums, and start copying complete sums out."""


class FetchReplicas(Operation):
    """Start sending experts' weights to new replicas, and the gradients of replaced replicas to primaries."""


class WaitReplicas(Operation):
    """Wait for the weights and gradients that FetchReplicas has started to send."""


class ReturnGrads(Operation):
    """Add the call's gradients of replicas to the step's sums, and start sending complete sums to the primaries."""


class WaitGrads(Operation):
    """Wait for the gradients that replicas on other ranks return to this rank's primaries."""


class SendAssignments(Operation):
    """Start sending the packed ids and probabilities of all chunks' assignments to the ranks of their experts."""


class TakeAssignments(Operation):
    """Wait for the other ranks' assignments, and sort them into both passes' chunks."""


class SharedExpert(Operation):
    """Compute the shared expert."""


class SharedExpertGrad(Operation):
    """Compute the shared expert's gradients."""


class Experts(ChunkOperation):
    """Compute the experts of a chunk, and the weighted sums of their outputs for each received row."""


class InputGrads(ChunkOperation):
    """Compute the gradients of a chunk's rows and probabilities, from kept or restored activations."""


class ExpertWeightGrads(ChunkOperation):
    """Compute and add a chunk's weight gradients, and free the tensors that they were computed from."""


class Combine(ChunkOperation):
    """Start returning a chunk's weighted sums (backward pass: its rows' gradients) to the ranks of the tokens."""


class SumCombine(ChunkOperation):
    """Wait for the returned rows of a chunk of this rank's tokens, and sum them per token."""


class Offload(ChunkOperation):
    """Start copying to the host those activations of a chunk that the memory strategy offloads."""


class Fetch(ChunkOperation):
    """Start copying a chunk's offloaded activations from the host back to the device."""


class Release(ChunkOperation):
    """Free the chunk's buffers that no later operation reads."""


class SendProbsGrad(Operation):
    """Start returning the gradients of all probabilities to the ranks of the tokens."""


class TakeProbsGrad(Operation):
    """Wait for the gradients of the probabilities of this rank's own assignments."""


class LocalExperts(ChunkOperation):
    """Compute the experts of a chunk, from the layer's input to its output, on a rank that has all experts."""


class LocalGrads(ChunkOperation):
    """Compute all gradients of a chunk, on a rank that has all experts."""


Program = tuple[Operation, ...]


@cache
def forward(degree: int, strategy: Strategy, replicas: bool = False, streamed: bool = False) -> Program:
    """Return the program of a forward pass in `degree` chunks, with experts on several ranks.

    `replicas`: experts may have replicas on other ranks; `streamed`: the experts' weights are offloaded.
    """
    # If rows are kept, there is memory for all chunks from the start.
    ahead = degree if strategy.token_rows == "keep" else AHEAD
    program: list[Operation] = [FetchExpert()] if streamed else []
    if replicas:  # primaries send their weights, which must be on the device
        program += [WaitExpert(), FetchReplicas()] if streamed else [FetchReplicas()]
    program.append(SendAssignments())
    program += [Expect(i, "rows") for i in range(min(ahead + 1, degree))]
    program += [Dispatch(i, "rows") for i in range(min(DEPTH, degree))]
    program += [SharedExpert(), TakeAssignments()]
    for i in range(degree):
        if i + DEPTH < degree:
            program.append(Dispatch(i + DEPTH, "rows"))
        if i > 0 and i + ahead < degree:
            program.append(Expect(i + ahead, "rows"))
        program.append(WaitDispatch(i, "rows"))
        if replicas and i == 0:  # every chunk has a share of each replica's assignments
            program.append(WaitReplicas())
        if streamed and not replicas and i == 0:
            program.append(WaitExpert())
        program += [Experts(i), Combine(i)]
        if strategy.offloads:
            program.append(Offload(i))
        program.append(Release(i))
        if i >= DEPTH:
            program.append(SumCombine(i - DEPTH))
    program += [SumCombine(i) for i in range(max(0, degree - DEPTH), degree)]
    return tuple(program)


@cache
def backward(degree: int, strategy: Strategy, lag: int, replicas: bool = False, streamed: bool = False) -> Program:
    """Return the program of a backward pass in `degree` chunks, with experts on several ranks.

    The weight gradients of chunk i follow the input gradients of chunk i + `lag`. `replicas`: experts may have replicas
    on other ranks; `streamed`: the experts' weights are offloaded.
    """
    again, fetches = strategy.token_rows == "communicate", strategy.offloads
    sent = ("grads", "rows") if again else ("grads",)
    if again and strategy.preactivations == "recompute":
        sent = ("rows", "grads")  # the experts read the rows first
    awaited = ("rows", "grads") if again else ("grads",)
    program: list[Operation] = [FetchExpert()] if streamed else []
    program += [Expect(i, tensor) for tensor in ("grads", "rows")[: len(sent)] for i in range(min(AHEAD + 1, degree))]
    program += [Dispatch(i, tensor) for i in range(min(DEPTH, degree)) for tensor in sent]
    if fetches:
        program.append(Fetch(0))
    program.append(SharedExpertGrad())
    for i in range(degree):
        if i + DEPTH < degree:
            program += [Dispatch(i + DEPTH, tensor) for tensor in sent]
        if fetches and i + 1 < degree:
            program.append(Fetch(i + 1))
        for tensor in awaited:
            if i > 0 and i + AHEAD < degree:
                program.append(Expect(i + AHEAD, tensor))
            program.append(WaitDispatch(i, tensor))
        if streamed and i == 0:
            program.append(WaitExpert())
        program += [InputGrads(i), Combine(i), Release(i)]
        if i + 1 == degree:
            program.append(SendProbsGrad())
        if i >= lag:
            program.append(ExpertWeightGrads(i - lag))
        if i >= DEPTH:
            program.append(SumCombine(i - DEPTH))
    program += [ExpertWeightGrads(i) for i in range(max(0, degree - lag), degree)]
    if replicas:
        program.append(ReturnGrads())
    program += [SumCombine(i) for i in range(max(0, degree - DEPTH), degree)]
    program.append(TakeProbsGrad())
    if replicas:
        program.append(WaitGrads())
    if streamed:
        program.append(StoreExpert())
    return tuple(program)


@cache
def local_forward(degree: int, strategy: Strategy, streamed: bool = False) -> Program:
    """Return the program of a forward pass on a rank that has all experts. `streamed`: the weights are offloaded."""
    program: list[Operation] = [FetchExpert(), WaitExpert()] if streamed else []
    for i in range(degree):
        program.append(LocalExperts(i))
        if strategy.preactivations == "offload":
            program.append(Offload(i))
        program.append(Release(i))
    return tuple(program)


@cache
def local_backward(degree: int, strategy: Strategy, streamed: bool = False) -> Program:
    """Return the program of a backward pass on a rank that has all experts. `streamed`: the weights are offloaded."""
    fetches = strategy.preactivations == "offload"
    program: list[Operation] = [Fetch(0)] if fetches else []
    if streamed:
        program += [FetchExpert(), WaitExpert()]
    for i in range(degree):
        if fetches and i + 1 < degree:
            program.append(Fetch(i + 1))
        program += [LocalGrads(i), Release(i)]
    if streamed:
        program.append(StoreExpert())
    return tuple(program)


class UnknownOperation(TypeError):
    """Error for an operation that is missing in an interpreter's table."""


def line_for(table: Mapping[type[Operation], Line], operation: Operation, interpreter: str) -> Line:
    """Return an interpreter's entry for an operation. Raises UnknownOperation with both names if there is none."""
    try:
        return table[type(operation)]
    except KeyError:
        raise UnknownOperation(
            f"{interpreter} does not know the operation {type(operation).__name__}. Add a line for it."
        ) from None


def perform(operations: Program, lines: Lines, state: Any, interpreter: str) -> None:
    """Run a program with tensors: call each operation's function in `lines`, which changes the state of the pass."""
    for operation in operations:
        line_for(lines, operation, interpreter)(state, operation)
