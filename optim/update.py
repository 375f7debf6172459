"""An optimizer step in parts, so that a step can be refused in between: gradients made ready, then weights changed.

The parts of Megatron-core 0.16.1's `step` of chained, mixed-precision and fp32 optimizers
(core/optimizer/optimizer.py), without its waits for the device.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optim.tiers.tiers import tiers_of
from parallel.megatron.optimizer import members, ready_gradients, scaler_of


def begin(optimizer: MegatronOptimizer, passive: bool = False) -> None:
    """The passes of a step begin; passive: they will change nothing."""
    if (tiers := tiers_of(optimizer)) is not None:
        scaler = scaler_of(optimizer)
        tiers.begin_step(None if scaler is None else scaler.inv_scale, passive)


def prepare(optimizer: MegatronOptimizer) -> torch.Tensor | None:
    """Make this rank's gradients ready. In fp16 whether any overflowed the scale, more than zero, on the device; all
    ranks add it up and call `settle` with what comes of it."""
    tiers = tiers_of(optimizer)
    return ready_gradients(optimizer, *(() if tiers is None else tiers.unscaled()))


def settle(optimizer: MegatronOptimizer, overflowed: bool) -> None:
    """Lower or raise the fp16 loss scale after a step. All members share it: it counts a step once, not each member."""
    scaler = scaler_of(optimizer)
    if scaler is not None:
        scaler.update(overflowed)


@torch.no_grad()
def apply(optimizer: MegatronOptimizer, grad_norm: float) -> bool:
    """Clip the prepared gradients and change the weights; whether they were."""
    if (tiers := tiers_of(optimizer)) is not None:
        tiers.update(clip_coefficient(members(optimizer)[0].config.clip_grad, grad_norm))
        return bool(optimizer.step_with_ready_grads())
    for member in members(optimizer):
        if getattr(member, "is_stub_optimizer", False) or member.config.clip_grad <= 0.0:
            continue
        parameters = member.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=member.config.clip_grad, total_norm=grad_norm)
    return bool(optimizer.step_with_ready_grads())


def clip_coefficient(clip_grad: float, grad_norm: float) -> float:
    """What Megatron-core multiplies gradients with where it is below 1 (core/optimizer/clip_grads.py)."""
    return clip_grad / (grad_norm + 1.0e-6) if clip_grad > 0.0 else 1.0
