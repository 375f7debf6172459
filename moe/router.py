"""Megatron-core's top-k router with a gating product that does not copy all tokens to the router's precision.

Under bf16 the router computes in fp32 (`moe_router_dtype`). Megatron-core converts the whole input for that, in the forward and again
in the backward pass; on the host those copies cost more than the product. Here the forward pass converts blocks of rows in turn, and
the backward pass nothing but the logits' gradient: as a sum of two bf16 numbers it keeps 16 of fp32's 24 bits.

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

    _passed: torch.Tensor | None = None  # set only inside `forward`

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None, pass_input: bool = False) -> tuple[torch.Tensor, ...]:
        """Probabilities and routing map [T, E] of the tokens [..., H].

        With `pass_input` also the tokens again, for the experts: where the experts' gradient comes back through the router, it adds
        its own to it in place, instead of autograd, which makes a third tensor of both.
        """
        self._passed = input if pass_input else None
        try:
            probs, routing_map = super().forward(input, padding_mask)
            return (probs, routing_map) if self._passed is None else (probs, routing_map, self._passed)
        finally:
            self._passed = None

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [..., E] of the tokens [..., H], in the router's precision."""
        in_halves = input.dtype is torch.bfloat16 and self.weight.dtype is torch.bfloat16 and self.config.moe_router_dtype == "fp32"
        if input.device.type != "cpu" or self.bias is not None or not in_halves:
            return super().gating(input)
        logits, passed = _Gate.apply(input, self.weight)
        if input is self._passed:  # not a copy with jitter
            self._passed = passed
        return logits


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)
        x, gate = hidden.reshape(-1, hidden.size(-1)), weight.float().t()
        logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
        scratch = WORKSPACE.take((min(len(x), BLOCK_ROWS), x.size(1)), x, torch.float32)
        for rows, out in zip(x.split(BLOCK_ROWS), logits.split(BLOCK_ROWS), strict=True):
            torch.mm(scratch[: len(rows)].copy_(rows), gate, out=out)
        WORKSPACE.give(scratch)
        return logits.view(*hidden.shape[:-1], len(weight)), hidden.view_as(hidden)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, logits_grad: torch.Tensor | None, passed_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        if logits_grad is None:
            return passed_grad, None
        x, grad = hidden.reshape(-1, hidden.size(-1)), logits_grad.reshape(-1, len(weight))
        high = grad.to(x.dtype)
        parts, gate = torch.cat([high, (grad - high).to(x.dtype)], dim=1), torch.cat([weight, weight])
        weight_grad = torch.mm(parts.t(), x).view(2, *weight.shape).sum(dim=0)
        # The experts' gradient was made for this sum alone: nobody else has it.
        x_grad = torch.mm(parts, gate) if passed_grad is None else passed_grad.reshape(-1, x.size(1)).addmm_(parts, gate)
        return x_grad.view_as(hidden), weight_grad
