"""The layer's schedule against the loop over tokens: outputs and all gradients, on one rank and over several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from moe.alltoall.flat import FlatAllToAll
from moe.chunk_plan import STRATEGIES, Plan
from moe.experts import blocks, compute
from moe.experts.sizes import STEP_ROWS
from moe.schedule import chunk_compute
from tests.distributed import run
from tests.moe.oracle import (
    DEGREES,
    ROUTINGS,
    TOP_K,
    Case,
    check_on_ranks,
    compared,
    error_of_norms,
    expected_on,
    largest_error,
    loop,
    ours,
    plans,
    problem,
    with_dtype,
)
from tests.tolerances import MOE


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("top_k", TOP_K)
def test_one_rank(routing: str, top_k: int) -> None:
    kinds = (("swiglu", False), ("gelu", True), ("gelu_tanh", False))
    # Every plan with one of the activations, another one with each routing.
    first = ROUTINGS.index(routing) + TOP_K.index(top_k)
    for number, (activation, bias) in enumerate(kinds):
        case = Case(routing=routing, top_k=top_k, activation=activation, bias=bias, shared=bias)
        expected = loop(case, problem(case))
        for plan in plans()[(first + number) % len(kinds) :: len(kinds)]:
            assert largest_error(ours(case, problem(case), plan), expected) < MOE["float64"], (activation, plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation,bias", [("swiglu", False), ("gelu", True)])
def test_one_rank_in_lower_precision(dtype: str, activation: str, bias: bool) -> None:
    for routing, top_k in itertools.product(("balanced", "one_expert"), (1, 8)):
        case = with_dtype(Case(routing=routing, top_k=top_k, activation=activation, bias=bias), dtype)
        expected = loop(case, problem(case))
        for degree, strategy in itertools.product((1, 2, 8), STRATEGIES):
            assert largest_error(ours(case, problem(case), Plan(degree, degree, strategy)), expected) < MOE[dtype]


def _cases_in_tiles() -> Iterator[tuple[Case, list[Plan]]]:
    """Sizes that the compiled kernels compute in bf16 by tiles, where there are such kernels."""
    for routing, activation, bias in (
        ("skewed", "swiglu", False),
        ("empty_experts", "gelu", True),
        ("dropped", "gelu_tanh", False),
    ):
        case = Case(
            70,
            routing=routing,
            activation=activation,
            bias=bias,
            shared=bias,
            dtype=torch.bfloat16,
            hidden=64,
            width=96,
        )
        yield case, plans([(1, 1), (3, 3), (2, 4)])


def test_tiles_on_one_rank() -> None:
    for _, _, actual, expected in compared(_cases_in_tiles(), None, 0, 1):
        assert error_of_norms(actual, expected) < MOE["bfloat16"]


def _tiles_on_ranks() -> float:
    group = torch.distributed.group.WORLD
    assert group is not None
    return check_on_ranks(_cases_in_tiles(), FlatAllToAll(group))


def test_tiles_over_ranks() -> None:
    assert max(run(_tiles_on_ranks, 2)) < 1


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_fewer_tokens_than_chunks(num_tokens: int) -> None:
    case = Case(num_tokens=num_tokens)
    for degree, strategy in itertools.product((1, 4, 8), STRATEGIES):
        assert (
            largest_error(ours(case, problem(case), Plan(degree, degree, strategy)), loop(case, problem(case)))
            < MOE["float64"]
        )


def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # More rows than go through an expert at once: the later blocks are added to the weight gradients.
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    case = Case(num_tokens=40, num_experts=4, routing="skewed", activation="gelu", bias=True)
    for degree in (1, 3):
        assert (
            largest_error(ours(case, problem(case), Plan(degree, degree)), loop(case, problem(case))) < MOE["float64"]
        )


@pytest.mark.parametrize("hidden", [8, 64], ids=["torch", "tiles"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_experts_rows_at_the_ends_of_blocks(monkeypatch: pytest.MonkeyPatch, dtype: str, hidden: int) -> None:
    """Experts compute whole STEP_ROWS and whole blocks, and one row less or more."""
    block = 3 * STEP_ROWS
    monkeypatch.setattr(blocks, "BLOCK_ROWS", block)
    for num_rows in (end + more for end in (STEP_ROWS, block, 2 * block) for more in (-1, 0, 1)):
        case = Case(num_tokens=num_rows, num_experts=1, top_k=1, hidden=hidden, width=4 * hidden)
        case = with_dtype(case, dtype)
        for strategy in ("keep", "recompute"):
            actual = ours(case, problem(case), Plan(1, 1, strategy))
            assert error_of_norms(actual, loop(case, problem(case))) < MOE[dtype], (num_rows, strategy)


@pytest.mark.parametrize("strategy", ["keep", "recompute"])
def test_blocks_of_rows_of_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    # In widths that the tiles take: an expert's later blocks use what its first one packed, the next expert's do not.
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 32)
    case = with_dtype(Case(num_tokens=100, num_experts=4, routing="skewed", hidden=64, width=32), "bfloat16")
    assert largest_error(ours(case, problem(case), Plan(1, 1, strategy)), loop(case, problem(case))) < MOE["bfloat16"]


@pytest.mark.parametrize("activation,bias", [("swiglu", False), ("gelu", True)])
def test_grouped_products(monkeypatch: pytest.MonkeyPatch, activation: str, bias: bool) -> None:
    # The way of a GPU; torch's grouped product also runs on the host.
    for module in (compute, chunk_compute):
        monkeypatch.setattr(module, "is_grouped", lambda _: True)
    for routing, plan in itertools.product(ROUTINGS, plans([(1, 1), (3, 3), (2, 3)])):
        case = with_dtype(Case(routing=routing, activation=activation, bias=bias), "float32")
        assert largest_error(ours(case, problem(case), plan), loop(case, problem(case))) < MOE["float32"]


def _cases(degrees: list[tuple[int, int]]) -> Iterator[tuple[Case, list[Plan]]]:
    every, few = plans(degrees), [Plan(1, 1), Plan(3, 3, "communicate_recompute", 1), Plan(4, 2), Plan(2, 2, "offload")]
    yield Case(shared=True), every[::2]
    yield Case(top_k=4, routing="dropped", activation="gelu", bias=True), every[1::2]
    for routing, top_k in itertools.product(ROUTINGS, TOP_K):
        yield Case(routing=routing, top_k=top_k, shared=top_k == 2), few
    for dtype in ("float32", "bfloat16"):
        yield with_dtype(Case(top_k=4, shared=dtype == "float32"), dtype), few
    yield Case(num_tokens=2, routing="one_expert"), every


def _all_cases_on_ranks(degrees: list[tuple[int, int]]) -> float:
    group = torch.distributed.group.WORLD
    assert group is not None
    return check_on_ranks(_cases(degrees), FlatAllToAll(group))


@pytest.mark.parametrize(("num_ranks", "degrees"), [(2, DEGREES), (4, [(1, 1), (3, 3), (2, 4)])])
def test_experts_over_ranks(num_ranks: int, degrees: list[tuple[int, int]]) -> None:
    assert max(run(_all_cases_on_ranks, num_ranks, degrees)) < 1


def _one_rank_without_tokens() -> float:
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, exchange = group.rank(), FlatAllToAll(group)
    full, none = Case(shared=True), Case(num_tokens=0, shared=True)
    mine = none if rank == 0 else full
    alone = loop(full, problem(full, 1))
    actual = ours(mine, problem(mine, rank), Plan(2, 3), exchange, rank, 2)
    if rank == 0:
        half = slice(0, full.num_experts // 2)
        assert len(actual[0]) == len(actual[1]) == 0
        return largest_error(actual[3:5], [gradient[half] for gradient in alone[3:5]])
    half = slice(full.num_experts // 2, None)
    return largest_error(actual, [*alone[:3], *(gradient[half] for gradient in alone[3:5]), *alone[5:]])


def test_a_rank_without_tokens_serves_the_others() -> None:
    assert max(run(_one_rank_without_tokens, 2)) < MOE["float64"]


def _not_everything_needs_gradients() -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    from moe.experts.weights import Slab
    from moe.layer import Setting, routed_experts

    rank, size = group.rank(), group.size()
    exchange = FlatAllToAll(group) if size > 1 else None
    case = Case()
    given, num_local = problem(case, rank), case.num_experts // size
    fc1, fc2 = (p[rank * num_local : (rank + 1) * num_local].clone().requires_grad_() for p in given.parameters)
    weights = Slab(fc1, fc2, None, None, case.activation)
    expected = expected_on(case, rank, size)
    # Neither the input nor the router learns.
    output = routed_experts(given.x, given.probs, given.routing_map, weights, Plan(2, 2), Setting(exchange))
    output.backward(given.output_grad, retain_graph=True)
    assert largest_error([output.detach(), fc1.grad, fc2.grad], [expected[0], *expected[3:5]]) < MOE["float64"]
    with pytest.raises(RuntimeError, match="can run only once"):
        output.backward(given.output_grad)
    # Frozen experts.
    x = given.x.clone().requires_grad_()
    frozen = Slab(fc1.detach(), fc2.detach(), None, None, case.activation)
    routed_experts(x, given.probs, given.routing_map, frozen, Plan(3, 2), Setting(exchange)).backward(given.output_grad)
    assert largest_error([x.grad], [expected[1]]) < MOE["float64"]
    # No gradients at all.
    with torch.no_grad():
        output = routed_experts(given.x, given.probs, given.routing_map, weights, Plan(3, 3), Setting(exchange))
    assert not output.requires_grad and largest_error([output], expected[:1]) < MOE["float64"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_not_everything_needs_gradients(num_ranks: int) -> None:
    run(_not_everything_needs_gradients, num_ranks)
