"""Megatron-core's top-k router with a gating product that does not copy all tokens to the router's precision.

Under half precision the router computes in fp32 (`moe_router_dtype`). Megatron-core converts the whole input for that, in the forward
and again in the backward pass; on the host those copies cost more than the product. Here blocks of rows are converted in turn.

Shapes: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from moe.workspace import WORKSPACE

BLOCK_ROWS = 256  # 0.5 MiB of fp32 at hidden 512: stays in the second-level cache


class Router(TopKRouter):
    """TopKRouter; losses, bias, groups, capacity and checkpoints are Megatron's."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [..., E] of the tokens [..., H], in the router's precision."""
        wide = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        if input.device.type != "cpu" or self.bias is not None or wide is input.dtype:
            return super().gating(input)
        return _Gate.apply(input, self.weight, wide)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        x, gate = hidden.reshape(-1, hidden.size(-1)), weight.to(wide).t()
        logits = x.new_empty(len(x), len(weight), dtype=wide)
        scratch = WORKSPACE.take((min(len(x), BLOCK_ROWS), x.size(1)), x, wide)
        for rows, out in zip(x.split(BLOCK_ROWS), logits.split(BLOCK_ROWS), strict=True):
            torch.mm(scratch[: len(rows)].copy_(rows), gate, out=out)
        WORKSPACE.give(scratch)
        return logits.view(*hidden.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, logits_grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        x, grad = hidden.reshape(-1, hidden.size(-1)), logits_grad.reshape(-1, len(weight))
        gate = weight.to(grad.dtype)
        x_grad, weight_grad = torch.empty_like(x), torch.zeros_like(gate)
        scratch = WORKSPACE.take((min(len(x), BLOCK_ROWS), x.size(1)), x, grad.dtype)
        for rows, rows_grad, part in zip(x.split(BLOCK_ROWS), x_grad.split(BLOCK_ROWS), grad.split(BLOCK_ROWS), strict=True):
            block = scratch[: len(rows)]
            weight_grad.addmm_(part.t(), block.copy_(rows))
            rows_grad.copy_(torch.mm(part, gate, out=block))
        WORKSPACE.give(scratch)
        return x_grad.view_as(hidden), weight_grad.to(weight.dtype), None
