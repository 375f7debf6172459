"""The bytes that a rank sends in a call: goes through its programs (schedule/program.py), operation by operation.

Numbers are the busiest rank's, as `LayerLoad` has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from moe.chunk_plan import LayerLoad
from moe.planning.timing import ASSIGNMENT_BYTES, ASSIGNMENT_GRADIENT_BYTES
from moe.schedule import program
from moe.schedule.program import Operation, Program

ROWS, COPIES = "expert_all_to_all", "expert_copies"  # kinds
Sent = tuple[str, float]  # of a kind so many bytes
_NOTHING: Callable[[Any, LayerLoad, int], Sent] = lambda operation, load, degree: (ROWS, 0.0)  # noqa: E731


def _rows(operation: Any, load: LayerLoad, degree: int) -> Sent:
    return ROWS, load.away_rows * load.hidden_size * load.element_size / degree


def _of_assignments(num_bytes: int) -> Callable[[Any, LayerLoad, int], Sent]:
    # Of the assignments the same share travels as of the rows.
    return lambda operation, load, degree: (ROWS, load.assignments * load.away_rows / max(load.rows, 1) * num_bytes)


LINES: dict[type[Operation], Callable[[Any, LayerLoad, int], Sent]] = {
    # Weights off the device come over the link, or from ranks that hold the same: simulator/clock/streams.py.
    program.FetchExpert: _NOTHING,
    program.WaitExpert: _NOTHING,
    program.StoreExpert: _NOTHING,
    program.FetchCopies: lambda operation, load, degree: (COPIES, load.fetched_bytes),
    program.WaitCopies: _NOTHING,
    program.ReturnGrads: lambda operation, load, degree: (COPIES, load.returned_bytes),
    program.WaitGrads: _NOTHING,
    program.SendAssignments: _of_assignments(ASSIGNMENT_BYTES),
    program.Expect: _NOTHING,
    program.Dispatch: _rows,
    program.SharedExpert: _NOTHING,
    program.TakeAssignments: _NOTHING,
    program.WaitDispatch: _NOTHING,
    program.Experts: _NOTHING,
    program.Combine: _rows,
    program.Offload: _NOTHING,
    program.SumCombine: _NOTHING,
    program.Fetch: _NOTHING,
    program.SharedExpertGrad: _NOTHING,
    program.InputGrads: _NOTHING,
    program.Release: _NOTHING,
    program.SendProbsGrad: _of_assignments(ASSIGNMENT_GRADIENT_BYTES),
    program.ExpertWeightGrads: _NOTHING,
    program.TakeProbsGrad: _NOTHING,
    program.LocalExperts: _NOTHING,
    program.LocalGrads: _NOTHING,
}


def sent(operations: Program, load: LayerLoad, degree: int) -> Counter[str]:
    """Bytes by kind of a program in `degree` chunks. Raises UnknownOperation for an operation that has no line here."""
    result: Counter[str] = Counter()
    for operation in operations:
        kind, number = program.line_for(LINES, operation, "planning/traffic.py")(operation, load, degree)
        result[kind] += number  # type: ignore[assignment]
    return result
