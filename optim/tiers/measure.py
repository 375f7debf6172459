"""How fast one rank's tiers are, while every rank does the same: what the engine of an update is chosen by.

The ranks of a node share the host's memory and its disk, and often the link: what one has when it is alone, it has not
in a step. So they start each piece of work together.
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
from optim.arrangement.arrange import GRAD_BYTES
from optim.arrangement.planning import Bandwidths
from optim.tiers.buckets import RecordLayout
from optim.tiers.kernel import SCRATCH, State, UpdateScalars, adamw
from optim.tiers.memory import TierMemory

REPEATS = 3


@dataclass(frozen=True)
class _Work:
    """What is timed, in its copy stream, once `begun` is over."""

    stream: CopyStream
    call: Callable[[], object]
    begun: Completion
    num_bytes: int


@torch.no_grad()
def measure(memory: TierMemory, layout: RecordLayout) -> Bandwidths:
    """The least of all ranks, so that all choose alike. A collective call, while no update and no save is under way;
    what the slots and the buffer hold is lost."""
    works = _link_and_updates(memory, layout) if memory.device_slots and memory.stages else [None] * 4
    rates = [*(_rate(memory.link.device, work) for work in works), *_of_disk(memory)]
    return Bandwidths(*_least(rates, memory.link.device))


def _least(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The least of all ranks, once all have come here."""
    least = torch.tensor(numbers, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.tolist()


def _link_and_updates(memory: TierMemory, layout: RecordLayout) -> list[_Work]:
    """A record to the device, one from it, its update on the host, and on the device."""
    link, slot, stage = memory.link, memory.device_slots[0], memory.stages[0]
    for users in (*(slot.users for slot in memory.device_slots), *(stage.users for stage in memory.stages)):
        for done in users.all():
            done.wait()
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
            UpdateScalars(0.0, 0.0, 0.9, 0.95, 1e-8),
        )

        def work() -> None:
            adamw(state, [grads], step, [rates], scratch)
            weights.copy_(state.masters[0])

        return work

    size = on_device.numel()
    traffic = 2 * size + numel * (GRAD_BYTES + stage.weights.element_size())
    on_host_update, on_device_update = update(on_host), update(on_device)
    begun = Completion.so_far(link.device)
    return [
        _Work(link.up, lambda: on_device.copy_(on_host, non_blocking=True), begun, size),
        _Work(link.down, lambda: on_host.copy_(on_device, non_blocking=True), begun, size),
        _Work(link.host, on_host_update, begun, traffic),
        _Work(link.update, on_device_update, begun, traffic),
    ]


def _of_disk(memory: TierMemory) -> list[float]:
    store, tiers, device = memory.store, memory.arrangement.tiers, memory.link.device
    has_any = bool(memory.device_slots and memory.stages) and "disk" in tiers
    index = max((i for i, tier in enumerate(tiers) if tier == "disk"), key=store.sizes.__getitem__, default=0)
    reads, writes = [], []
    for _ in range(REPEATS):
        if has_any:
            store.last_write(index).wait()
        _least([0.0], device)  # all ranks begin together
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


def _rate(device: torch.device, work: _Work | None) -> float:
    """Bytes per second of one piece of work, which all ranks begin together; none is infinitely fast."""
    if work is not None:
        work.stream.submit(work.call, (work.begun,)).wait()  # the first touches its memory
    seconds = []
    for _ in range(REPEATS):
        _least([0.0], device)
        if work is not None:
            before = time.perf_counter()
            work.stream.submit(work.call, num_bytes=work.num_bytes).wait()
            seconds.append(time.perf_counter() - before)
    return math.inf if work is None else work.num_bytes / statistics.median(seconds)
