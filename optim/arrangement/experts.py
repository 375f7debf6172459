"""Offloaded experts: how their records are cut, the memory that they take on each target, and the bytes that a step
moves. Pure functions without torch: a run allocates by them, and its plan counts by them.

A MoE layer's experts on one rank are one flat range: all experts' first matrices, second matrices, then biases, each
kind from a multiple of CUT on. Each rank of those with the same experts keeps an equal shard of it
(`moe.shard_weights`), or all of it. A bucket is a run of that shard: its weights are one record, its gradient another,
its state a third.
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

GRAD_SLOTS = 2  # of the device, each for a layer's gradient: one is computed while the one before is copied out
# Host stages for records of the disk: for those that passes wait for, and for updates. They are separate, as the next
# step's weights would otherwise be queued behind all updates.
PASS_STAGES, UPDATE_STAGES = 4, 4
MASTER_BYTES = 4  # of a weight that is its own master


@dataclass(frozen=True)
class ExpertRecords:
    """The offloaded experts of one rank: how their flat range is cut, and its bytes on device, host and disk."""

    num_layers: int  # MoE layers of this rank
    numels: tuple[int, ...]  # parameters of one layer's experts on this rank, by kind
    num_shards: int  # ranks that keep a shard each; 1: this rank keeps all
    data_parallel_size: int  # ranks that hold the same experts
    target: str  # of the weights and the gradient: host, disk
    weight_bytes: int  # of a parameter
    sums_on_host: bool  # a layer's gradients of several micro-batches are added on the host
    limit: int  # the most parameters of a bucket
    max_slots: int  # of the device, for weights
    has_shadows: bool = False  # of weights' records: updates may be early
    arrived_numel: int = 0  # of an expert, where gradients of its replicas arrive at its primary

    @property
    def kind_offsets(self) -> list[int]:
        """The first element of each kind in the flat range."""
        return list(accumulate((_rounded(numel, CUT) for numel in self.numels[:-1]), initial=0))

    @property
    def padded_numel(self) -> int:
        """Elements of the flat range, a whole number of equal shards."""
        return _rounded(sum(_rounded(numel, CUT) for numel in self.numels), CUT * self.num_shards)

    @property
    def shard_numel(self) -> int:
        """Elements of the flat range that a rank keeps."""
        return self.padded_numel // self.num_shards

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """[first, end) of each bucket in a rank's shard of a layer."""
        most = min(self.limit, int(MOST * self.num_layers * self.shard_numel))
        size = max(most // CUT, 1) * CUT
        return [(first, min(first + size, self.shard_numel)) for first in range(0, self.shard_numel, size)]

    @property
    def weight_slots(self) -> int:
        """Number of layers whose weights the device holds: one computes while the next ones are fetched."""
        return min(self.max_slots, self.num_layers)

    @property
    def grad_slots(self) -> int:
        return min(GRAD_SLOTS, self.num_layers)

    @property
    def grad_slot_bytes(self) -> int:
        """Bytes of an element of a slot for gradients: fp32, unless the host adds up and no other rank has a shard."""
        return self.weight_bytes if self.sums_on_host and self.data_parallel_size == 1 else GRAD_BYTES

    @property
    def weights_on_device(self) -> int:
        """Bytes of the slots for weights."""
        return self.weight_slots * self.padded_numel * self.weight_bytes

    @property
    def grads_on_device(self) -> int:
        """Bytes of the slots for gradients."""
        return self.grad_slots * self.padded_numel * self.grad_slot_bytes

    @property
    def sum_numel(self) -> int:
        """Parameters of a layer whose gradient a rank keeps on the target."""
        return self.padded_numel if self.sums_on_host else self.shard_numel

    @property
    def weights_kept(self) -> int:
        """Bytes of the weights' records, and of their shadows."""
        each = sum(padded((end - first) * self.weight_bytes) for first, end in self.buckets)
        return self.num_layers * each * (1 + self.has_shadows)

    @property
    def grads_kept(self) -> int:
        """Bytes of the gradients' records: the buckets of each shard that this rank adds up."""
        each = sum(padded((end - first) * GRAD_BYTES) for first, end in self.buckets)
        return self.num_layers * each * (self.sum_numel // self.shard_numel)

    @property
    def largest_record(self) -> int:
        """Bytes of a host stage for any record of the disk."""
        return padded(max((end - first for first, end in self.buckets), default=0) * max(self.weight_bytes, GRAD_BYTES))

    @property
    def staging(self) -> int:
        """Bytes of the host that records pass through: stages for the disk, a bucket for saves and loads, and stages
        for micro-batches' gradients."""
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
        """Bytes by purpose and target, with the keys of the metrics."""
        kept = {f"weights_{self.target}": self.weights_kept, f"gradients_{self.target}": self.grads_kept}
        return {**kept, "staging_host": self.staging}

    @property
    def bytes_by_purpose(self) -> dict[str, dict[str, int]]:
        """Bytes by target, then by purpose; the arrangement counts the experts' optimizer state."""
        kept, none = {"weights": self.weights_kept, "gradients": self.grads_kept}, {"weights": 0, "gradients": 0}
        return {
            "device": {"weights": self.weights_on_device, "gradients": self.grads_on_device},
            "host": {**(kept if self.target == "host" else none), "staging": self.staging},
            "disk": kept if self.target == "disk" else none,
        }


def expert_records(config: Config, world_size: int, num_layers: int) -> ExpertRecords | None:
    """Return the records of a rank with this number of MoE layers; None where experts are stored on the device."""
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
    """Return the records of a stage's ranks; None where experts are stored on the device or there are none."""
    is_moe = derived.moe_layer_pattern(config)
    layers = [layer for chunk in layers_of_stage(config, stage) for layer in chunk]
    return expert_records(config, world_size, sum(bool(is_moe[layer]) for layer in layers))


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ---------------------------------------------------------------------------------------------------------------------
# Traffic of a step
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BytesMoved:
    """Bytes of experts that one rank moves: over the link `up` to the device and `down` from it, `read` from the disk
    and `written` to it; `gathered` and `reduced` among ranks with the same experts, all ranks together; `host`: host
    memory that additions and updates read and write."""

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
        """Multiply all bytes by a number."""
        return BytesMoved(*(number * each for each in astuple(self)))


@dataclass(frozen=True)
class LayerTraffic:
    """Bytes that one rank moves for one layer's experts; `state_target`, `state_bytes`: of a parameter's optimizer
    state."""

    records: ExpertRecords
    state_target: str
    state_bytes: int
    num_gradients: int  # that a layer sends to the target in a step

    @property
    def on_disk(self) -> bool:
        return self.records.target == "disk"

    def fetch(self) -> BytesMoved:
        """Weights are fetched to a slot: a rank's shard from its target, the other shards from the other ranks."""
        shard = self.records.shard_numel * self.records.weight_bytes
        whole = self.records.padded_numel * self.records.weight_bytes
        return BytesMoved(up=shard, read=shard * self.on_disk, gathered=whole if self.records.num_shards > 1 else 0)

    def gradient(self, is_first: bool, is_last: bool) -> BytesMoved:
        """A gradient is copied out: a micro-batch's, which the host adds to the earlier ones, or the sum of all."""
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
        """Return the bytes that the optimizer's step on a rank's shard moves, if it runs on the host."""
        of, state = self.records, self.state_bytes
        weights, disk = of.weight_bytes, int(self.on_disk)
        state_disk = state * (self.state_target == "disk")
        own = weights if weights == MASTER_BYTES else 0  # a weight that is no master is not read
        copied = (
            2 * of.has_shadows * (state * (self.state_target == "host") + own * (1 - disk))
        )  # to shadows of the host
        return BytesMoved(
            read=of.shard_numel * (disk * (GRAD_BYTES + own) + state_disk),
            written=of.shard_numel * (disk * weights + state_disk),
            host=of.shard_numel * (2 * state + copied + GRAD_BYTES + weights + own),
        )

    @property
    def gradients_out(self) -> BytesMoved:
        """Gradients of all layers in a step."""
        ends = self.gradient(True, self.num_gradients == 1)
        if self.num_gradients > 1:
            ends += self.gradient(False, True) + self.gradient(False, False).times(self.num_gradients - 2)
        return ends.times(self.records.num_layers)

    @property
    def updates(self) -> BytesMoved:
        """Updates of all layers in a step."""
        return self.update().times(self.records.num_layers)


@dataclass(frozen=True)
class ExpertTraffic:
    """The experts' traffic of one rank in a step. `visits`: MoE layers in the order of use; `fills`: when their weights
    are fetched to a slot."""

    layer: LayerTraffic
    visits: Sequence[int]
    fills: Sequence[PlannedFill]

    @property
    def fetched(self) -> BytesMoved:
        """Weights of all layers."""
        return self.layer.fetch().times(len(self.fills))

    @property
    def total(self) -> BytesMoved:
        return self.fetched + self.layer.gradients_out + self.layer.updates


def moe_visits(config: Config, num_micro_batches: int, stage: int, forward_only: bool = False) -> list[int]:
    """Return the MoE layers of a stage, from 0 in the whole model, in the order in which a step visits them."""
    is_moe = derived.moe_layer_pattern(config)
    return [layer for layer in layer_visits(config, num_micro_batches, stage, forward_only) if is_moe[layer]]


def layer_traffic(config: Config, world_size: int, stage: int) -> LayerTraffic | None:
    """Return the traffic of one layer on a stage's ranks; None where no experts are offloaded."""
    records = records_of_stage(config, world_size, stage)
    if records is None:
        return None
    num_gradients = derived.num_micro_batches(config, world_size) if records.sums_on_host else 1
    return LayerTraffic(records, config.optimizer.state_device, state_bytes_per_weight(config), num_gradients)


def expert_traffic(config: Config, world_size: int, stage: int) -> ExpertTraffic | None:
    """Return the traffic of a stage's ranks in a step; None where no experts are offloaded."""
    layer = layer_traffic(config, world_size, stage)
    if layer is None:
        return None
    visits = moe_visits(config, derived.num_micro_batches(config, world_size), stage)
    return ExpertTraffic(layer, visits, slot_fills(visits, layer.records.weight_slots))
