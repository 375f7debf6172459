"""A pool of scratch buffers in host memory that steps reuse.

A large new host tensor is a new memory mapping: the kernel clears its pages at the first touch, which takes longer than
writing them (4 times as long for 16 MiB). On a GPU, CUDA's caching allocator solves this problem.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

STEPS_PER_DOUBLING = 4  # sizes are rounded up to a quarter power of two, so that changing counts find the same buffers


class Workspace:
    """A pool of host buffers for scratch tensors. Tensors that are never given back are freed by Python as usual."""

    def __init__(self) -> None:
        self.pooled = True  # False: plain tensors, so that a counter of live memory sees only the bytes in use
        self._free: list[torch.Tensor] = []

    def take(self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized contiguous tensor on the device of `like`; on a CPU it comes from the pool."""
        dtype = dtype or like.dtype
        if like.device.type != "cpu" or not self.pooled:
            return torch.empty(shape, dtype=dtype, device=like.device)
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._fitting(num_bytes)[:num_bytes].view(dtype).view(shape)

    def give(self, *tensors: torch.Tensor | None) -> None:
        """Give tensors that `take` returned back to the pool. They must not be used afterwards."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type == "cpu" and self.pooled:
                self._free.append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))

    def lend(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor on the device of `like`. On a CPU, deleting it returns its memory to the
        pool."""
        if like.device.type != "cpu" or not self.pooled:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        num_bytes = math.prod(shape) * like.element_size()
        buffer = self._fitting(num_bytes)
        # The tensor's storage refers to the array, whose finalizer gives the buffer back.
        array = buffer.numpy()[:num_bytes]
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return torch.from_numpy(array).view(like.dtype).view(shape)

    def _fitting(self, num_bytes: int) -> torch.Tensor:
        fitting = [i for i, buffer in enumerate(self._free) if num_bytes <= buffer.numel() <= 2 * max(num_bytes, 4096)]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        smaller = [i for i, buffer in enumerate(self._free) if buffer.numel() < num_bytes]
        if smaller:  # replace the largest: the pool never has more buffers than were in use at once
            self._free.pop(max(smaller, key=lambda i: self._free[i].numel()))
        step = 4096 if num_bytes <= 4096 else 2 ** ((num_bytes - 1).bit_length() - 1) // STEPS_PER_DOUBLING
        return torch.empty(max(-(-num_bytes // step), 1) * step, dtype=torch.uint8)


WORKSPACE = Workspace()  # shared by all layers of the process, whose calls do not overlap
