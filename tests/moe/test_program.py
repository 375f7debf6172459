"""The program of an MoE layer's passes: its order, and that all its interpreters know all of it and nothing else."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass

import pytest
import torch

from benchmarks.speed.memory_reuse import tracked_peak
from moe.chunk_plan import STRATEGIES, Plan
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.placement_map import PlacementMap
from moe.planning import footprint, timing, traffic
from moe.planning.load import Shape
from moe.schedule import on_one_rank, over_ranks, program
from moe.schedule.program import Combine, Dispatch, Experts, Operation, SumCombine, UnknownOperation, WaitDispatch
from tests.moe.oracle import Case, problem

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class Prefetch(Operation):
    """An operation that nobody has been told of."""


def _operations() -> set[type[Operation]]:
    """Those that programs are made of."""
    classes = inspect.getmembers(program, lambda each: inspect.isclass(each) and issubclass(each, Operation))
    bases = {program.Operation, program.ChunkOperation, program.TransferOperation}
    return {each for _, each in classes} - bases


def test_every_operation_has_a_line_in_every_interpreter() -> None:
    operations = _operations()
    assert set(timing.LINES) == set(footprint.LINES) == set(traffic.LINES) == operations
    passes = (over_ranks.FORWARD, over_ranks.BACKWARD, on_one_rank.FORWARD, on_one_rank.BACKWARD)
    assert {each for lines in passes for each in lines} == operations


def test_programs_hold_what_their_interpreters_know() -> None:
    used: set[type[Operation]] = set()
    cases = itertools.product((1, 2, 3, 8), STRATEGIES.values(), (0, 1, 9), (False, True))
    for degree, strategy, lag, streamed in cases:
        for operations, lines in (
            (program.forward(degree, strategy, True, streamed), over_ranks.FORWARD),
            (program.backward(degree, strategy, lag, True, streamed), over_ranks.BACKWARD),
            (program.local_forward(degree, strategy, streamed), on_one_rank.FORWARD),
            (program.local_backward(degree, strategy, streamed), on_one_rank.BACKWARD),
        ):
            assert {type(operation) for operation in operations} <= set(lines)
            assert len(set(operations)) == len(operations)  # each happens once
            used |= {type(operation) for operation in operations}
    assert used == _operations()


def test_an_unknown_operation_is_refused_by_name() -> None:
    for interpret in (timing.timeline, footprint.ledger):
        with pytest.raises(UnknownOperation, match="does not know the operation Prefetch. Add a line for it."):
            interpret((Prefetch(),))
    for lines in (over_ranks.FORWARD, over_ranks.BACKWARD, on_one_rank.FORWARD, on_one_rank.BACKWARD):
        with pytest.raises(
            UnknownOperation, match="schedule/.* does not know the operation Prefetch. Add a line for it."
        ):
            program.perform((Prefetch(),), lines, None, "schedule/")


@pytest.mark.parametrize("has_replicas", [False, True])
def test_weights_off_the_device_are_there_before_they_are_read(has_replicas: bool) -> None:
    order = program.forward(4, STRATEGIES["keep"], has_replicas, streamed=True)
    reads = program.FetchReplicas() if has_replicas else Experts(0)
    assert order[0] == program.FetchExpert() and order.index(program.WaitExpert()) < order.index(reads)
    order = program.backward(4, STRATEGIES["communicate"], 1, has_replicas, streamed=True)
    assert order[0] == program.FetchExpert() and order[-1] == program.StoreExpert()
    assert order.index(program.WaitExpert()) == order.index(program.InputGrads(0)) - 1


def test_the_experts_run_while_later_chunks_travel() -> None:
    order = program.forward(4, STRATEGIES["keep"])
    chunks = [each for each in order if isinstance(each, Dispatch | WaitDispatch | Experts | Combine | SumCombine)]
    assert [(type(each).__name__, each.chunk) for each in chunks] == [
        *[("Dispatch", 0), ("Dispatch", 1)],
        *[("Dispatch", 2), ("WaitDispatch", 0), ("Experts", 0), ("Combine", 0)],
        *[("Dispatch", 3), ("WaitDispatch", 1), ("Experts", 1), ("Combine", 1)],
        *[("WaitDispatch", 2), ("Experts", 2), ("Combine", 2), ("SumCombine", 0)],
        *[("WaitDispatch", 3), ("Experts", 3), ("Combine", 3), ("SumCombine", 1)],
        *[("SumCombine", 2), ("SumCombine", 3)],
    ]


def test_a_chunks_gradients_leave_before_its_weight_gradients() -> None:
    for degree, lag in ((1, 0), (4, 0), (4, 1), (4, 9)):
        order = program.backward(degree, STRATEGIES["communicate"], lag)
        for i in range(degree):
            last = order.index(program.InputGrads(min(i + lag, degree - 1)))
            assert order.index(Combine(i)) < order.index(program.ExpertWeightGrads(i)) > last


@pytest.mark.parametrize("strategy", ["keep", "recompute"])
@pytest.mark.parametrize("degrees", [(1, 1), (4, 4), (2, 4)])
def test_memory_of_a_call_on_one_rank(strategy: str, degrees: tuple[int, int]) -> None:
    case = Case(512, hidden=64, width=96, dtype=torch.float32)
    given, plan = problem(case), Plan(*degrees, strategy)
    leaves = [tensor.clone().requires_grad_() for tensor in (given.x, given.probs, *given.parameters)]
    x, probs, fc1, fc2 = leaves

    def step() -> torch.Tensor:
        setting = Setting(assignments_per_token=2)
        return routed_experts(x, probs, given.routing_map, Slab(fc1, fc2, None, None, "swiglu"), plan, setting)

    peak = tracked_peak(step, given.output_grad, (x, probs, given.routing_map), (fc1, fc2))
    shape = Shape(512, 8, 1, 2, 64, 96, gated=True, element_size=4)
    load = shape.at_primaries(given.routing_map.sum(dim=0).tolist(), PlacementMap(8))
    kept, forward, backward = footprint.local_bytes(load, plan)
    assert kept + max(forward, backward) == pytest.approx(peak, rel=0.1)
