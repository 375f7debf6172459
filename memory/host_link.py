"""A rank's link between its device and its host: the streams that copy each way, and the host's memory for that.

The engine makes one and hands it to whoever moves something: nobody else owns a copy stream, or pins memory for one.
"""

from __future__ import annotations

import torch

from memory.budgets import HOST
from memory.completion import TIMEOUT
from memory.copy_stream import CopyStream
from memory.disk import aligned
from memory.step_memory import StepMemory


class HostLink:
    """`up` and `down` copy to the device and from it; `update` is computation of the device beside the training's,
    `host` computation of the host, `read` and `write` are the disk, `gather` exchanges of ranks beside the training.
    `step`: memory for what a step offloads.

    On a CPU device and host are the same memory; what is said here of copies is done all the same.
    """

    def __init__(self, device: torch.device, timeout: float = TIMEOUT):
        """timeout: seconds that a piece of work may take."""
        self.device, self.pins = device, device.type == "cuda"
        self.num_allocated = 0  # pieces of the host's memory, since the start
        self.up = CopyStream("to device", device, on_device=True, timeout=timeout)
        self.down = CopyStream("from device", device, on_device=True, timeout=timeout)
        self.update = CopyStream("device update", device, on_device=True, timeout=timeout)
        self.host = CopyStream("host update", device, timeout=timeout)
        self.gather = CopyStream("exchange", device, on_device=True, timeout=timeout)
        self.read = CopyStream("disk read", device, timeout=timeout)
        self.write = CopyStream("disk write", device, timeout=timeout)
        self.step = StepMemory(lambda num_bytes: self.take(num_bytes, "experts"), lambda: HOST.room)

    @property
    def all(self) -> tuple[CopyStream, ...]:
        return (self.up, self.down, self.update, self.host, self.gather, self.read, self.write)

    def take(self, num_bytes: int, what: str) -> torch.Tensor | None:
        """Memory of the host (uint8), counted under memory.host_budget until nobody refers to it; None where that, or
        the host, has no room."""
        if num_bytes > HOST.room:
            return None
        try:
            memory = self.allocate(num_bytes)
        except RuntimeError:
            return None
        HOST.count(memory, what)
        return memory

    def allocate(self, num_bytes: int, in_blocks: bool = False) -> torch.Tensor:
        """Memory of the host (uint8) that the caller has taken from the budget, pinned beside a GPU. `in_blocks`: whole
        blocks of a disk, aligned to them."""
        self.num_allocated += 1
        if in_blocks:
            return aligned(num_bytes, self.pins)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pins)

    @property
    def is_running(self) -> bool:
        """Whether a thread is still there, or has not ended in time."""
        return any(stream.is_running for stream in self.all)

    def close(self) -> list[str]:
        """End all threads, and let go of the memory for steps; the names of threads that did not end in time."""
        self.step.close()
        return [stream.name for stream in self.all if not stream.close()]
