"""Bytes that a rank sends in a call: the sum over the operations of its programs (schedule/program.py).

All numbers are those of the busiest rank, as in `LayerLoad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moe.chunk_plan import LayerLoad
from moe.planning.timing import ASSIGNMENT_BYTES, ASSIGNMENT_GRADIENT_BYTES
from moe.schedule import program
from moe.schedule.program import Operation, Program

TOKEN_ROWS, REPLICAS = "expert_all_to_all", "expert_copies"  # kinds of traffic
Sent = tuple[str, float]  # a kind of traffic, and its bytes
_NOTHING: Callable[[LayerLoad, int], Sent] = lambda load, degree: (TOKEN_ROWS, 0.0)  # noqa: E731


def _token_rows(load: LayerLoad, degree: int) -> Sent:
    return TOKEN_ROWS, load.away_rows * load.hidden_size * load.element_size / degree


def _of_assignments(num_bytes: int) -> Callable[[LayerLoad, int], Sent]:
    # Assignments are sent to other ranks in the same proportion as token rows.
    return lambda load, _: (TOKEN_ROWS, load.assignments * load.away_rows / max(load.token_rows, 1) * num_bytes)


_SILENT: tuple[type[Operation], ...] = (  # operations that send nothing
    *(program.Expect, program.WaitReplicas, program.WaitGrads, program.WaitDispatch, program.TakeAssignments),
    *(program.TakeProbsGrad, program.SharedExpert, program.SharedExpertGrad, program.Experts, program.SumCombine),
    *(program.InputGrads, program.ExpertWeightGrads, program.LocalExperts, program.LocalGrads),
    *(program.Offload, program.Fetch, program.Release),
)
LINES: dict[type[Operation], Callable[[LayerLoad, int], Sent]] = {
    **dict.fromkeys(_SILENT, _NOTHING),
    # Transfers of offloaded weights are counted in simulator/clock/streams.py.
    **dict.fromkeys((program.FetchExpert, program.WaitExpert, program.StoreExpert), _NOTHING),
    program.FetchReplicas: lambda load, degree: (REPLICAS, load.fetched_bytes),
    program.ReturnGrads: lambda load, degree: (REPLICAS, load.returned_bytes),
    program.SendAssignments: _of_assignments(ASSIGNMENT_BYTES),
    program.Dispatch: _token_rows,
    program.Combine: _token_rows,
    program.SendProbsGrad: _of_assignments(ASSIGNMENT_GRADIENT_BYTES),
}


def sent(operations: Program, load: LayerLoad, degree: int) -> Counter[str]:
    """Return the bytes that a program in `degree` chunks sends, by kind of traffic (TOKEN_ROWS, REPLICAS).

    Raises UnknownOperation for an operation that is not in LINES.
    """
    result: Counter[str] = Counter()
    for operation in operations:
        kind, number = program.line_for(LINES, operation, "planning/traffic.py")(load, degree)
        result[kind] += number  # type: ignore[assignment]
    return result
