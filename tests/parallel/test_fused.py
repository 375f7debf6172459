"""Functions that are compiled for a GPU: what the compiler makes of them is what they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from models.pointwise import rotary, swiglu
from moe.experts import compute
from parallel.fused import fused

pytestmark = pytest.mark.fast


def _is_one_graph(function: Callable[..., Any], cases: Iterable[Sequence[Any]]) -> None:
    """The compiler makes one graph of the function for all cases, which computes the same bits."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(inputs))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(inspect.unwrap(function), backend=backend, dynamic=True, fullgraph=True)
    for given in cases:
        for ours, expected in zip(_flat(compiled(*given)), _flat(function(*given)), strict=True):
            assert torch.equal(ours, expected) and ours.dtype is expected.dtype
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_experts_functions_are_one_graph_for_all_sizes(activation: str, dtype: torch.dtype) -> None:
    columns = 32 if activation == "swiglu" else 16
    for function, widths in (
        (compute.weighted_activation, [columns]),
        (compute.weighted_activation_backward, [columns, 16]),
    ):
        _is_one_graph(
            function,
            [
                (activation, *(torch.randn(num_rows, width).to(dtype) for width in widths), torch.rand(num_rows))
                for num_rows in (5, 7, 40)
            ],
        )


@pytest.mark.parametrize(("turning", "dtype"), [(8, torch.float32), (4, torch.bfloat16)])
def test_a_models_functions_are_one_graph_for_all_sizes(turning: int, dtype: torch.dtype) -> None:
    sizes = [(13, 7), (17, 9), (41, 11)]  # sequence, batch: no two numbers alike, which the compiler would tie

    def heads(s: int, b: int, number: int) -> torch.Tensor:
        return torch.randn(s, b, 2, number, 8).to(dtype)

    def tables(s: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary.tables(torch.randn(s, 1, 1, turning), dtype)

    _is_one_graph(rotary._split_forward, [(heads(s, b, 5), *tables(s)) for s, b in sizes])
    inputs = [(heads(s, b, 3), heads(s, b, 1), heads(s, b, 1), *tables(s)) for s, b in sizes]
    _is_one_graph(rotary._split_backward, inputs)
    for function in (rotary._rotated, rotary._rotated_back):
        _is_one_graph(function, [(heads(s, b, 3), *tables(s)) for s, b in sizes])
    both = [(torch.randn(s, b, 16).to(dtype), torch.randn(s, b, 8).to(dtype)) for s, b in sizes]
    _is_one_graph(swiglu.swiglu_forward, [given[:1] for given in both])
    _is_one_graph(swiglu.swiglu_backward, both)


def _flat(result: object) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]  # type: ignore[list-item]


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh"])
def test_weighted_activations_gradients(activation: str) -> None:
    preactivation = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(6, dtype=torch.float64, requires_grad=True)
    output = compute.weighted_activation(activation, preactivation, probs)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, (preactivation, probs), grad)
    found = compute.weighted_activation_backward(activation, preactivation, grad, probs)
    for ours, exact in zip(found, (*expected, output), strict=True):
        assert torch.allclose(ours, exact, rtol=1e-12)


def test_on_the_host_a_function_is_itself() -> None:
    calls: list[torch.Tensor] = []

    @fused
    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return 2 * x

    one = torch.ones(3)
    assert torch.equal(double(one), 2 * one) and calls[0] is one
