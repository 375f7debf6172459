"""The link between a rank's device and its host: copy streams, host memory for the copies, and offloaded tensors.

The engine creates the link and passes it to all users. Only the link has copy streams and pins memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from memory.budgets import HOST
from memory.completion import TIMEOUT, Completion
from memory.copy_stream import CopyStream
from memory.disk import aligned
from memory.host_memory import padded
from memory.pool import WORKSPACE

ALIGNMENT = 512  # bytes


class StepMemory:
    """Host memory for tensors that are offloaded within one step. A request gets the first free range that fits.

    The memory is allocated between steps: the expected size at the start, and more after a step in which tensors did
    not fit, within the host's budget. Nothing is allocated during a step.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor | None], headroom: Callable[[], float]):
        """Create empty memory, which `begin` enlarges.

        allocate: returns a uint8 tensor of the given bytes, or None. headroom: returns the bytes it may allocate.
        """
        self._allocate, self._headroom = allocate, headroom
        self.size = 0  # bytes
        self.stayed = 0  # bytes that did not fit in this step
        self._free: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []  # allocations and their sorted free ranges
        self._missed = self._most_missed = 0  # bytes of live tensors that did not fit: now, and the most in this step

    def begin(self, expected: int = 0) -> None:
        """Begin a step: enlarge the memory to `expected` bytes, or by what the last step lacked, up to the headroom."""
        lacking = max(expected - self.size, self._most_missed)
        self.stayed, self._most_missed = 0, self._missed
        num_bytes = int(min(padded(lacking, ALIGNMENT), self._headroom() // ALIGNMENT * ALIGNMENT))
        if num_bytes > 0 and (memory := self._allocate(num_bytes)) is not None:
            self._free.append((memory, [(0, num_bytes)]))
            self.size += num_bytes

    def take(self, num_bytes: int) -> Space:
        """Return space for `num_bytes`, reserved until it is freed or deleted; its `memory` is None if nothing fits."""
        size = padded(num_bytes, ALIGNMENT)
        for memory, ranges in self._free:
            for index, (start, end) in enumerate(ranges):
                if end - start >= size:
                    ranges[index : index + 1] = [(start + size, end)] if end - start > size else []
                    return Space(memory[start : start + num_bytes], partial(_put_back, ranges, start, start + size))
        self.stayed += num_bytes
        self._missed += size
        self._most_missed = max(self._most_missed, self._missed)
        return Space(None, partial(self._found, size))

    def close(self) -> None:
        """Drop all allocations of host memory."""
        self._free, self.size = [], 0

    def _found(self, size: int) -> None:
        self._missed -= size


class Space:
    """A range of host memory for one offloaded tensor. The owner returns it with `free`, or by dropping it."""

    def __init__(self, memory: torch.Tensor | None, give: Callable[[], None]):
        self.memory = memory  # uint8
        self.free = weakref.finalize(self, give)
        self.free.atexit = False


def _put_back(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a byte range to the list of free ranges, and keep the list sorted and merged."""
    ranges.append((start, end))
    ranges.sort()
    for index in reversed(range(1, len(ranges))):
        if ranges[index - 1][1] == ranges[index][0]:
            ranges[index - 1 : index + 1] = [(ranges[index - 1][0], ranges[index][1])]


class HostLink:
    """The copy streams of a rank, and the host memory for their copies.

    `up` copies to the device and `down` from it. `update` computes on the device and `host` on the host. `read` and
    `write` use the disk, and `gather` runs collectives. `step`: memory for tensors that are offloaded within a step. On
    a CPU, device and host are the same memory, but all copies are still made.
    """

    def __init__(self, device: torch.device, timeout: float = TIMEOUT):
        """Create the copy streams of a rank. timeout: seconds that one job may take."""
        self.device, self.pins = device, device.type == "cuda"
        self.num_allocated = 0  # number of allocations of host memory
        self.up = CopyStream("to device", device, on_device=True, timeout=timeout)
        self.down = CopyStream("from device", device, on_device=True, timeout=timeout)
        self.update = CopyStream("device update", device, on_device=True, timeout=timeout)
        self.host = CopyStream("host update", device, timeout=timeout)
        self.gather = CopyStream("exchange", device, on_device=True, timeout=timeout)
        self.read = CopyStream("disk read", device, timeout=timeout)
        self.write = CopyStream("disk write", device, timeout=timeout)
        self.step = StepMemory(lambda num_bytes: self.take(num_bytes, "experts"), lambda: HOST.headroom)

    @property
    def all(self) -> tuple[CopyStream, ...]:
        return (self.up, self.down, self.update, self.host, self.gather, self.read, self.write)

    def take(self, num_bytes: int, purpose: str) -> torch.Tensor | None:
        """Return uint8 host memory, counted in memory.host_budget until it is deleted; None if too little is left."""
        if num_bytes > HOST.headroom:
            return None
        try:
            memory = self.allocate(num_bytes)
        except RuntimeError:
            return None
        HOST.count(memory, purpose)
        return memory

    def allocate(self, num_bytes: int, in_blocks: bool = False) -> torch.Tensor:
        """Return uint8 host memory, pinned on a GPU machine. The caller has already reserved it in the host's budget.

        in_blocks: whether to align it to whole disk blocks, for direct I/O.
        """
        self.num_allocated += 1
        if in_blocks:
            return aligned(num_bytes, self.pins)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pins)

    @property
    def is_running(self) -> bool:
        """Whether any copy thread is running, including one that did not end in time when the link was closed."""
        return any(stream.is_running for stream in self.all)

    def close(self) -> list[str]:
        """End all copy threads and free the memory of `step`. Returns the names of threads that did not end in time."""
        self.step.close()
        return [stream.name for stream in self.all if not stream.close()]


class OffloadedTensor:
    """A device tensor that is copied to the host and back once. It stays on the device if the link's memory is full.

    On a CPU it is a plain copy. Only the thread that computes calls the methods; none waits for the device.
    """

    def __init__(self, tensor: torch.Tensor, link: HostLink | None) -> None:
        """Start the copy to the host; the caller may drop the tensor immediately. On a CPU `link` may be None."""
        self._on_device: torch.Tensor | None = None
        self._space: Space | None = None
        self._returned: Completion | None = None
        if tensor.device.type == "cpu":
            self._on_device = WORKSPACE.take(tensor.shape, tensor).copy_(tensor)
            return
        assert link is not None, "on a GPU the engine must pass its host link to the layers"
        self._link, self._space = link, link.step.take(tensor.nbytes)
        if self._space.memory is None:
            self._on_device = tensor
            return
        on_host = self._on_host = self._space.memory.view(tensor.dtype).view(tensor.shape)

        def copy_out() -> None:
            on_host.copy_(tensor, non_blocking=True)
            tensor.record_stream(torch.cuda.current_stream())  # its memory is not reused before the copy is done

        self._left = link.down.issue(copy_out, num_bytes=tensor.nbytes)

    def fetch(self) -> None:
        """Start the copy back to the device."""
        if self._on_device is None:
            source = self._on_host
            target = self._on_device = torch.empty(source.shape, dtype=source.dtype, device=self._link.device)
            self._returned = self._link.up.issue(
                lambda: target.copy_(source, non_blocking=True), (self._left,), target.nbytes
            )

    def get(self) -> torch.Tensor:
        """Return the tensor on the device and drop the reference to it. The current CUDA stream waits for the copy."""
        self.fetch()
        if self._returned is not None:
            self._returned.order()
        if self._space is not None:
            self._space.free()  # later users of it wait for the work that this thread has launched until now
        tensor, self._on_device = self._on_device, None
        assert tensor is not None
        return tensor

    def __del__(self) -> None:
        """After an error, wait for a copy to the device that is in flight, before the tensor's memory is reused."""
        if self._returned is not None and self._on_device is not None:
            self._returned.order()
