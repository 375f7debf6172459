"""An optimizer step in parts, so that a step can be refused in between: gradients made ready, then weights changed.

The parts of Megatron-core 0.16.1's `step` of chained, mixed-precision and fp32 optimizers
(core/optimizer/optimizer.py), without its waits for the device.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from parallel.megatron.optimizer import members, ready_gradients, scaler_of


def prepare(optimizer: MegatronOptimizer) -> torch.Tensor | None:
    """Make this rank's gradients ready. In fp16 whether any overflowed the scale, more than zero, on the device; all
    ranks add it up and call `settle` with what comes of it."""
    return ready_gradients(optimizer)


def settle(optimizer: MegatronOptimizer, overflowed: bool) -> None:
    """Lower or raise the fp16 loss scale after a step. All members share it: it counts a step once, not each member."""
    scaler = scaler_of(optimizer)
    if scaler is not None:
        scaler.update(overflowed)


@torch.no_grad()
def apply(optimizer: MegatronOptimizer, grad_norm: float) -> bool:
    """Clip the prepared gradients and change the weights; whether they were."""
    for member in members(optimizer):
        if getattr(member, "is_stub_optimizer", False) or member.config.clip_grad <= 0.0:
            continue
        parameters = member.get_parameters()
        if parameters:
            decoupled = member.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(
                parameters, max_norm=member.config.clip_grad, total_norm=grad_norm, use_decoupled_grad=decoupled
            )
    return bool(optimizer.step_with_ready_grads())
