"""Functions that are compiled for a GPU: what the compiler makes of them is what they say."""

from __future__ import annotations

import inspect

import pytest
import torch

from moe.experts import compute
from parallel.fused import fused


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_experts_functions_are_one_graph_for_all_sizes(activation: str, dtype: torch.dtype) -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(inputs))
        return graph

    columns = 32 if activation == "swiglu" else 16
    for function, widths in (
        (compute.weighted_activation, [columns]),
        (compute.weighted_activation_backward, [columns, 16]),
    ):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(inspect.unwrap(function), backend=backend, dynamic=True, fullgraph=True)
        for rows in (5, 7, 40):
            given = [torch.randn(rows, width).to(dtype) for width in widths]
            given.append(torch.rand(rows))
            for ours, expected in zip(
                _flat(compiled(activation, *given)), _flat(function(activation, *given)), strict=True
            ):
                assert torch.equal(ours, expected) and ours.dtype is expected.dtype
        assert len(graphs) == 1
    torch._dynamo.reset()


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
