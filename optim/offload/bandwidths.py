"""Measured bandwidths of a rank's link, optimizer updates and disk, from which the update engine is chosen.

The ranks of a node share host memory, a disk and often the link, so all ranks start each measurement together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from memory.completion import Completion
from memory.copy_stream import CopyStream
from optim.arrangement.buckets import GRAD_BYTES
from optim.arrangement.engines import Bandwidths
from optim.offload.kernel import SCRATCH, State, UpdateScalars, adamw
from optim.offload.records import OffloadMemory

REPEATS = 3


@dataclass(frozen=True)
class _TimedWork:
    """A copy or update on a copy stream, whose bandwidth is measured. It can start once `ready` is done."""

    stream: CopyStream
    call: Callable[[], object]
    ready: Completion
    num_bytes: int


@torch.no_grad()
def measure(memory: OffloadMemory) -> Bandwidths:
    """Measure this rank's bandwidths, and return the minimum over all ranks, so that all choose the same engines.

    A collective call, while no update and no save is in flight. It overwrites the reused buffers for optimizer state.
    """
    works = _link_and_updates(memory) if memory.device_stages and memory.host_stages else [None] * 4
    rates = [*(_rate(memory.link.device, work) for work in works), *_disk_rates(memory)]
    return Bandwidths(*_least(rates, memory.link.device))


def _least(numbers: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise minimum of these numbers over all ranks, after all ranks have made the call."""
    least = torch.tensor(numbers, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.tolist()


def _link_and_updates(memory: OffloadMemory) -> list[_TimedWork]:
    """Return four jobs to time on one bucket: copies to and from the device, updates on the host and on the device."""
    link, device_stage, host_stage = memory.link, memory.device_stages[0], memory.host_stages[0]
    for users in (*(stage.users for stage in memory.device_stages), *(stage.users for stage in memory.host_stages)):
        for done in users.all():
            done.wait()
    on_device, on_host = device_stage.record, memory.buffer[: device_stage.record.numel()]
    numel = on_device.numel() // memory.layout.bytes_per_element
    # Zeros, because a CPU is slow with denormal numbers.
    on_device.zero_()
    on_host.zero_()

    def update(record: torch.Tensor) -> Callable[[], None]:
        grads, own = (torch.zeros(numel, dtype=torch.float32, device=record.device) for _ in range(2))
        kinds = memory.layout.split(record, numel)
        state = State([kinds.get("master", own)], [kinds["exp_avg"]], [kinds["exp_avg_sq"]])
        weights = torch.zeros(numel, dtype=host_stage.weights.dtype, device=record.device)
        step, rates = torch.ones_like(own[0]), UpdateScalars(0.0, 0.0, 0.9, 0.95, 1e-8)
        scratch = torch.empty(SCRATCH, dtype=torch.float32, device=record.device)

        def work() -> None:
            adamw(state, [grads], step, [rates], scratch)
            weights.copy_(state.masters[0])

        return work

    size = on_device.numel()
    traffic = 2 * size + numel * (GRAD_BYTES + host_stage.weights.element_size())
    on_host_update, on_device_update = update(on_host), update(on_device)
    ready = Completion.so_far(link.device)
    return [
        _TimedWork(link.up, lambda: on_device.copy_(on_host, non_blocking=True), ready, size),
        _TimedWork(link.down, lambda: on_host.copy_(on_device, non_blocking=True), ready, size),
        _TimedWork(link.host, on_host_update, ready, traffic),
        _TimedWork(link.update, on_device_update, ready, traffic),
    ]


def _disk_rates(memory: OffloadMemory) -> list[float]:
    """Measure the bytes per second of disk reads and of writes. Both are infinite if no state is on the disk."""
    store, targets, device = memory.store, memory.arrangement.targets, memory.link.device
    has_any = bool(memory.device_stages and memory.host_stages) and "disk" in targets
    index = max((i for i, target in enumerate(targets) if target == "disk"), key=store.sizes.__getitem__, default=0)
    reads, writes = [], []
    for _ in range(REPEATS):
        if has_any:
            store.last_write(index).wait()
        _least([0.0], device)  # all ranks start together
        if not has_any:
            continue
        before = time.perf_counter()
        checkout = store.fetch(index)
        checkout.there.wait()
        between = time.perf_counter()
        store.put(checkout, Completion.already()).wait()
        reads.append(between - before)
        writes.append(time.perf_counter() - between)
    return [store.sizes[index] / statistics.median(seconds) if has_any else math.inf for seconds in (reads, writes)]


def _rate(device: torch.device, work: _TimedWork | None) -> float:
    """Measure the bytes per second of a copy or update that all ranks start together; infinite if `work` is None."""
    if work is not None:
        work.stream.submit(work.call, (work.ready,)).wait()  # the first call touches its memory
    seconds = []
    for _ in range(REPEATS):
        _least([0.0], device)
        if work is not None:
            before = time.perf_counter()
            work.stream.submit(work.call, num_bytes=work.num_bytes).wait()
            seconds.append(time.perf_counter() - before)
    return math.inf if work is None else work.num_bytes / statistics.median(seconds)
