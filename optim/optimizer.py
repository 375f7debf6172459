"""The optimizer: Megatron-core's mixed-precision AdamW, its learning rate, and a step that can still be rejected once
the gradients are known.

The functions of a step are those of Megatron-core 0.16.1's `step` for chained, mixed-precision and fp32 optimizers
(core/optimizer/optimizer.py), without the points where the host waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from configs import derived
from configs.schema import Config, OptimizerConfig
from memory.host_link import HostLink
from optim.offload.builder import build_offload
from optim.offload.optimizer import offload_of
from parallel.dtypes import DTYPES
from parallel.megatron.offloaded import building_external
from parallel.megatron.optimizer import build_chain, members, ready_gradients, scaler_of, share_scaler
from parallel.topology import Topology


def build_optimizer(
    config: Config, topology: Topology, chunks: list[torch.nn.Module], link: HostLink, device_capacity: float = math.inf
) -> MegatronOptimizer:
    """Build the optimizer of this rank's model chunks, which must be wrapped in Megatron's DistributedDataParallel.

    A collective call. link: for copies of offloaded state. device_capacity: bytes for state. Raises ConfigError.
    """
    is_offloaded = derived.has_own_optimizer_state(config)
    with building_external() if is_offloaded else contextlib.nullcontext():
        optimizer = build_chain(_megatron_config(config), chunks, topology.groups)
    share_scaler(optimizer)
    offload = build_offload(config, topology, optimizer, chunks, link, device_capacity) if is_offloaded else None
    optimizer.offload = offload  # Megatron's optimizer has no argument for this; `offload_of` reads it.
    for member in members(optimizer):
        if isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:
                group["foreach"], group["fused"] = False, True
    return optimizer


def _megatron_config(config: Config) -> MegatronOptimizerConfig:
    settings, precision = config.optimizer, config.training.precision
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        initial_loss_scale=config.training.initial_loss_scale,
        params_dtype=DTYPES[precision],
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=derived.overlap_param_gather(config),
    )


def param_groups(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of all optimizers in Megatron's chain that have parameters on this rank."""
    for member in members(optimizer):
        if member.optimizer is not None:
            yield from member.optimizer.param_groups


def set_learning_rate(optimizer: MegatronOptimizer, config: Config, step: int) -> float:
    """Set learning rate and weight decay of all parameter groups for a step (from 1). Returns the learning rate."""
    rate = learning_rate(config.optimizer, config.training.steps, step)
    for group in param_groups(optimizer):
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = config.optimizer.weight_decay * group.get("wd_mult", 1.0)
    return rate


def learning_rate(config: OptimizerConfig, total_steps: int, step: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1) in a run of `total_steps`.

    It warms up linearly over `warmup_steps`; then a cosine, linear, constant or wsd schedule leads down to `min_lr`.
    """
    if config.warmup_steps and step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_steps = config.decay_steps or total_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        start, length = decay_steps - config.wsd_decay_steps, config.wsd_decay_steps
    else:
        start, length = config.warmup_steps, decay_steps - config.warmup_steps
    progress = min(max((step - start) / max(length, 1), 0.0), 1.0)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + share * (config.lr - config.min_lr)


def begin_step(optimizer: MegatronOptimizer, passive: bool = False) -> None:
    """Prepare offloaded optimizer state for the passes of a step. passive: whether no update follows the passes."""
    if (offload := offload_of(optimizer)) is not None:
        scaler = scaler_of(optimizer)
        offload.begin_step(None if scaler is None else scaler.inv_scale, passive)


def prepare_gradients(optimizer: MegatronOptimizer) -> torch.Tensor | None:
    """Prepare gradients for clipping and the update. In fp16, return a device tensor, above zero after an overflow."""
    offload = offload_of(optimizer)
    return ready_gradients(optimizer, *(() if offload is None else offload.unscaled()))


def update_loss_scale(optimizer: MegatronOptimizer, overflowed: bool) -> None:
    """Lower or raise the fp16 loss scale after a step, depending on whether any rank's gradients overflowed."""
    if (scaler := scaler_of(optimizer)) is not None:
        scaler.update(overflowed)


@torch.no_grad()
def apply_gradients(optimizer: MegatronOptimizer, grad_norm: float) -> bool:
    """Clip the prepared gradients and update the weights. Returns whether the weights were changed."""
    if (offload := offload_of(optimizer)) is not None:
        clip_grad = members(optimizer)[0].config.clip_grad
        # The coefficient of Megatron-core (core/optimizer/clip_grads.py), which scales gradients if it is below 1.
        offload.update(clip_grad / (grad_norm + 1.0e-6) if clip_grad > 0.0 else 1.0)
        return bool(optimizer.step_with_ready_grads())
    for member in members(optimizer):
        is_stub = getattr(member, "is_stub_optimizer", False)
        if not is_stub and member.config.clip_grad > 0.0 and (parameters := member.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, max_norm=member.config.clip_grad, total_norm=grad_norm)
    return bool(optimizer.step_with_ready_grads())
