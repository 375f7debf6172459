"""Measured bandwidths of one rank's link, updates and disk while every rank works: the choice of an update's engine
depends on them.

The ranks of a node share the host's memory and its disk, and often the link: a rank alone is faster than a rank in a
step. Therefore all ranks start each piece of work together.
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
from optim.offload.records import OffloadMemory, RecordLayout

REPEATS = 3


@dataclass(frozen=True)
class _TimedWork:
    """Work that is timed, in its copy stream, once `ready` is done."""

    stream: CopyStream
    call: Callable[[], object]
    ready: Completion
    num_bytes: int


@torch.no_grad()
def measure(memory: OffloadMemory, layout: RecordLayout) -> Bandwidths:
    """Measure the least bandwidths of all ranks, so that all choose the same engines.

    A collective call, while no update and no save is in flight. The stages and the buffer lose their contents.
    """
    works = _link_and_updates(memory, layout) if memory.device_stages and memory.host_stages else [None] * 4
    rates = [*(_rate(memory.link.device, work) for work in works), *_disk_rates(memory)]
    return Bandwidths(*_least(rates, memory.link.device))


def _least(numbers: Sequence[float], device: torch.device) -> list[float]:
    """Return the least of all ranks' numbers, once all ranks have called."""
    least = torch.tensor(numbers, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.tolist()


def _link_and_updates(memory: OffloadMemory, layout: RecordLayout) -> list[_TimedWork]:
    """Return the work of a record: its copies to the device and from it, its update on the host and on the device."""
    link, device_stage, host_stage = memory.link, memory.device_stages[0], memory.host_stages[0]
    for users in (*(stage.users for stage in memory.device_stages), *(stage.users for stage in memory.host_stages)):
        for done in users.all():
            done.wait()
    on_device, on_host = device_stage.record, memory.buffer[: device_stage.record.numel()]
    numel = on_device.numel() // layout.bytes_per_element
    # Zeros: a CPU is slow with numbers too small for the format.
    on_device.zero_()
    on_host.zero_()

    def update(record: torch.Tensor) -> Callable[[], None]:
        grads, own = (torch.zeros(numel, dtype=torch.float32, device=record.device) for _ in range(2))
        kinds = layout.split(record, numel)
        state = State([kinds.get("master", own)], [kinds["exp_avg"]], [kinds["exp_avg_sq"]])
        weights, step = (
            torch.zeros(numel, dtype=host_stage.weights.dtype, device=record.device),
            torch.ones_like(own[0]),
        )
        scratch, rates = (
            torch.empty(SCRATCH, dtype=torch.float32, device=record.device),
            UpdateScalars(0.0, 0.0, 0.9, 0.95, 1e-8),
        )

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
    """Measure the bytes per second of reads and of writes; infinite without state on the disk."""
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
    """Measure the bytes per second of work that all ranks start together; infinite for None."""
    if work is not None:
        work.stream.submit(work.call, (work.ready,)).wait()  # the first touches its memory
    seconds = []
    for _ in range(REPEATS):
        _least([0.0], device)
        if work is not None:
            before = time.perf_counter()
            work.stream.submit(work.call, num_bytes=work.num_bytes).wait()
            seconds.append(time.perf_counter() - before)
    return math.inf if work is None else work.num_bytes / statistics.median(seconds)
