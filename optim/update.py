"""An optimizer step in two halves, so that a step can be refused in between: gradients made ready, then weights
changed.

The halves of Megatron-core 0.16.1's `step` of chained, mixed-precision and fp32 optimizers
(core/optimizer/optimizer.py), call for call.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from parallel.megatron.optimizer import members, scale_held, scaler_of


@torch.no_grad()
def prepare(optimizer: MegatronOptimizer) -> float | None:
    """The gradients' norm over the whole model, before clipping; None where fp16 gradients overflowed their scale,
    which is then lowered.

    A collective call. Not finite where any gradient is not.
    """
    scaler = scaler_of(optimizer)
    if scaler is None:
        overflowed = bool(optimizer.prepare_grads())
    else:
        with scale_held(scaler):  # all members share it: it counts a step once, not each member
            overflowed = bool(optimizer.prepare_grads())
        scaler.update(overflowed)
    if overflowed:
        return None
    return float(optimizer.get_grad_norm())


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
