"""Runs a call of the routed experts as one operation of autograd: an explicit forward and an explicit backward pass.

Shapes: T tokens of this rank, H hidden size, P assignments of its tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from moe.experts.bitwise import BlockGrads
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
    return _Schedule.apply(call, timer, copies, weights, *tensors)


class _Schedule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: LocalCall | SpreadCall,
        timer: PassTimer,
        copies: CallCopies | None,
        like: Weights,
        *tensors: Any,
    ) -> torch.Tensor:
        x_TH, probs_P, *matrices = tensors
        ctx.call, ctx.timer, ctx.copies, ctx.kind = call, timer, copies, (like.activation, like.block_rows)
        ctx.save_for_backward(*tensors)
        weights = Weights(*matrices, *ctx.kind)
        return call.forward(x_TH, probs_P, weights if copies is None else copies.beside(weights))

    @staticmethod
    def backward(ctx: Any, output_grad_TH: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_TH, probs_P, *matrices = ctx.saved_tensors
        home, copies = Weights(*matrices, *ctx.kind), ctx.copies
        weights = home if copies is None else copies.beside(home)
        call, ctx.call = ctx.call, None
        if call is None:  # its buffers are in use again
            raise RuntimeError(
                "an MoE layer's output can be differentiated once; it was asked for a second time (retain_graph)."
            )
        grads: WeightGrads | None = None
        if any(ctx.needs_input_grad[6:]):
            apart = copies.apart if copies is not None else ()
            grads = WeightGrads(weights) if home.block_rows is None else BlockGrads(weights, len(home.fc1), apart)
        with ctx.timer.measure("backward", x_TH.device):
            x_grad_TH, probs_grad_P = call.backward(x_TH, probs_P, weights, output_grad_TH.contiguous(), grads)
        if isinstance(grads, BlockGrads) and copies is not None:
            copies.bring_blocks_home(grads)
        parameter_grads = (None,) * 4 if grads is None else grads.finish()
        if copies is not None and not isinstance(grads, BlockGrads):
            parameter_grads = copies.bring_home(parameter_grads)
        return None, None, None, None, x_grad_TH, probs_grad_P.to(probs_P.dtype), *parameter_grads
