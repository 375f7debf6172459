"""Tiers for an optimizer, from its config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from configs.schema import Config
from memory.lanes import Lanes
from optim.tiers.buckets import RecordLayout, cut
from optim.tiers.memory import Layout, Tier, Way, allocate
from optim.tiers.tiers import Hyperparameters, Tiers
from parallel.dtypes import DTYPES
from parallel.megatron.optimizer import members
from parallel.megatron.tiered import TieredOptimizer, gate_weights, owned_slices, watch_reduced


def build_tiers(
    config: Config, optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel], device: torch.device
) -> Tiers:
    """The tiers of an optimizer whose members keep no state; all that needs memory is taken here."""
    settings, dtype = config.optimizer, DTYPES[config.training.precision]
    slices = owned_slices(optimizer, chunks)
    buckets = cut(slices, settings.bucket_parameters)
    layout = RecordLayout(dtype != torch.float32, DTYPES[settings.moment_dtype])
    tier: Tier = settings.state_device  # type: ignore[assignment]
    tiers: list[Tier] = [tier] * len(buckets)
    ways = [_way(settings.engine, tier) for tier in tiers]
    # Without overlap DDP reduces gradients when the backward pass is over.
    overlaps = config.parallel.overlap_grad_reduce
    leaving = [overlaps and way == "host" and not bucket.late for way, bucket in zip(ways, buckets, strict=True)]
    early = [
        overlaps and settings.early_update != "never" and way != "device" and not bucket.late
        for way, bucket in zip(ways, buckets, strict=True)
    ]
    numels = [bucket.numel for bucket in buckets]
    memory = allocate(
        Layout(numels, layout.bytes_per_element, tiers, ways, leaving, early, dtype),
        Lanes(device, timeout=config.parallel.timeout_seconds),
    )
    shared = Hyperparameters(settings.beta1, settings.beta2, settings.epsilon, settings.early_update)
    tiers_ = Tiers(slices, buckets, layout, memory, shared)
    tiers_.begin()
    gate_weights(chunks, tiers_.gate)
    watch_reduced(chunks, tiers_.reduced)
    for member in members(optimizer):
        assert isinstance(member, TieredOptimizer)
        member.reload = tiers_.reload  # type: ignore[method-assign]
    return tiers_


def _way(engine: str, tier: Tier) -> Way:
    if tier == "device":
        return "device"
    return "host" if engine == "host" else "device_stream"
