"""Records of optimizer state, one per bucket: their layout in bytes, their memory, and snapshots for saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memory.budgets import DISK, HOST
from memory.completion import Completion, Users
from memory.copy_stream import SAVES
from memory.disk import Disk, offsets
from memory.host_link import HostLink
from memory.store import Store
from optim.arrangement.buckets import Arrangement, Bucket
from optim.offload.experts import OffloadedExperts

WEIGHT = "weight"  # an additional kind of state: the weights of a bucket of offloaded experts


@dataclass(frozen=True)
class RecordLayout:
    """Layout of a bucket's optimizer state: [master][exp_avg_sq][exp_avg]. An fp32 parameter is its own master."""

    has_master: bool
    moment_dtype: torch.dtype  # of exp_avg

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """Kinds of state in a record and their dtypes, in storage order: the widest first, so that all are aligned."""
        masters = {"master": torch.float32} if self.has_master else {}
        return {**masters, "exp_avg_sq": torch.float32, "exp_avg": self.moment_dtype}

    @property
    def bytes_per_element(self) -> int:
        return sum(dtype.itemsize for dtype in self.kinds.values())

    def split(self, record: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
        """Return the kinds of state in a bucket's stored bytes as flat views of `numel` elements each."""
        views, start = {}, 0
        for kind, dtype in self.kinds.items():
            end = start + numel * dtype.itemsize
            views[kind] = record[start:end].view(dtype)
            start = end
        return views


@dataclass
class DeviceStage:
    """Device memory through which optimizer state of the host or the disk is streamed, one bucket at a time."""

    record: torch.Tensor
    weights: torch.Tensor | None  # for new weights of early updates, flat, in the model's dtype
    users: Users


@dataclass
class HostStage:
    """Host memory through which the gradient and weights of one bucket at a time are copied."""

    grads: torch.Tensor  # fp32, flat
    weights: torch.Tensor  # of the model's dtype, flat
    users: Users = field(default_factory=Users)


@dataclass
class OffloadMemory:
    """The buckets of one rank's optimizer state, and all memory for them: records (stored state), reused buffers."""

    arrangement: Arrangement
    layout: RecordLayout
    buckets: Sequence[Bucket]
    experts: OffloadedExperts | None  # the weights and gradients of buckets of offloaded experts
    link: HostLink
    store: Store  # records of the host and the disk, with the buckets' indices
    resident: Sequence[torch.Tensor | None]  # records of the device
    device_stages: Sequence[DeviceStage]
    host_stages: Sequence[HostStage]
    # Host memory by bucket: for gradients that are copied out during the backward pass, fp32, and for new weights of
    # early updates. The shadow of record i is record len(buckets) + i of the store.
    grad_areas: Sequence[torch.Tensor | None]
    weight_areas: Sequence[torch.Tensor | None]
    buffer: torch.Tensor  # host memory for the largest record, used by saves and loads
    disk: Disk | None
    _unread: dict[int, Completion] = field(default_factory=dict)  # records on the device that a save has not read

    def unread(self, index: int) -> tuple[Completion, ...]:
        """Return what a change of a bucket's state on the device waits for: a save that has not read it yet, if any."""
        done = self._unread.get(index)
        return () if done is None or done.is_issued else (done,)

    def snapshot_resident(self, index: int) -> Completion:
        """Begin a save of a bucket's state on the device; changes wait until the save ends the returned completion."""
        self._unread[index] = Completion()
        return self._unread[index]

    def close(self) -> None:
        """Release the reserved memory, and delete the scratch file unless a thread of the link still uses it."""
        if self.disk is not None and not self.link.is_running:
            self.disk.close()
        for purpose, num_bytes in self.arrangement.host_bytes_by_purpose.items():
            HOST.give(num_bytes, purpose)
        DISK.give(self.arrangement.disk_bytes, "optimizer state")


def allocate(
    arrangement: Arrangement,
    layout: RecordLayout,
    buckets: Sequence[Bucket],
    experts: OffloadedExperts | None,
    weights_dtype: torch.dtype,
    link: HostLink,
    disk: Disk | None,
) -> OffloadMemory:
    """Allocate all memory that an arrangement of buckets needs. Optimizer state on device and host starts as zero."""
    device, sizes = link.device, arrangement.sizes
    targets, numels = arrangement.targets, arrangement.numels

    def host(num: int, dtype: torch.dtype) -> torch.Tensor:
        return link.allocate(num * dtype.itemsize).zero_().view(dtype)

    def record(size: int) -> torch.Tensor:
        return link.allocate(size, in_blocks=True).zero_()[:size]

    resident = [
        torch.zeros(size, dtype=torch.uint8, device=device) if target == "device" else None
        for size, target in zip(sizes, targets, strict=True)
    ]
    records = [record(size) if target == "host" else None for size, target in zip(sizes, targets, strict=True)]
    shadows = [
        record(size) if early and target == "host" else None
        for size, target, early in zip(sizes, targets, arrangement.early, strict=True)
    ]
    streamed, staged = arrangement.staging("device_stream"), arrangement.staging("host")
    of_disk = arrangement.disk_staging
    device_stages = [
        DeviceStage(
            torch.empty(streamed.size * arrangement.bytes_per_element, dtype=torch.uint8, device=device),
            torch.empty(streamed.size, dtype=weights_dtype, device=device) if any(arrangement.new_weights) else None,
            Users(Completion.so_far(device)),  # earlier users of this memory may still be running
        )
        for _ in range(streamed.number)
    ]
    host_stages = [
        HostStage(host(staged.size, torch.float32), host(staged.size, weights_dtype)) for _ in range(staged.number)
    ]
    disk_stages = [link.allocate(of_disk.size, in_blocks=True) for _ in range(of_disk.number)]
    on_disk = [size if target == "disk" else 0 for size, target in zip(sizes, targets, strict=True)]
    disk_shadows = [size if early else 0 for size, early in zip(on_disk, arrangement.early, strict=True)]
    return OffloadMemory(
        arrangement,
        layout,
        buckets,
        experts,
        link,
        Store(link, 2 * sizes, records + shadows, disk_stages, disk, offsets(on_disk + disk_shadows)[:-1]),
        resident,
        device_stages,
        host_stages,
        [host(n, torch.float32) if it else None for n, it in zip(numels, arrangement.leaving, strict=True)],
        [host(n, weights_dtype) if it else None for n, it in zip(numels, arrangement.new_weights, strict=True)],
        link.allocate(max(sizes, default=0), in_blocks=True),
        disk,
    )


class StateSnapshot:
    """The optimizer state at one moment, for one thread that saves it. A bucket cannot change before it is released."""

    def __init__(self, memory: OffloadMemory):
        """Begin a save of all buckets' present state, in the main thread between two steps."""
        self._memory, self._buckets, self._experts = memory, memory.buckets, memory.experts
        # The index of each bucket's weights in their snapshot; buckets with only padding have none.
        expert_buckets = dict.fromkeys(b.expert_bucket for b in self._buckets if b.expert_bucket is not None)
        self._weight_index = {each: index for index, each in enumerate(expert_buckets)}
        self._weights = None if self._experts is None else self._experts.snapshot(list(expert_buckets))
        stored = [index for index, target in enumerate(memory.arrangement.targets) if target != "device"]
        self._stored_index = {index: number for number, index in enumerate(stored)}
        self._records = memory.store.snapshot(stored, memory.buffer)
        self._so_far = Completion.so_far(memory.link.device)
        self._released = [
            self._records.released[self._stored_index[index]]
            if index in self._stored_index
            else memory.snapshot_resident(index)
            for index in range(len(memory.arrangement.targets))
        ]

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """Return a bucket's state as flat host tensors by kind, valid until the next call.

        Raises the error of the bucket's last change, if that failed.
        """
        if index in self._stored_index:
            record = self._records.read(self._stored_index[index])
        else:
            record, resident = self._memory.buffer, self._memory.resident[index]
            assert resident is not None
            size = resident.numel()
            work = lambda: record[:size].copy_(resident, non_blocking=True)  # noqa: E731
            self._memory.link.down.submit(work, (self._so_far,), priority=SAVES).result()
        bucket = self._buckets[index]
        kinds = self._memory.layout.split(record, bucket.numel)
        if self._experts is not None and bucket.expert_bucket is not None:
            assert self._weights is not None
            weights = self._weights.read(self._weight_index[bucket.expert_bucket])
            kinds[WEIGHT] = weights.view(self._experts.dtype)[: bucket.numel]
        return kinds

    def release(self, index: int) -> None:
        """Allow a bucket's state to change again, after the save has read it."""
        expert_bucket = self._buckets[index].expert_bucket
        if self._weights is not None and expert_bucket is not None:
            self._weights.release(self._weight_index[expert_bucket])
        self._released[index].finish()  # last, because a waiting thread may then snapshot the weights again

    def close(self) -> None:
        """Allow the state of all buckets to change again."""
        if self._weights is not None:
            self._weights.close()
        for released in self._released:
            released.finish()

    @property
    def is_over(self) -> bool:
        """Whether all buckets are released."""
        return all(released.is_issued for released in self._released)

    def wait(self) -> None:
        """Block until all buckets are released. Raises TimeoutError."""
        for released in self._released:
            released.wait()
