"""Runs a call of the routed experts as one operation of autograd: an explicit forward and an explicit backward pass.

Shapes: T tokens of this rank, H hidden size, P assignments of its tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe.experts.bitwise import BlockGrads
from moe.experts.weights import Slab, WeightGrads, Weights
from moe.placement.copies import CallCopies
from moe.schedule.on_one_rank import LocalCall
from moe.schedule.over_ranks import SpreadCall
from moe.schedule.pass_timer import PassTimer


def run(
    call: LocalCall | SpreadCall, timer: PassTimer, x_TH: torch.Tensor, probs_P: torch.Tensor, home: Slab
) -> torch.Tensor:
    """The output [T, H] of a call, differentiable once in x, probs and the weights at home; the backward pass is
    timed. Weights off the device are no part of autograd's graph: their gradients leave by the call."""
    weights = home.parameters if call.streamed is None else (None,) * 4
    return _Schedule.apply(call, timer, home, x_TH, probs_P, *weights)


class _Schedule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LocalCall | SpreadCall, timer: PassTimer, like: Slab, *tensors: Any) -> torch.Tensor:
        x_TH, probs_P, *matrices = tensors
        ctx.call, ctx.timer, ctx.kind = call, timer, (like.activation, like.block_rows)
        ctx.save_for_backward(*tensors)
        home = like if call.streamed is not None else Slab(*matrices, *ctx.kind)
        output_TH = call.forward(x_TH, probs_P, _weights(home, call.copies))
        if call.streamed is not None:
            call.streamed.leave()
        return output_TH

    @staticmethod
    def backward(ctx: Any, output_grad_TH: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_TH, probs_P, *matrices = ctx.saved_tensors
        call, ctx.call = ctx.call, None
        if call is None:  # its buffers are in use again
            raise RuntimeError(
                "an MoE layer's output can be differentiated once; it was asked for a second time (retain_graph)."
            )
        streamed, copies = call.streamed, call.copies
        # What lies off the device has come to another place since the forward pass.
        home = Slab(*matrices, *ctx.kind) if streamed is None else replace(streamed.open(), block_rows=ctx.kind[1])
        weights, grads = _weights(home, copies), None
        if streamed is not None or any(ctx.needs_input_grad[5:]):
            by_blocks = home.block_rows is not None
            grads = BlockGrads(weights, () if copies is None else copies.apart) if by_blocks else WeightGrads(weights)
        with ctx.timer.measure("backward", x_TH.device):
            x_grad_TH, probs_grad_P = call.backward(x_TH, probs_P, weights, output_grad_TH.contiguous(), grads)
        if streamed is not None:
            streamed.leave()
        parameter_grads: Any = (None,) * 4
        if grads is not None and streamed is None:
            parameter_grads = grads.finish()
            if copies is not None:
                parameter_grads = copies.add_arrived(home, parameter_grads)
        return None, None, None, x_grad_TH, probs_grad_P.to(probs_P.dtype), *parameter_grads


def _weights(home: Slab, copies: CallCopies | None) -> Weights:
    return Weights((home,)) if copies is None else copies.weights(home)
