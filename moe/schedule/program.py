"""What the passes of an MoE layer's call do, in order: the one place that says so.

Its interpreters go through a program: over_ranks.py and on_one_rank.py with tensors, planning/timing.py with seconds,
planning/footprint.py with bytes in memory, and planning/traffic.py with bytes that travel. Each has a table with a line
for every operation; what it does not know it refuses by name. A program follows from
the plan alone, and whether there may be copies, never from the load.

The order is PipeMoE's (Shi et al., INFOCOM 2023) with a look-ahead of DEPTH chunks. Forward: while the experts compute
chunk i, the next chunks are dispatched and the last ones combined; the shared expert fills the first wait. Backward is
the same with gradients: a chunk's input gradients leave before its weight gradients are computed, which fill the waits.
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
    """One step of a pass."""


@dataclass(frozen=True)
class ChunkOperation(Operation):
    """One step of one chunk."""

    chunk: int


@dataclass(frozen=True)
class TransferOperation(ChunkOperation):
    """One step of a chunk's dispatch. `tensor` says what travels: "rows" (the layer's input) or "grads" (of its
    output)."""

    tensor: str


class Expect(TransferOperation):
    """Have a receive buffer ready."""


class Dispatch(TransferOperation):
    """Gather the chunk's rows and send them to their experts' ranks."""


class WaitDispatch(TransferOperation):
    """Wait for what the other ranks dispatched."""


class FetchExpert(Operation):
    """Have the weights of the layers that are used next come to the device, where experts lie off it; this layer's are
    on their way."""


class WaitExpert(Operation):
    """Wait for this layer's."""


class StoreExpert(Operation):
    """Add the call's gradients of experts off the device to the step's; what is complete leaves."""


class FetchCopies(Operation):
    """Send the weights of experts at home here whose copies others take up, receive those of copies here; and send home
    the gradients of copies that lose their slots."""


class WaitCopies(Operation):
    """Wait for them."""


class ReturnGrads(Operation):
    """Add the call's gradients of copies to what earlier calls had, and send home what is complete."""


class WaitGrads(Operation):
    """Wait for what comes home."""


class SendAssignments(Operation):
    """Send each assignment's packed id and probability to its expert's rank, for all chunks."""


class TakeAssignments(Operation):
    """Wait for those of the other ranks, and sort them into both passes' chunks."""


class SharedExpert(Operation):
    """Compute the shared expert."""


class SharedExpertGrad(Operation):
    """Its backward pass."""


class Experts(ChunkOperation):
    """Compute the chunk's experts, and the weighted sum of each row."""


class InputGrads(ChunkOperation):
    """Compute the gradients of the chunk's rows and probabilities; the activations that it needs are there or computed
    again."""


class ExpertWeightGrads(ChunkOperation):
    """Compute what the chunk adds to the gradients of the experts' weights, and let go of what that reads."""


class Combine(ChunkOperation):
    """Send the chunk's sums (backward: the rows' gradients) home."""


class SumCombine(ChunkOperation):
    """Wait for what comes home of a chunk of this rank's tokens, and add it up per token."""


class Offload(ChunkOperation):
    """Begin to copy to the host what the strategy keeps there."""


class Fetch(ChunkOperation):
    """Begin to bring back what is on the host."""


class Release(ChunkOperation):
    """Let go of those of the chunk's buffers that nobody needs any more."""


class SendProbsGrad(Operation):
    """Send the gradients of all probabilities home."""


class TakeProbsGrad(Operation):
    """Wait for those of this rank's own assignments."""


class LocalExperts(ChunkOperation):
    """Compute the chunk's experts from the layer's input into its output: this rank has all experts."""


class LocalGrads(ChunkOperation):
    """Compute all gradients of such a chunk."""


Program = tuple[Operation, ...]


@cache
def forward(degree: int, strategy: Strategy, copies: bool = False, streamed: bool = False) -> Program:
    """The forward pass in `degree` chunks over several ranks; `copies`: experts may have copies on other ranks;
    `streamed`: their weights lie off the device."""
    # What is kept has room for all chunks at once.
    ahead = degree if strategy.rows == "keep" else AHEAD
    program: list[Operation] = [FetchExpert()] if streamed else []
    if copies:  # of what is at home, which must be here
        program += [WaitExpert(), FetchCopies()] if streamed else [FetchCopies()]
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
        if copies and i == 0:  # every chunk has its share of each copy's assignments
            program.append(WaitCopies())
        if streamed and not copies and i == 0:
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
def backward(degree: int, strategy: Strategy, lag: int, copies: bool = False, streamed: bool = False) -> Program:
    """The backward pass in `degree` chunks over several ranks; the weight gradients of chunk i follow the input
    gradients of i + `lag`. `copies`, `streamed`: see `forward`."""
    again, fetches = strategy.rows == "communicate", strategy.offloads
    sent = ("grads", "rows") if again else ("grads",)
    if again and strategy.preactivations == "recompute":
        sent = ("rows", "grads")  # the rows are read first
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
    if copies:
        program.append(ReturnGrads())
    program += [SumCombine(i) for i in range(max(0, degree - DEPTH), degree)]
    program.append(TakeProbsGrad())
    if copies:
        program.append(WaitGrads())
    if streamed:
        program.append(StoreExpert())
    return tuple(program)


@cache
def local_forward(degree: int, strategy: Strategy, streamed: bool = False) -> Program:
    """The forward pass where this rank has all experts: nothing travels. `streamed`: see `forward`."""
    program: list[Operation] = [FetchExpert(), WaitExpert()] if streamed else []
    for i in range(degree):
        program.append(LocalExperts(i))
        if strategy.preactivations == "offload":
            program.append(Offload(i))
        program.append(Release(i))
    return tuple(program)


@cache
def local_backward(degree: int, strategy: Strategy, streamed: bool = False) -> Program:
    """Its backward pass."""
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
    """An interpreter has no line for an operation."""


def line_for(table: Mapping[type[Operation], Line], operation: Operation, interpreter: str) -> Line:
    """An interpreter's line for an operation. Raises UnknownOperation, which names both, where it has none."""
    try:
        return table[type(operation)]
    except KeyError:
        raise UnknownOperation(f"{interpreter} does not know the operation {type(operation).__name__}") from None


def perform(operations: Program, lines: Lines, state: Any, interpreter: str) -> None:
    """Go through a program with tensors: a line is what an operation does to the state of a pass."""
    for operation in operations:
        line_for(lines, operation, interpreter)(state, operation)
