"""Runs a call of the routed experts as one operation of autograd: an explicit forward and an explicit backward pass.

Shapes: T tokens of this rank, H hidden size, P assignments of its tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from moe.experts.weights import WeightGrads, Weights
from moe.placement.copies import CallCopies
from moe.schedule.on_one_rank import LocalCall
from moe.schedule.over_ranks import SpreadCall
from moe.schedule.pass_timer import PassTimer


def run(
    call: LocalCall | SpreadCall,
    timer: PassTimer,
    x_TH: torch.Tensor,
    probs_P: torch.Tensor,
    weights: Weights,
    copies: CallCopies | None = None,
) -> torch.Tensor:
    """The output [T, H] of a call, differentiable once in x, probs and weights; the backward pass is timed. `copies`:
    of other ranks' experts that take part."""
    tensors = (x_TH, probs_P, weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
    return _Schedule.apply(call, timer, copies, weights.activation, *tensors)


class _Schedule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: LocalCall | SpreadCall,
        timer: PassTimer,
        copies: CallCopies | None,
        activation: str,
        *tensors: Any,
    ) -> torch.Tensor:
        x_TH, probs_P, fc1, fc2, fc1_bias, fc2_bias = tensors
        ctx.call, ctx.timer, ctx.copies, ctx.activation = call, timer, copies, activation
        ctx.save_for_backward(*tensors)
        weights = Weights(fc1, fc2, fc1_bias, fc2_bias, activation)
        return call.forward(x_TH, probs_P, weights if copies is None else copies.beside(weights))

    @staticmethod
    def backward(ctx: Any, output_grad_TH: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_TH, probs_P, fc1, fc2, fc1_bias, fc2_bias = ctx.saved_tensors
        weights, copies = Weights(fc1, fc2, fc1_bias, fc2_bias, ctx.activation), ctx.copies
        if copies is not None:
            weights = copies.beside(weights)
        call, ctx.call = ctx.call, None
        if call is None:  # its buffers are in use again
            raise RuntimeError(
                "an MoE layer's output can be differentiated once; it was asked for a second time (retain_graph)."
            )
        grads = WeightGrads(weights) if any(ctx.needs_input_grad[6:]) else None
        with ctx.timer.measure("backward", x_TH.device):
            x_grad_TH, probs_grad_P = call.backward(x_TH, probs_P, weights, output_grad_TH.contiguous(), grads)
        parameter_grads = (None,) * 4 if grads is None else grads.finish()
        if copies is not None:
            parameter_grads = copies.bring_home(parameter_grads)
        return None, None, None, None, x_grad_TH, probs_grad_P.to(probs_P.dtype), *parameter_grads
