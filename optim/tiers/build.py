"""Tiers for an optimizer, from its config."""

from __future__ import annotations

import contextlib
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
from optim.arrangement.buckets import Bucket, Piece, cut, largest
from optim.arrangement.off_device import expert_records
from optim.tiers.buckets import RecordLayout
from optim.tiers.expert_tier import WHAT, ExpertTier
from optim.tiers.memory import allocate
from optim.tiers.tiers import Hyperparameters, Tiers
from parallel.dtypes import DTYPES
from parallel.megatron.optimizer import members
from parallel.megatron.tiered import (
    OwnedSlice,
    TieredOptimizer,
    TieredWhole,
    gate_weights,
    owned_slices,
    watch_reduced,
)
from parallel.owned import is_off_device
from parallel.refusal import raise_together
from parallel.topology import Topology


def build_tiers(
    config: Config,
    topology: Topology,
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    link: HostLink,
    device_room: float = math.inf,
) -> Tiers:
    """The tiers of an optimizer whose members keep no state; all memory that they need is taken here. A collective
    call. `device_room`: bytes of the device that may hold state. Raises ConfigError on every rank where a rank's state
    does not fit."""
    settings, dtype = config.optimizer, DTYPES[config.training.precision]
    experts = _experts(config, topology, chunks, link)
    slices = owned_slices(optimizer, chunks)
    buckets = cut(slices, largest(slices, settings.bucket_parameters))
    if experts is not None:
        add_experts(experts, optimizer, chunks, slices, buckets)
    layout = RecordLayout(dtype != torch.float32, DTYPES[settings.moment_dtype])
    numels, late = [bucket.numel for bucket in buckets], [bucket.late for bucket in buckets]
    asked = tier_request(config, numels, late, [bucket.of_experts is not None for bucket in buckets])
    arrangement, disk, problem = None, None, None
    with contextlib.ExitStack() as undo:  # a refusal leaves nothing taken for experts
        if experts is not None:
            undo.callback(experts.close)
        try:
            arrangement = _arrange(asked, device_room, config)
            if arrangement.disk_bytes:
                assert config.memory.disk_dir is not None
                disk = Disk(config.memory.disk_dir, arrangement.disk_bytes)
        except ConfigError as error:
            problem = str(error)
        raise_together(problem)
        undo.pop_all()
    assert arrangement is not None
    memory = allocate(arrangement, dtype, link, disk)
    shared = Hyperparameters(settings.beta1, settings.beta2, settings.epsilon, settings.early_update)
    tiers = Tiers(slices, buckets, layout, memory, shared, experts)
    if arrangement.flexible:
        tiers.choose(settings.engine)
    if experts is None:
        tiers.begin()  # else once the experts' weights are there
    gate_weights(chunks, tiers.gate)
    watch_reduced(chunks, tiers.reduced)
    for member in members(optimizer):
        if isinstance(member, TieredOptimizer):
            member.reload = tiers.reload  # type: ignore[method-assign]
    return tiers


def _experts(
    config: Config, topology: Topology, chunks: Sequence[DistributedDataParallel], link: HostLink
) -> ExpertTier | None:
    """The records of experts off the device, zeroed; None where there are none. A collective call. Raises ConfigError
    on every rank where a rank's do not fit."""
    layers = _layers_off_device(chunks)
    records = expert_records(config, topology.world_size, len(layers))
    problem, disk = None, None
    with contextlib.ExitStack() as undo:
        try:
            if records is not None:
                for budget, num_bytes in ((HOST, records.host_bytes), (DISK, records.disk_bytes)):
                    budget.take(num_bytes, WHAT)
                    undo.callback(budget.give, num_bytes, WHAT)
                if records.disk_bytes:
                    assert config.memory.disk_dir is not None
                    instead = "moe.weights_device=host optimizer.state_device=host"
                    disk = Disk(config.memory.disk_dir, records.disk_bytes, instead)
                    undo.callback(disk.close)
        except ConfigError as error:
            problem = str(error)
        raise_together(problem)
        undo.pop_all()
    if records is None:
        return None
    group = topology.expert_data.another_group(config.parallel.timeout_seconds) if records.alike > 1 else None
    return ExpertTier(records, layers, link, disk, group)


def _layers_off_device(chunks: Sequence[DistributedDataParallel]) -> list[list[torch.nn.Parameter]]:
    """Stand-ins for weights off the device, layer by layer: one of each kind, matrices before biases."""
    found: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}  # by the module that holds a layer's
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.module.named_parameters():
            if is_off_device(parameter):
                found.setdefault(f"{number} {name.rsplit('.', 2)[0]}", []).append((name, parameter))
    of_layers = (sorted(layer, key=lambda item: item[0].endswith("bias")) for layer in found.values())
    return [[parameter for _, parameter in layer] for layer in of_layers]


def add_experts(
    experts: ExpertTier,
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    slices: list[OwnedSlice],
    buckets: list[Bucket],
) -> None:
    """Add the slices and buckets of experts off the device to those on it, in the order of first use."""
    order = {id(each): i for i, each in enumerate(p for chunk in chunks for p in chunk.module.parameters())}
    groups = {
        id(parameter): (index, group)
        for index, member in enumerate(members(optimizer))
        if isinstance(member, TieredWhole)
        for group in member.optimizer.param_groups
        for parameter in group["params"]
    }
    for layer, parameters in enumerate(experts.layers):
        of_layer = []
        for parameter, (start, end) in zip(parameters, _spans(experts), strict=True):
            member, group = groups[id(parameter)]
            first = order[id(parameter)]
            of_layer.append((len(slices), start, end))
            slices.append(OwnedSlice(parameter, start, end, group, (member, layer), True, first))
        buckets += _cut(experts, layer, of_layer, min(order[id(parameter)] for parameter in parameters))
    # What DDP gathers at once is first used at once: it must not wait for the experts between.
    gathered: dict[tuple[int, ...], int] = {}
    for bucket in buckets:
        place = slices[bucket.pieces[0].index].place
        gathered[place] = min(gathered.get(place, bucket.order), bucket.order)
    buckets.sort(key=lambda bucket: gathered[slices[bucket.pieces[0].index].place])


def _spans(experts: ExpertTier) -> list[tuple[int, int]]:
    """First and last element of each kind of weight that this rank keeps."""
    records, part = experts.records, experts.part
    low, high = part * records.part_numel, (part + 1) * records.part_numel
    kinds = zip(experts.first, records.numels, strict=True)
    return [(min(max(low - start, 0), numel), min(max(high - start, 0), numel)) for start, numel in kinds]


def _cut(experts: ExpertTier, layer: int, slices: Sequence[tuple[int, int, int]], order: int) -> list[Bucket]:
    """The buckets of a layer's part, of slices (index, first and last element of its kind of weight here): one for
    each kind."""
    found = []
    for number, (first, end) in enumerate(experts.bounds):
        pieces = []
        for (index, low, high), start in zip(slices, experts.first, strict=True):
            low, high = max(low, first - start), min(high, end - start)
            if low < high:
                pieces.append(Piece(index, low, high, low + start - first))
        if pieces:
            found.append(Bucket(tuple(pieces), True, order, (layer, number), end - first))
    return found


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
