"""Builds the OffloadedOptimizer: cuts parameters into buckets, decides where they are stored, reserves the memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from configs.schema import Config
from memory.budgets import DISK, HOST
from memory.disk import Disk
from memory.host_link import HostLink
from optim.arrangement.buckets import (
    Arrangement,
    ArrangementRequest,
    Bucket,
    Capacity,
    SliceSpan,
    arrange,
    arrangement_request,
    cut,
    largest,
    least,
)
from optim.arrangement.experts import expert_records
from optim.offload.experts import PURPOSE, OffloadedExperts
from optim.offload.optimizer import Hyperparameters, OffloadedOptimizer
from optim.offload.records import RecordLayout, allocate
from parallel.dtypes import DTYPES
from parallel.joint_errors import raised_together
from parallel.megatron.offloaded import (
    ExternalShardedOptimizer,
    ExternalWholeOptimizer,
    OwnedSlice,
    gate_weights,
    owned_slices,
    watch_reduced,
)
from parallel.megatron.optimizer import members
from parallel.owned import is_off_device
from parallel.topology import Topology


def build_offload(
    config: Config,
    topology: Topology,
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    link: HostLink,
    device_capacity: float = math.inf,
) -> OffloadedOptimizer:
    """Build the optimizer that has the offloaded state of Megatron's optimizers, and allocate all its memory.

    A collective call. `device_capacity`: bytes of device memory. Raises ConfigError on every rank if one lacks memory.
    """
    settings, dtype = config.optimizer, DTYPES[config.training.precision]
    experts = _experts(config, topology, chunks, link)
    slices = owned_slices(optimizer, chunks)
    buckets = cut(slices, largest(slices, settings.bucket_parameters))
    if experts is not None:
        add_experts(experts, optimizer, chunks, slices, buckets)
    layout = RecordLayout(dtype != torch.float32, DTYPES[settings.moment_dtype])
    request = arrangement_request(
        config,
        [bucket.numel for bucket in buckets],
        [bucket.reduced_at_step_end for bucket in buckets],
        [bucket.expert_bucket is not None for bucket in buckets],
    )
    disk = None
    with contextlib.ExitStack() as undo:  # on an error, the experts' memory is released
        if experts is not None:
            undo.callback(experts.close)
        with raised_together():
            arrangement = _arrange(request, device_capacity, config)
            if arrangement.disk_bytes:
                assert config.memory.disk_dir is not None
                disk = Disk(config.memory.disk_dir, arrangement.disk_bytes)
        undo.pop_all()
    memory = allocate(arrangement, layout, buckets, experts, dtype, link, disk)
    shared = Hyperparameters(settings.beta1, settings.beta2, settings.epsilon, settings.early_update)
    offload = OffloadedOptimizer(slices, memory, shared)
    if arrangement.flexible:
        offload.choose(settings.engine)
    if experts is None:
        offload.initialize()  # with offloaded experts, later: their weights do not exist yet
    gate_weights(chunks, offload.gate)
    watch_reduced(chunks, offload.reduced)
    for member in members(optimizer):
        if isinstance(member, ExternalShardedOptimizer):
            member.call_on_reload(offload.reload)
    return offload


def _experts(
    config: Config, topology: Topology, chunks: Sequence[DistributedDataParallel], link: HostLink
) -> OffloadedExperts | None:
    """Allocate memory for this rank's offloaded experts, filled with zeros; return None if it has none.

    A collective call. Raises ConfigError on every rank if the memory of a rank does not suffice.
    """
    layers = _offloaded_layers(chunks)
    records = expert_records(config, topology.world_size, len(layers))
    disk = None
    with contextlib.ExitStack() as undo:
        with raised_together():
            if records is not None:
                for budget, num_bytes in ((HOST, records.host_bytes), (DISK, records.disk_bytes)):
                    budget.take(num_bytes, PURPOSE)
                    undo.callback(budget.give, num_bytes, PURPOSE)
                if records.disk_bytes:
                    assert config.memory.disk_dir is not None
                    instead = "moe.weights_device=host optimizer.state_device=host"
                    disk = Disk(config.memory.disk_dir, records.disk_bytes, instead)
                    undo.callback(disk.close)
        undo.pop_all()
    if records is None:
        return None
    several = records.data_parallel_size > 1
    group = topology.expert_data.another_group(config.parallel.timeout_seconds) if several else None
    return OffloadedExperts(records, layers, link, disk, group)


def _offloaded_layers(chunks: Sequence[DistributedDataParallel]) -> list[list[torch.nn.Parameter]]:
    """Return the placeholders of offloaded weights by layer, one for each kind of weight, matrices before biases."""
    found: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}  # by the module of a layer's experts
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.module.named_parameters():
            if is_off_device(parameter):
                found.setdefault(f"{number} {name.rsplit('.', 2)[0]}", []).append((name, parameter))
    layers = (sorted(layer, key=lambda item: item[0].endswith("bias")) for layer in found.values())
    return [[parameter for _, parameter in layer] for layer in layers]


def add_experts(
    experts: OffloadedExperts,
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    slices: list[OwnedSlice],
    buckets: list[Bucket],
) -> None:
    """Add slices and buckets of offloaded experts to those of the other weights, and sort the buckets by first use."""
    order = {id(each): i for i, each in enumerate(p for chunk in chunks for p in chunk.module.parameters())}
    groups = {
        id(parameter): (index, group)
        for index, member in enumerate(members(optimizer))
        if isinstance(member, ExternalWholeOptimizer)
        for group in member.optimizer.param_groups
        for parameter in group["params"]
    }
    records = experts.records
    low, high = experts.shard * records.shard_numel, (experts.shard + 1) * records.shard_numel
    # [start, end) of the elements of each kind of weight that this rank stores.
    kinds = zip(experts.kind_offsets, records.numels, strict=True)
    spans = [(min(max(low - first, 0), numel), min(max(high - first, 0), numel)) for first, numel in kinds]
    for layer, parameters in enumerate(experts.layers):
        layer_slices = []
        for parameter, (start, end) in zip(parameters, spans, strict=True):
            member, group = groups[id(parameter)]
            first = order[id(parameter)]
            layer_slices.append((len(slices), start, end))
            slices.append(OwnedSlice(parameter, start, end, group, (member, layer), True, first))
        buckets += _cut_experts(experts, layer, layer_slices, min(order[id(parameter)] for parameter in parameters))
    # Buckets that DDP gathers together are first needed together, so experts must not be sorted between them.
    gathered: dict[tuple[int, ...], int] = {}
    for bucket in buckets:
        key = slices[bucket.slice_spans[0].index].bucket_key
        gathered[key] = min(gathered.get(key, bucket.order), bucket.order)
    buckets.sort(key=lambda bucket: gathered[slices[bucket.slice_spans[0].index].bucket_key])


def _cut_experts(
    experts: OffloadedExperts, layer: int, slices: Sequence[tuple[int, int, int]], order: int
) -> list[Bucket]:
    """Cut a layer's shard of experts into buckets. slices: (index, first, end) of this rank's elements, by kind."""
    found = []
    for number, (first, end) in enumerate(experts.bounds):
        spans = []
        for (index, low, high), start in zip(slices, experts.kind_offsets, strict=True):
            low, high = max(low, first - start), min(high, end - start)
            if low < high:
                spans.append(SliceSpan(index, low, high, low + start - first))
        if spans:
            found.append(Bucket(tuple(spans), True, order, (layer, number), end - first))
    return found


def _arrange(request: ArrangementRequest, device_capacity: float, config: Config) -> Arrangement:
    """Decide where buckets are stored, and reserve their bytes in the budgets.

    Raises ConfigError if they do not fit.
    """
    on_disk = DISK.headroom if config.memory.disk_dir is not None else 0.0
    found = arrange(request, Capacity(device_capacity, HOST.headroom, on_disk)) or least(request)
    # Reserve the sum first, so that an error names a budget that is enough for all purposes.
    HOST.take(found.host_bytes, "optimizer state off the device")
    HOST.give(found.host_bytes, "optimizer state off the device")
    DISK.take(found.disk_bytes, "optimizer state")
    for purpose, num_bytes in found.host_bytes_by_purpose.items():
        HOST.take(num_bytes, purpose)
    return found
