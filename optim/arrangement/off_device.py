"""What experts off the device take of each tier, and how their records are cut. Pure, and without torch: a run
allocates by it, and its plan counts by it.

A MoE layer's experts on one rank lie in one flat range: all experts' first matrices, second matrices, then biases,
each kind from a multiple of CUT on. Ranks that hold the same experts keep an equal part of it each
(`moe.shard_weights`), or all of it. A bucket is a run of that part: its weights are one record, its gradient another,
its state a third.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from configs import derived
from configs.schema import Config
from memory.host_memory import padded
from optim.arrangement.arrange import GRAD_BYTES
from optim.arrangement.buckets import CUT, MOST

GRAD_SLOTS = 2  # of the device, each for a layer's gradient: one is made, the one before leaves
# Of the host, that records of the disk pass through: those that passes wait for, and those of updates. Apart, as the
# next step's weights would else come behind all updates.
PASS_SLOTS, UPDATE_SLOTS = 4, 4


@dataclass(frozen=True)
class ExpertRecords:
    """The experts of one rank whose weights lie off the device."""

    num_layers: int  # MoE layers of this rank
    numels: tuple[int, ...]  # parameters of one layer's experts on this rank, by kind
    parts: int  # ranks that keep a part each; 1: this rank keeps all
    alike: int  # ranks that hold the same experts
    tier: str  # of the weights and the gradient: host, disk
    weight_bytes: int  # of a parameter
    sums_on_host: bool  # micro-batches of a layer come apart: their gradients are added on the host
    limit: int  # parameters of a bucket, at most
    slots: int  # of the device for weights, at most
    has_shadows: bool = False  # of weights' records: updates may come early
    arrived_numel: int = 0  # of an expert, where gradients of its copies come home

    @property
    def first(self) -> list[int]:
        """Where each kind begins in the flat range."""
        return list(accumulate((_rounded(numel, CUT) for numel in self.numels[:-1]), initial=0))

    @property
    def padded_numel(self) -> int:
        """Elements of the flat range, in equal parts."""
        return _rounded(sum(_rounded(numel, CUT) for numel in self.numels), CUT * self.parts)

    @property
    def part_numel(self) -> int:
        """Elements of it that a rank keeps."""
        return self.padded_numel // self.parts

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """[first, end) of each bucket in a rank's part of a layer."""
        most = min(self.limit, int(MOST * self.num_layers * self.part_numel))
        size = max(most // CUT, 1) * CUT
        return [(first, min(first + size, self.part_numel)) for first in range(0, self.part_numel, size)]

    @property
    def weight_slots(self) -> int:
        """How many layers' weights the device holds: one computes, the next ones' come."""
        return min(self.slots, self.num_layers)

    @property
    def grad_slots(self) -> int:
        return min(GRAD_SLOTS, self.num_layers)

    @property
    def grad_slot_bytes(self) -> int:
        """Bytes of an element of a slot for gradients: fp32's, unless the host adds up and nobody else has a part."""
        return self.weight_bytes if self.sums_on_host and self.alike == 1 else GRAD_BYTES

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
        """Parameters whose gradient a rank keeps of a layer off the device."""
        return self.padded_numel if self.sums_on_host else self.part_numel

    @property
    def weights_kept(self) -> int:
        """Bytes of the weights' records, and of their shadows."""
        each = sum(padded((end - first) * self.weight_bytes) for first, end in self.buckets)
        return self.num_layers * each * (1 + self.has_shadows)

    @property
    def grads_kept(self) -> int:
        """Bytes of the gradients' records: as many buckets of each part that this rank adds up."""
        each = sum(padded((end - first) * GRAD_BYTES) for first, end in self.buckets)
        return self.num_layers * each * (self.sum_numel // self.part_numel)

    @property
    def largest_record(self) -> int:
        """Bytes of a slot of the host for any record of the disk."""
        return padded(max((end - first for first, end in self.buckets), default=0) * max(self.weight_bytes, GRAD_BYTES))

    @property
    def staging(self) -> int:
        """Bytes of the host that records pass through: slots of the disk, a bucket for saves and loads, and what comes
        of micro-batches' gradients."""
        slots = (PASS_SLOTS + UPDATE_SLOTS) * self.largest_record if self.tier == "disk" else 0
        each = self.padded_numel * self.weight_bytes + self.arrived_numel * GRAD_BYTES
        leaving = GRAD_SLOTS * each if self.sums_on_host else 0
        return slots + self.largest_record + leaving

    @property
    def host_bytes(self) -> int:
        kept = self.weights_kept + self.grads_kept if self.tier == "host" else 0
        return kept + self.staging

    @property
    def by_tier(self) -> dict[str, int]:
        """Bytes by what they are for and where they lie."""
        kept = {f"weights_{self.tier}": self.weights_kept, f"gradients_{self.tier}": self.grads_kept}
        return {**kept, "staging_host": self.staging}

    @property
    def disk_bytes(self) -> int:
        return self.weights_kept + self.grads_kept if self.tier == "disk" else 0


def expert_records(config: Config, world_size: int, num_layers: int) -> ExpertRecords | None:
    """What a rank with so many MoE layers keeps; None where experts lie on the device."""
    if not derived.streams_experts(config) or not num_layers:
        return None
    assert config.moe.num_experts is not None
    experts = config.moe.num_experts // config.parallel.expert
    alike = derived.expert_data_parallel_size(config, world_size)
    apart = config.training.pass_order == "by_micro_batch" and derived.num_micro_batches(config, world_size) > 1
    numbers = derived.expert_numbers_by_kind(config)
    return ExpertRecords(
        num_layers=num_layers,
        numels=tuple(experts * number for number in numbers),
        parts=alike if config.moe.shard_weights else 1,
        alike=alike,
        tier=config.moe.weights_device,
        weight_bytes=derived.element_size(config),
        sums_on_host=apart,
        limit=config.optimizer.bucket_parameters,
        slots=config.moe.weight_slots,
        has_shadows=config.optimizer.early_update == "always",
        arrived_numel=sum(numbers) if derived.places_experts(config) else 0,
    )


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
