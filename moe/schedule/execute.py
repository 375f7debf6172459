"""Run a call of the routed experts as one timed operation of autograd, with an explicit backward pass.

Shapes: T tokens of this rank, H hidden size, P assignments of its tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe.experts.blocks import BlockGrads
from moe.experts.weights import Slab, WeightGrads, Weights
from moe.placement.replicas import CallReplicas
from moe.schedule.on_one_rank import LocalCall
from moe.schedule.over_ranks import SpreadCall

MOST_MEASURED = 256  # most measurements of a pass that are stored until `take`


class PassTimer:
    """A timer of passes ("forward", "backward", "evaluation"). Planners compare its seconds with their predictions.

    On a GPU it records events on the current stream, and waits for them only in `take`.
    """

    def __init__(self) -> None:
        self._measured: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measure(self, name: str, device: torch.device) -> Iterator[None]:
        """Measure the time of the `with` block as one pass called `name`."""
        start = _now(device)
        yield
        measured = self._measured.setdefault(name, [])
        measured.append((start, _now(device)))
        del measured[:-MOST_MEASURED]

    def take(self) -> dict[str, float]:
        """Return the median seconds of each pass since the last call; on a GPU the host waits for the last pass."""
        result = {name: statistics.median(_seconds(*span) for span in spans) for name, spans in self._measured.items()}
        self._measured.clear()
        return result


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def run(
    call: LocalCall | SpreadCall, timer: PassTimer, x_TH: torch.Tensor, probs_P: torch.Tensor, primaries: Slab
) -> torch.Tensor:
    """Run a call of the routed experts; return its output [T, H], differentiable once in x, probs and weights.

    `timer` measures the backward pass. Offloaded weights are not in autograd's graph: the call itself stores their
    gradients.
    """
    weights = primaries.parameters if call.streamed is None else (None,) * 4
    return _Schedule.apply(call, timer, primaries, x_TH, probs_P, *weights)


class _Schedule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LocalCall | SpreadCall, timer: PassTimer, like: Slab, *tensors: Any) -> torch.Tensor:
        x_TH, probs_P, *matrices = tensors
        ctx.call, ctx.timer, ctx.kind = call, timer, (like.activation, like.block_rows)
        ctx.save_for_backward(*tensors)
        primaries = like if call.streamed is not None else Slab(*matrices, *ctx.kind)
        output_TH = call.forward(x_TH, probs_P, _weights(primaries, call.replicas))
        if call.streamed is not None:
            call.streamed.leave()
        return output_TH

    @staticmethod
    def backward(ctx: Any, output_grad_TH: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_TH, probs_P, *matrices = ctx.saved_tensors
        call, ctx.call = ctx.call, None
        if call is None:  # its buffers may be in use for other calls
            raise RuntimeError(
                "the backward pass of an MoE layer's call can run only once, as it frees its buffers. Run the forward "
                "pass again before a second backward pass, instead of retain_graph=True."
            )
        streamed, replicas = call.streamed, call.replicas
        # Offloaded weights may be in another buffer of the device now than in the forward pass.
        primaries = Slab(*matrices, *ctx.kind) if streamed is None else replace(streamed.open(), block_rows=ctx.kind[1])
        weights, grads = _weights(primaries, replicas), None
        if streamed is not None or any(ctx.needs_input_grad[5:]):
            if primaries.block_rows is None:
                grads = WeightGrads(weights)
            else:
                grads = BlockGrads(weights, () if replicas is None else replicas.separate_experts)
        with ctx.timer.measure("backward", x_TH.device):
            x_grad_TH, probs_grad_P = call.backward(x_TH, probs_P, weights, output_grad_TH.contiguous(), grads)
        if streamed is not None:
            streamed.leave()
        parameter_grads: Any = (None,) * 4
        if grads is not None and streamed is None:
            parameter_grads = grads.finish()
            if replicas is not None:
                parameter_grads = replicas.buffers.add_arrived(primaries, parameter_grads)
        return None, None, None, x_grad_TH, probs_grad_P.to(probs_P.dtype), *parameter_grads


def _weights(primaries: Slab, replicas: CallReplicas | None) -> Weights:
    return Weights((primaries,)) if replicas is None else replicas.weights(primaries)
