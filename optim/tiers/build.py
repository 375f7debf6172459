"""Tiers for an optimizer, from its config."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from configs.schema import Config, ConfigError
from memory.budgets import DISK, HOST
from memory.disk import Disk
from memory.host_link import HostLink
from optim.arrangement.arrange import Arrangement, Capacity, TierRequest, arrange, least, tier_request
from optim.arrangement.buckets import cut, largest
from optim.tiers.buckets import RecordLayout
from optim.tiers.memory import allocate
from optim.tiers.tiers import Hyperparameters, Tiers
from parallel.dtypes import DTYPES
from parallel.megatron.optimizer import members
from parallel.megatron.tiered import TieredOptimizer, gate_weights, owned_slices, watch_reduced
from parallel.refusal import raise_together


def build_tiers(
    config: Config,
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    link: HostLink,
    device_room: float = math.inf,
) -> Tiers:
    """The tiers of an optimizer whose members keep no state; all memory that they need is taken here. A collective
    call. `device_room`: bytes of the device that may hold state. Raises ConfigError on every rank where a rank's state
    does not fit."""
    settings, dtype = config.optimizer, DTYPES[config.training.precision]
    slices = owned_slices(optimizer, chunks)
    buckets = cut(slices, largest(slices, settings.bucket_parameters))
    layout = RecordLayout(dtype != torch.float32, DTYPES[settings.moment_dtype])
    asked = tier_request(config, [bucket.numel for bucket in buckets], [bucket.late for bucket in buckets])
    arrangement, disk, problem = None, None, None
    try:
        arrangement = _arrange(asked, device_room, config)
        if arrangement.disk_bytes:
            assert config.memory.disk_dir is not None
            disk = Disk(config.memory.disk_dir, arrangement.disk_bytes)
    except ConfigError as error:
        problem = str(error)
    raise_together(problem)
    assert arrangement is not None
    memory = allocate(arrangement, dtype, link, disk)
    shared = Hyperparameters(settings.beta1, settings.beta2, settings.epsilon, settings.early_update)
    tiers = Tiers(slices, buckets, layout, memory, shared)
    if arrangement.flexible:
        tiers.choose(settings.engine)
    tiers.begin()
    gate_weights(chunks, tiers.gate)
    watch_reduced(chunks, tiers.reduced)
    for member in members(optimizer):
        if isinstance(member, TieredOptimizer):
            member.reload = tiers.reload  # type: ignore[method-assign]
    return tiers


def _arrange(request: TierRequest, device_room: float, config: Config) -> Arrangement:
    """Where this rank's buckets lie, within the budgets, which count it from now on. Raises ConfigError."""
    on_disk = DISK.room if config.memory.disk_dir is not None else 0.0
    found = arrange(request, Capacity(device_room, HOST.room, on_disk))
    if found is None:
        found = least(request)
    # In one sum, so that a refusal names what would do for all of it.
    HOST.take(found.host_bytes, "optimizer state off the device")
    HOST.give(found.host_bytes, "optimizer state off the device")
    DISK.take(found.disk_bytes, "optimizer state")
    for what, num_bytes in found.host_parts.items():
        HOST.take(num_bytes, what)
    return found
