"""The memory that an optimizer's tiers have, allocated once: residents and slots of the device, records, slots and
staging of the host, a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from memory.lanes import Done, Lanes
from memory.store import NUM_SLOTS, Store

Tier = Literal["device", "host", "disk"]
Way = Literal["device", "device_stream", "host"]  # where a bucket is updated; device: in place


@dataclass
class DeviceSlot:
    """Memory of the device for one record on its way."""

    record: torch.Tensor
    weights: torch.Tensor | None  # where early updates put new weights, flat, in the model's dtype
    free: Done = field(default_factory=Done.already)


@dataclass
class StagingSlot:
    """Memory of the host for the gradient and the weights of one bucket on their way."""

    grads: torch.Tensor  # fp32, flat
    weights: torch.Tensor  # of the model's dtype, flat
    free: Done = field(default_factory=Done.already)


@dataclass
class TierMemory:
    """Where each bucket's record is, and what it passes through."""

    tiers: Sequence[Tier]
    ways: Sequence[Way]
    lanes: Lanes
    store: Store  # index for index the buckets'; those of the device have no place in it
    resident: Sequence[torch.Tensor | None]  # records of the device
    device_slots: Sequence[DeviceSlot]
    stages: Sequence[StagingSlot]
    # Of the host, by bucket: gradients that leave early, fp32; new weights of early updates. Record i's shadow is
    # record len(buckets) + i of the store.
    grad_areas: Sequence[torch.Tensor | None]
    weight_areas: Sequence[torch.Tensor | None]
    buffer: torch.Tensor  # of the host, for the largest record: what saves and loads pass through
    _held: dict[int, Done] = field(default_factory=dict)  # residents that a save has not read

    def held(self, index: int) -> tuple[Done, ...]:
        """What a change of a resident waits for."""
        done = self._held.get(index)
        return () if done is None or done.is_issued else (done,)

    def hold_resident(self, index: int) -> Done:
        """Have changes of a resident wait until the result is finished."""
        self._held[index] = Done()
        return self._held[index]

    def close(self) -> list[str]:
        """End the lanes; the names of those that did not end in time."""
        return self.lanes.close()

    @property
    def device_bytes(self) -> int:
        """Of optimizer state on the device."""
        residents = sum(record.numel() for record in self.resident if record is not None)
        return residents + sum(slot.record.numel() for slot in self.device_slots)


@dataclass(frozen=True)
class Layout:
    """What `allocate` allocates: one entry a bucket."""

    numels: Sequence[int]
    bytes_per_element: int
    tiers: Sequence[Tier]
    ways: Sequence[Way]
    leaving: Sequence[bool]  # its gradient leaves during the backward pass
    early: Sequence[bool]  # it may be updated then
    weights_dtype: torch.dtype


def allocate(layout: Layout, lanes: Lanes) -> TierMemory:
    """All of it, zeroed where state will be."""
    device = lanes.device
    pinned = device.type == "cuda"
    sizes = [numel * layout.bytes_per_element for numel in layout.numels]

    def host(num: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(num, dtype=dtype, pin_memory=pinned)

    def largest(way: Way) -> int:
        return max((numel for numel, of in zip(layout.numels, layout.ways, strict=True) if of == way), default=0)

    resident = [
        torch.zeros(size, dtype=torch.uint8, device=device) if tier == "device" else None
        for size, tier in zip(sizes, layout.tiers, strict=True)
    ]
    records = [host(size) if tier == "host" else None for size, tier in zip(sizes, layout.tiers, strict=True)]
    shadows = [
        host(size) if early and tier == "host" else None
        for size, tier, early in zip(sizes, layout.tiers, layout.early, strict=True)
    ]
    streamed, staged = largest("device_stream"), largest("host")
    slots = [
        DeviceSlot(
            torch.empty(streamed * layout.bytes_per_element, dtype=torch.uint8, device=device),
            torch.empty(streamed, dtype=layout.weights_dtype, device=device) if any(layout.early) else None,
        )
        for _ in range(NUM_SLOTS)
        if streamed
    ]
    stages = [
        StagingSlot(host(staged, torch.float32), host(staged, layout.weights_dtype)) for _ in range(NUM_SLOTS) if staged
    ]
    grads = [host(n, torch.float32) if leaves else None for n, leaves in zip(layout.numels, layout.leaving)]
    weights = [host(n, layout.weights_dtype) if early else None for n, early in zip(layout.numels, layout.early)]
    store = Store(lanes, 2 * sizes, records + shadows, [], None, [0] * 2 * len(sizes))
    buffer = host(max(sizes, default=0))
    return TierMemory(layout.tiers, layout.ways, lanes, store, resident, slots, stages, grads, weights, buffer)
