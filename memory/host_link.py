"""A rank's link between its device and its host: the streams that copy each way, the host memory for that, and tensors
that are offloaded within a step.

The engine makes the link and hands it to all users: only the link owns copy streams and pins memory for them.
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
from memory.pool import WORKSPACE

ALIGNMENT = 512  # bytes


class StepMemory:
    """Host memory for tensors that leave the device within a step and return in it; first come, first served, first
    fit.

    It is allocated before the step: as much as expected at the start, and more between two steps where tensors did not
    fit, up to the host's budget. Within a step nothing is allocated.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor | None], headroom: Callable[[], float]):
        """allocate: returns this number of bytes, uint8, or None. headroom: returns the bytes that can be allocated."""
        self._allocate, self._headroom = allocate, headroom
        self.size = 0  # bytes
        self.stayed = 0  # bytes of this step that did not fit
        self._free: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []  # allocations, and their free ranges in order
        self._missed = self._most_missed = 0  # bytes in use that did not fit, now and at most in this step

    def begin(self, expected: int = 0) -> None:
        """Begin a step: enlarge the pinned memory to `expected` bytes, or by the shortfall of the previous step if
        that is more, within the headroom."""
        lacking = max(expected - self.size, self._most_missed)
        self.stayed, self._most_missed = 0, self._missed
        num_bytes = int(min(_rounded(lacking), self._headroom() // ALIGNMENT * ALIGNMENT))
        if num_bytes > 0 and (memory := self._allocate(num_bytes)) is not None:
            self._free.append((memory, [(0, num_bytes)]))
            self.size += num_bytes

    def take(self, num_bytes: int) -> Space:
        """Return space until it is freed, or no longer referred to; its `memory` is None where it does not fit."""
        size = _rounded(num_bytes)
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
        """Release all memory."""
        self._free, self.size = [], 0

    def _found(self, size: int) -> None:
        self._missed -= size


class Space:
    """Space in StepMemory that its owner frees."""

    def __init__(self, memory: torch.Tensor | None, give: Callable[[], None]):
        self.memory = memory  # uint8
        self.free = weakref.finalize(self, give)
        self.free.atexit = False


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _put_back(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a range to free ones, which stay sorted and merged."""
    ranges.append((start, end))
    ranges.sort()
    for index in reversed(range(1, len(ranges))):
        if ranges[index - 1][1] == ranges[index][0]:
            ranges[index - 1 : index + 1] = [(ranges[index - 1][0], ranges[index][1])]


class HostLink:
    """The copy streams of a rank and its host memory for copies.

    `up` and `down` copy to the device and from it; `update` computes on the device in addition to the training, `host`
    on the host, `read` and `write` use the disk, `gather` communicates in addition to the training. `step`: memory for
    tensors that a step offloads. On a CPU device and host are the same memory, and all copies are made all the same.
    """

    def __init__(self, device: torch.device, timeout: float = TIMEOUT):
        """timeout: seconds that a piece of work may take."""
        self.device, self.pins = device, device.type == "cuda"
        self.num_allocated = 0  # allocations of host memory, since the start
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
        """Return host memory (uint8), counted under memory.host_budget until it is released; None where the budget or
        the host has not enough."""
        if num_bytes > HOST.headroom:
            return None
        try:
            memory = self.allocate(num_bytes)
        except RuntimeError:
            return None
        HOST.count(memory, purpose)
        return memory

    def allocate(self, num_bytes: int, in_blocks: bool = False) -> torch.Tensor:
        """Return host memory (uint8) that the caller has counted in the budget, pinned if there is a GPU. `in_blocks`:
        whole blocks of a disk, aligned to them."""
        self.num_allocated += 1
        if in_blocks:
            return aligned(num_bytes, self.pins)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pins)

    @property
    def is_running(self) -> bool:
        """Whether a thread is running; also true after its join timed out."""
        return any(stream.is_running for stream in self.all)

    def close(self) -> list[str]:
        """End all threads and release the memory for steps; return the names of threads that did not end in time."""
        self.step.close()
        return [stream.name for stream in self.all if not stream.close()]


class OffloadedTensor:
    """A tensor of the device that is copied to the host, and back once; it stays where the step's memory is full.

    On a CPU it is a plain copy. The thread that computes makes all calls, and no call waits for the device.
    """

    def __init__(self, tensor: torch.Tensor, link: HostLink | None) -> None:
        """Copy the tensor out; the caller may free it at once. A CPU needs no link."""
        self._on_device: torch.Tensor | None = None
        self._space: Space | None = None
        self._returned: Completion | None = None
        if tensor.device.type == "cpu":
            self._on_device = WORKSPACE.take(tensor.shape, tensor).copy_(tensor)
            return
        assert link is not None, "the engine hands the host link to the layers"
        self._link, self._shape, self._dtype = link, tensor.shape, tensor.dtype
        self._space = link.step.take(tensor.nbytes)
        if self._space.memory is None:
            self._on_device = tensor
        else:
            self._left = link.down.issue(lambda: self._copy_out(tensor), num_bytes=tensor.nbytes)

    def fetch(self) -> None:
        """Start the copy to the device."""
        if self._on_device is None:
            self._on_device = torch.empty(self._shape, dtype=self._dtype, device=self._link.device)
            self._returned = self._link.up.issue(self._copy_back, (self._left,), self._on_device.nbytes)

    def get(self) -> torch.Tensor:
        """Return the tensor, on the device; the caller owns it."""
        self.fetch()
        if self._returned is not None:
            self._returned.order()
        if self._space is not None:
            self._space.free()  # its next use comes after the work that this thread submits from now on
        tensor, self._on_device = self._on_device, None
        assert tensor is not None
        return tensor

    def __del__(self) -> None:
        """Wait for the copy to the device where an error has dropped the tensor, before its memory is reused."""
        if self._returned is not None and self._on_device is not None:
            self._returned.order()

    def _copy_out(self, tensor: torch.Tensor) -> None:
        self._on_host().copy_(tensor, non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream())  # its memory is not reused before the copy is done

    def _copy_back(self) -> None:
        assert self._on_device is not None
        self._on_device.copy_(self._on_host(), non_blocking=True)

    def _on_host(self) -> torch.Tensor:
        assert self._space is not None and self._space.memory is not None
        return self._space.memory.view(self._dtype).view(self._shape)
