"""SwiGLU (Shazeer, arXiv:2002.05202), with the order of roundings of torch's own operations.

Shapes: ... tokens, f feed-forward width of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from parallel.fused import fused, product_into


@fused
def swiglu_forward(preactivation: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, `[..., f]`, for the preactivation `[..., 2 f]` = [gate | up]."""
    gate, up = preactivation.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@fused
def swiglu_backward(preactivation: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the preactivation `[..., 2 f]` for the gradient of silu(gate) * up, `[..., f]`."""
    gate, up = preactivation.chunk(2, dim=-1)
    result = torch.empty_like(preactivation)
    gate_grad, up_grad = result.chunk(2, dim=-1)
    work = F.silu(gate)
    product_into(up_grad, grad, work)
    product_into(work, grad, up)
    if torch.compiler.is_compiling():
        gate_grad.copy_(torch.ops.aten.silu_backward(work, gate))
    else:
        torch.ops.aten.silu_backward.grad_input(work, gate, grad_input=gate_grad)
    return result


class _SwiGLU(torch.autograd.Function):
    """Autograd function of SwiGLU that saves only the preactivation. Plain autograd would also save its two halves and
    a copy of one half, and would concatenate the gradients of the halves."""

    @staticmethod
    def forward(ctx: Any, preactivation: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(preactivation)
        return swiglu_forward(preactivation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (preactivation,) = ctx.saved_tensors
        return swiglu_backward(preactivation, grad)


def swiglu(preactivation: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, `[..., f]`, for the preactivation `[..., 2 f]` = [gate | up], differentiable."""
    return _SwiGLU.apply(preactivation)
