"""Offloaded experts: how their records are cut, their memory on device, host and disk, and the bytes transferred. These
are pure functions without torch: a run allocates memory with them, and planning a run counts it.

The experts of a MoE layer on one rank form one flat range: all experts' first matrices, second matrices, then biases,
each kind starting at a multiple of CUT. Each of the ranks with the same experts stores an equal shard of the range
(`moe.shard_weights`), or all of it. A bucket is a run of that shard, with one record per kind of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

from configs import derived
from configs.schema import Config
from memory.host_memory import padded
from optim.arrangement.buckets import CUT, GRAD_BYTES, MOST, state_bytes_per_weight
from parallel.pipeline import PlannedFill, layer_visits, layers_of_stage, slot_fills

GRAD_SLOTS = 2  # device buffers for a layer's gradient: one is computed while the one before is copied out
# Host buffers for records of the disk: for weights that passes wait for, and for updates. They are separate, because
# otherwise the next step's weights would be queued behind all updates.
PASS_STAGES, UPDATE_STAGES = 4, 4
MASTER_BYTES = 4  # of a weight in fp32, which is its own master


@dataclass(frozen=True)
class ExpertRecords:
    """Planned sizes of one rank's offloaded experts, in elements, and in bytes on device, host and disk.

    All weights of a layer form a flat range of elements. It is cut into shards, and a shard into buckets.
    """

    num_layers: int  # MoE layers of this rank
    numels: tuple[int, ...]  # parameters of one layer's experts on this rank, by kind
    num_shards: int  # ranks that store a shard each; 1: this rank stores all
    data_parallel_size: int  # ranks that hold the same experts
    target: str  # of the weights and the gradient: host, disk
    weight_bytes: int  # of a parameter
    sums_on_host: bool  # whether the host adds up a layer's gradients of several micro-batches
    limit: int  # the most parameters of a bucket
    max_slots: int  # the most device buffers for a layer's weights
    has_shadows: bool = False  # whether weights have second records for early updates
    arrived_numel: int = 0  # parameters of an expert, if replicas send gradients to its primary; else 0

    @property
    def kind_offsets(self) -> list[int]:
        """First element of each kind of weight (first matrices, second matrices, biases) in a layer's flat weights."""
        return list(accumulate((padded(numel, CUT) for numel in self.numels[:-1]), initial=0))

    @property
    def padded_numel(self) -> int:
        """Number of elements of a layer's flat weights, padded to equal shards."""
        return padded(sum(padded(numel, CUT) for numel in self.numels), CUT * self.num_shards)

    @property
    def shard_numel(self) -> int:
        """Number of elements of a layer's flat weights that one rank stores."""
        return self.padded_numel // self.num_shards

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """Elements [first, end) of each bucket in this rank's shard of a layer."""
        most = min(self.limit, int(MOST * self.num_layers * self.shard_numel))
        size = max(most // CUT, 1) * CUT
        return [(first, min(first + size, self.shard_numel)) for first in range(0, self.shard_numel, size)]

    @property
    def weight_slots(self) -> int:
        """Number of device buffers for a layer's weights: while a layer computes, the next ones are prefetched."""
        return min(self.max_slots, self.num_layers)

    @property
    def grad_slots(self) -> int:
        return min(GRAD_SLOTS, self.num_layers)

    @property
    def grad_slot_bytes(self) -> int:
        """Bytes per element of a device buffer for gradients: those of a weight if only the host sums them, else 4."""
        return self.weight_bytes if self.sums_on_host and self.data_parallel_size == 1 else GRAD_BYTES

    @property
    def weights_on_device(self) -> int:
        """Bytes of the device buffers for layers' weights."""
        return self.weight_slots * self.padded_numel * self.weight_bytes

    @property
    def grads_on_device(self) -> int:
        """Bytes of the device buffers for layers' gradients."""
        return self.grad_slots * self.padded_numel * self.grad_slot_bytes

    @property
    def sum_numel(self) -> int:
        """Elements of a layer's gradient that this rank stores on the host or disk."""
        return self.padded_numel if self.sums_on_host else self.shard_numel

    @property
    def weights_kept(self) -> int:
        """Bytes of the weights on the host or disk.

        They include second copies (shadows) for updates during the backward pass.
        """
        each = sum(padded((end - first) * self.weight_bytes) for first, end in self.buckets)
        return self.num_layers * each * (1 + self.has_shadows)

    @property
    def grads_kept(self) -> int:
        """Bytes of the gradients on the host or disk, for all shards that this rank sums."""
        each = sum(padded((end - first) * GRAD_BYTES) for first, end in self.buckets)
        return self.num_layers * each * (self.sum_numel // self.shard_numel)

    @property
    def largest_record(self) -> int:
        """Bytes of a host buffer that can hold any weights or gradient of one bucket on the disk."""
        return padded(max((end - first for first, end in self.buckets), default=0) * max(self.weight_bytes, GRAD_BYTES))

    @property
    def staging(self) -> int:
        """Bytes of reused host buffers: for reads and writes of the disk, saves, and micro-batches' gradients."""
        disk_stages = (PASS_STAGES + UPDATE_STAGES) * self.largest_record if self.target == "disk" else 0
        each = self.padded_numel * self.weight_bytes + self.arrived_numel * GRAD_BYTES
        leaving = GRAD_SLOTS * each if self.sums_on_host else 0
        return disk_stages + self.largest_record + leaving

    @property
    def host_bytes(self) -> int:
        kept = self.weights_kept + self.grads_kept if self.target == "host" else 0
        return kept + self.staging

    @property
    def disk_bytes(self) -> int:
        return self.weights_kept + self.grads_kept if self.target == "disk" else 0

    @property
    def bytes_by_target(self) -> dict[str, int]:
        """Bytes of weights, gradients and buffers on the host or disk, with the keys of the metrics."""
        kept = {f"weights_{self.target}": self.weights_kept, f"gradients_{self.target}": self.grads_kept}
        return {**kept, "staging_host": self.staging}

    @property
    def bytes_by_purpose(self) -> dict[str, dict[str, int]]:
        """Bytes of experts as {"device" | "host" | "disk": {purpose: bytes}}, without their optimizer state."""
        kept, none = {"weights": self.weights_kept, "gradients": self.grads_kept}, {"weights": 0, "gradients": 0}
        return {
            "device": {"weights": self.weights_on_device, "gradients": self.grads_on_device},
            "host": {**(kept if self.target == "host" else none), "staging": self.staging},
            "disk": kept if self.target == "disk" else none,
        }


def expert_records(config: Config, world_size: int, num_layers: int) -> ExpertRecords | None:
    """Return the planned sizes of a rank with this number of MoE layers, or None if experts stay on the device."""
    if not derived.streams_experts(config) or not num_layers:
        return None
    assert config.moe.num_experts is not None
    experts = config.moe.num_experts // config.parallel.expert
    data_parallel_size = derived.expert_data_parallel_size(config, world_size)
    several = config.training.pass_order == "by_micro_batch" and derived.num_micro_batches(config, world_size) > 1
    numbers = derived.expert_numel_by_matrix(config)
    return ExpertRecords(
        num_layers=num_layers,
        numels=tuple(experts * number for number in numbers),
        num_shards=data_parallel_size if config.moe.shard_weights else 1,
        data_parallel_size=data_parallel_size,
        target=config.moe.weights_device,
        weight_bytes=derived.element_size(config),
        sums_on_host=several,
        limit=config.optimizer.bucket_parameters,
        max_slots=config.moe.weight_slots,
        has_shadows=config.optimizer.early_update == "always",
        arrived_numel=sum(numbers) if derived.places_experts(config) else 0,
    )


def records_of_stage(config: Config, world_size: int, stage: int) -> ExpertRecords | None:
    """Return the planned sizes of the records of offloaded experts on each rank of a pipeline stage; None if there are
    none."""
    is_moe = derived.moe_layer_pattern(config)
    layers = [layer for chunk in layers_of_stage(config, stage) for layer in chunk]
    return expert_records(config, world_size, sum(bool(is_moe[layer]) for layer in layers))


# -- traffic of a step -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BytesMoved:
    """Bytes of offloaded experts that one rank moves, by resource.

    `up` to the device and `down` from it; `read` and `written` on disk; `gathered` and `reduced` over all ranks with
    the same experts; `host`: in host memory by additions and updates.
    """

    up: int = 0
    down: int = 0
    read: int = 0
    written: int = 0
    gathered: int = 0
    reduced: int = 0
    host: int = 0

    def __add__(self, other: BytesMoved) -> BytesMoved:
        return BytesMoved(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, number: int) -> BytesMoved:
        """Return all byte counts multiplied by a number."""
        return BytesMoved(*(number * each for each in astuple(self)))


@dataclass(frozen=True)
class LayerTraffic:
    """Planned bytes that a rank moves for a layer's offloaded experts. `state_bytes`: optimizer state per parameter."""

    records: ExpertRecords
    state_target: str
    state_bytes: int
    num_gradients: int  # copied out per layer and step

    @property
    def on_disk(self) -> bool:
        return self.records.target == "disk"

    def fetch(self) -> BytesMoved:
        """Return the bytes of fetching a layer's weights: one shard from host or disk, the others from other ranks."""
        shard = self.records.shard_numel * self.records.weight_bytes
        whole = self.records.padded_numel * self.records.weight_bytes
        return BytesMoved(up=shard, read=shard * self.on_disk, gathered=whole if self.records.num_shards > 1 else 0)

    def gradient(self, is_first: bool, is_last: bool) -> BytesMoved:
        """Return the bytes of copying a layer's gradient off the device: a micro-batch's, to be added up, or the sum.

        `is_first`, `is_last`: whether it is the step's first or last micro-batch.
        """
        of, disk = self.records, int(self.on_disk)
        kept, whole = of.shard_numel * GRAD_BYTES, of.padded_numel * GRAD_BYTES
        reduced = whole if of.data_parallel_size > 1 else 0
        if not of.sums_on_host:
            return BytesMoved(down=kept, written=kept * disk, reduced=reduced)
        if is_last and of.data_parallel_size > 1:
            return BytesMoved(up=whole, down=kept, read=whole * disk, written=kept * disk, reduced=reduced)
        own, earlier = of.padded_numel * of.weight_bytes, 0 if is_first else whole
        return BytesMoved(down=own, read=earlier * disk, written=whole * disk, host=own + earlier + whole)

    def update(self) -> BytesMoved:
        """Return the bytes moved by the optimizer's update of this rank's shard of a layer, if the host runs it."""
        of, state = self.records, self.state_bytes
        weights, disk = of.weight_bytes, int(self.on_disk)
        state_disk = state * (self.state_target == "disk")
        own = weights if weights == MASTER_BYTES else 0  # a weight is read only if it is its own master
        to_shadows = 2 * of.has_shadows * (state * (self.state_target == "host") + own * (1 - disk))  # on the host
        return BytesMoved(
            read=of.shard_numel * (disk * (GRAD_BYTES + own) + state_disk),
            written=of.shard_numel * (disk * weights + state_disk),
            host=of.shard_numel * (2 * state + to_shadows + GRAD_BYTES + weights + own),
        )

    @property
    def gradients_out(self) -> BytesMoved:
        """Bytes of copying the gradients of all layers off the device in a step."""
        ends = self.gradient(True, self.num_gradients == 1)
        if self.num_gradients > 1:
            ends += self.gradient(False, True) + self.gradient(False, False).times(self.num_gradients - 2)
        return ends.times(self.records.num_layers)

    @property
    def updates(self) -> BytesMoved:
        """Bytes of the optimizer's updates of all layers in a step."""
        return self.update().times(self.records.num_layers)


@dataclass(frozen=True)
class ExpertTraffic:
    """Planned bytes that one rank moves for offloaded experts in a step.

    `visits`: MoE layers in the order of use. `fills`: copies of a layer's weights to a device buffer.
    """

    layer: LayerTraffic
    visits: Sequence[int]
    fills: Sequence[PlannedFill]

    @property
    def fetched(self) -> BytesMoved:
        """Bytes of fetching the weights of all layers to the device in a step."""
        return self.layer.fetch().times(len(self.fills))

    @property
    def total(self) -> BytesMoved:
        return self.fetched + self.layer.gradients_out + self.layer.updates


def moe_visits(config: Config, num_micro_batches: int, stage: int, forward_only: bool = False) -> list[int]:
    """Return a stage's MoE layers (numbered from 0 in the whole model) in the order in which a step visits them."""
    is_moe = derived.moe_layer_pattern(config)
    return [layer for layer in layer_visits(config, num_micro_batches, stage, forward_only) if is_moe[layer]]


def layer_traffic(config: Config, world_size: int, stage: int) -> LayerTraffic | None:
    """Return the bytes that a rank of a stage transfers for one layer's experts, or None if none are offloaded."""
    records = records_of_stage(config, world_size, stage)
    if records is None:
        return None
    num_gradients = derived.num_micro_batches(config, world_size) if records.sums_on_host else 1
    return LayerTraffic(records, config.optimizer.state_device, state_bytes_per_weight(config), num_gradients)


def expert_traffic(config: Config, world_size: int, stage: int) -> ExpertTraffic | None:
    """Return the bytes that a rank of a stage transfers for experts in a step, or None if none are offloaded."""
    layer = layer_traffic(config, world_size, stage)
    if layer is None:
        return None
    visits = moe_visits(config, derived.num_micro_batches(config, world_size), stage)
    return ExpertTraffic(layer, visits, slot_fills(visits, layer.records.weight_slots))
