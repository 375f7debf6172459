"""The memory that an optimizer's tiers have, allocated once: residents and slots of the device, records, slots and
staging of the host, a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memory.budgets import DISK, HOST
from memory.completion import Completion, Users
from memory.disk import Disk, offsets
from memory.host_link import HostLink
from memory.store import Store
from optim.arrangement.arrange import Arrangement


@dataclass
class DeviceSlot:
    """Memory of the device for one record on its way."""

    record: torch.Tensor
    weights: torch.Tensor | None  # where early updates put new weights, flat, in the model's dtype
    users: Users


@dataclass
class StagingSlot:
    """Memory of the host for the gradient and the weights of one bucket on their way."""

    grads: torch.Tensor  # fp32, flat
    weights: torch.Tensor  # of the model's dtype, flat
    users: Users = field(default_factory=Users)


@dataclass
class TierMemory:
    """Where each bucket's record is, and what it passes through."""

    arrangement: Arrangement
    link: HostLink
    store: Store  # index for index the buckets'; those of the device have no place in it
    resident: Sequence[torch.Tensor | None]  # records of the device
    device_slots: Sequence[DeviceSlot]
    stages: Sequence[StagingSlot]
    # Of the host, by bucket: gradients that leave early, fp32; new weights of early updates. Record i's shadow is
    # record len(buckets) + i of the store.
    grad_areas: Sequence[torch.Tensor | None]
    weight_areas: Sequence[torch.Tensor | None]
    buffer: torch.Tensor  # of the host, for the largest record: what saves and loads pass through
    disk: Disk | None
    _held: dict[int, Completion] = field(default_factory=dict)  # residents that a save has not read

    def held(self, index: int) -> tuple[Completion, ...]:
        """What a change of a resident waits for."""
        done = self._held.get(index)
        return () if done is None or done.is_issued else (done,)

    def hold_resident(self, index: int) -> Completion:
        """Have changes of a resident wait until the result is finished."""
        self._held[index] = Completion()
        return self._held[index]

    def close(self) -> None:
        """Give back the room, the disk's unless a thread of the link is still at it."""
        if self.disk is not None and not self.link.is_running:
            self.disk.close()
        for what, num_bytes in self.arrangement.host_parts.items():
            HOST.give(num_bytes, what)
        DISK.give(self.arrangement.disk_bytes, "optimizer state")


def allocate(arrangement: Arrangement, weights_dtype: torch.dtype, link: HostLink, disk: Disk | None) -> TierMemory:
    """All of it, as `arrangement` counts it, zeroed where state of the host or the device will be."""
    device, sizes = link.device, arrangement.sizes
    tiers, numels = arrangement.tiers, arrangement.numels

    def host(num: int, dtype: torch.dtype) -> torch.Tensor:
        return link.allocate(num * dtype.itemsize).zero_().view(dtype)

    def record(size: int) -> torch.Tensor:
        return link.allocate(size, in_blocks=True).zero_()[:size]

    resident = [
        torch.zeros(size, dtype=torch.uint8, device=device) if tier == "device" else None
        for size, tier in zip(sizes, tiers, strict=True)
    ]
    records = [record(size) if tier == "host" else None for size, tier in zip(sizes, tiers, strict=True)]
    shadows = [
        record(size) if early and tier == "host" else None
        for size, tier, early in zip(sizes, tiers, arrangement.early, strict=True)
    ]
    streamed, staged, of_disk = arrangement.slots("device_stream"), arrangement.slots("host"), arrangement.disk_slots
    device_slots = [
        DeviceSlot(
            torch.empty(streamed.size * arrangement.bytes_per_element, dtype=torch.uint8, device=device),
            torch.empty(streamed.size, dtype=weights_dtype, device=device) if any(arrangement.new_weights) else None,
            Users(Completion.so_far(device)),  # whoever had this memory before
        )
        for _ in range(streamed.number)
    ]
    stages = [
        StagingSlot(host(staged.size, torch.float32), host(staged.size, weights_dtype)) for _ in range(staged.number)
    ]
    disk_slots = [link.allocate(of_disk.size, in_blocks=True) for _ in range(of_disk.number)]
    on_disk = [size if tier == "disk" else 0 for size, tier in zip(sizes, tiers, strict=True)]
    behind = [size if early else 0 for size, early in zip(on_disk, arrangement.early, strict=True)]
    return TierMemory(
        arrangement,
        link,
        Store(link, 2 * sizes, records + shadows, disk_slots, disk, offsets(on_disk + behind)[:-1]),
        resident,
        device_slots,
        stages,
        [host(n, torch.float32) if it else None for n, it in zip(numels, arrangement.leaving, strict=True)],
        [host(n, weights_dtype) if it else None for n, it in zip(numels, arrangement.new_weights, strict=True)],
        link.allocate(max(sizes, default=0), in_blocks=True),
        disk,
    )
