"""How fast one rank's tiers are, each measured alone: what the engine of an update is chosen by."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from memory.arrange import GRAD_BYTES
from memory.lanes import Done, Lane
from memory.planning import Rates
from optim.tiers.buckets import RecordLayout
from optim.tiers.kernel import SCRATCH, State, adamw
from optim.tiers.kernel import Rates as KernelRates
from optim.tiers.memory import TierMemory

REPEATS = 3


@torch.no_grad()
def measure(memory: TierMemory, layout: RecordLayout) -> Rates:
    """The least of all ranks, so that all choose alike. A collective call, while no update and no save is under way;
    what the slots and the buffer hold is lost."""
    rates = [math.inf] * 6
    if memory.device_slots and memory.stages:
        rates = [*_of_link_and_updates(memory, layout), *_of_disk(memory)]
    least = torch.tensor(rates, dtype=torch.float64, device=memory.lanes.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    up, down, host, device, read, write = least.tolist()
    return Rates(up, down, host, device, read, write)


def _of_link_and_updates(memory: TierMemory, layout: RecordLayout) -> list[float]:
    lanes, slot, stage = memory.lanes, memory.device_slots[0], memory.stages[0]
    for free in (*(slot.free for slot in memory.device_slots), *(stage.free for stage in memory.stages)):
        free.wait()
    on_device, on_host = slot.record, memory.buffer[: slot.record.numel()]
    numel = on_device.numel() // layout.bytes_per_element
    # Zeros: a CPU is slow with numbers too small for the format.
    on_device.zero_()
    on_host.zero_()

    def update(record: torch.Tensor) -> Callable[[], None]:
        grads, own = (torch.zeros(numel, dtype=torch.float32, device=record.device) for _ in range(2))
        kinds = layout.split(record, numel)
        state = State([kinds.get("master", own)], [kinds["exp_avg"]], [kinds["exp_avg_sq"]])
        weights, step = torch.zeros(numel, dtype=stage.weights.dtype, device=record.device), torch.ones_like(own[0])
        scratch, rates = (
            torch.empty(SCRATCH, dtype=torch.float32, device=record.device),
            KernelRates(0.0, 0.0, 0.9, 0.95, 1e-8),
        )

        def work() -> None:
            adamw(state, [grads], step, rates, scratch)
            weights.copy_(state.masters[0])

        return work

    size = on_device.numel()
    traffic = 2 * size + numel * (GRAD_BYTES + stage.weights.element_size())
    on_host_update, on_device_update = update(on_host), update(on_device)
    begun = Done.so_far(lanes.device)
    return [
        _rate(lanes.up, lambda: on_device.copy_(on_host, non_blocking=True), begun, size),
        _rate(lanes.down, lambda: on_host.copy_(on_device, non_blocking=True), begun, size),
        _rate(lanes.host, on_host_update, begun, traffic),
        _rate(lanes.update, on_device_update, begun, traffic),
    ]


def _of_disk(memory: TierMemory) -> list[float]:
    store, tiers = memory.store, memory.arrangement.tiers
    if "disk" not in tiers:
        return [math.inf, math.inf]
    index = max((i for i, tier in enumerate(tiers) if tier == "disk"), key=store.sizes.__getitem__)
    reads, writes = [], []
    for _ in range(REPEATS):
        store.last_write(index).wait()
        before = time.perf_counter()
        loan = store.fetch(index)
        loan.there.wait()
        between = time.perf_counter()
        store.put(loan, Done.already()).wait()
        reads.append(between - before)
        writes.append(time.perf_counter() - between)
    return [store.sizes[index] / statistics.median(seconds) for seconds in (reads, writes)]


def _rate(lane: Lane, work: Callable[[], object], begun: Done, num_bytes: int) -> float:
    """Bytes per second of one piece of work in its lane."""
    lane.submit(work, (begun,)).wait()  # the first touches its memory
    seconds = []
    for _ in range(REPEATS):
        before = time.perf_counter()
        lane.submit(work, num_bytes=num_bytes).wait()
        seconds.append(time.perf_counter() - before)
    return num_bytes / statistics.median(seconds)
