"""The optimizer: Megatron-core's mixed-precision and sharded AdamW, with torch's fused kernel where TE and apex are
missing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer

from configs import derived
from configs.schema import Config
from memory.host_link import HostLink
from optim.schedule import learning_rate
from optim.tiers.build import build_tiers
from parallel.dtypes import DTYPES
from parallel.megatron.optimizer import build_chain, members, share_scaler
from parallel.megatron.tiered import building_tiered
from parallel.topology import Topology


def build_optimizer(
    config: Config,
    topology: Topology,
    chunks: list[torch.nn.Module],
    link: HostLink,
    device_room: float = math.inf,
) -> MegatronOptimizer:
    """The optimizer of this rank's model chunks, which must be wrapped in Megatron's DistributedDataParallel.
    `link`: what state off the device comes and goes by. `device_room`: bytes of the device that its state may take. A
    collective call. Raises ConfigError where a rank's state does not fit."""
    tiered = derived.has_tiers(config)
    with building_tiered() if tiered else contextlib.nullcontext():
        optimizer = _build(config, topology, chunks)
    share_scaler(optimizer)
    optimizer.tiers = build_tiers(config, topology, optimizer, chunks, link, device_room) if tiered else None
    for member in members(optimizer):
        if isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:
                group["foreach"], group["fused"] = False, True
    return optimizer


def _build(config: Config, topology: Topology, chunks: list[torch.nn.Module]) -> MegatronOptimizer:
    settings, precision = config.optimizer, config.training.precision
    return build_chain(
        MegatronOptimizerConfig(
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
        ),
        chunks,
        topology.groups,
    )


def param_groups(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """Every parameter group of every member that holds parameters on this rank."""
    for member in members(optimizer):
        if member.optimizer is not None:
            yield from member.optimizer.param_groups


def set_learning_rate(optimizer: MegatronOptimizer, config: Config, step: int) -> float:
    """Set rate and weight decay for optimizer step `step` (from 1) in every group, and return the rate."""
    rate = learning_rate(config.optimizer, config.training.steps, step)
    for group in param_groups(optimizer):
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = config.optimizer.weight_decay * group.get("wd_mult", 1.0)
    return rate
