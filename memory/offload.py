"""A tensor that lies on the host from one pass to the other."""

from __future__ import annotations

import torch

from memory.completion import Completion
from memory.host_link import HostLink
from memory.pool import WORKSPACE
from memory.step_memory import Space


class OffloadedTensor:
    """A tensor of the device that is copied to the host and comes back once. What finds no room there stays.

    On a CPU it is a plain copy. All calls are those of the thread that computes, and none waits for the device.
    """

    def __init__(self, tensor: torch.Tensor, link: HostLink | None) -> None:
        """Copy out; the caller may hand the tensor back at once. A CPU needs no link."""
        self._there: torch.Tensor | None = None  # on the device
        self._space: Space | None = None  # of the host
        self._come: Completion | None = None
        if tensor.device.type == "cpu":
            self._there = WORKSPACE.take(tensor.shape, tensor).copy_(tensor)
            return
        assert link is not None, "the engine hands the host link to the layers"
        self._link, self._shape, self._dtype = link, tensor.shape, tensor.dtype
        self._space = link.step.take(tensor.nbytes)
        if self._space.memory is None:
            self._there = tensor
        else:
            self._gone = link.down.issue(lambda: self._copy_out(tensor), num_bytes=tensor.nbytes)

    def fetch(self) -> None:
        """Start copying back what `get` will ask for."""
        if self._there is None:
            self._there = torch.empty(self._shape, dtype=self._dtype, device=self._link.device)
            self._come = self._link.up.issue(self._copy_back, (self._gone,), self._there.nbytes)

    def get(self) -> torch.Tensor:
        """The tensor, on the device again; it is the caller's then."""
        self.fetch()
        if self._come is not None:
            self._come.order()
        if self._space is not None:
            self._space.free()  # whoever is next comes after what this thread computes from now on
        tensor, self._there = self._there, None
        assert tensor is not None
        return tensor

    def __del__(self) -> None:
        """An error has dropped it: its memory on either side is somebody else's once the copy back is over."""
        if self._come is not None and self._there is not None:
            self._come.order()

    def _copy_out(self, tensor: torch.Tensor) -> None:
        self._on_host().copy_(tensor, non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream())  # its memory is not used again before the copy is over

    def _copy_back(self) -> None:
        assert self._there is not None
        self._there.copy_(self._on_host(), non_blocking=True)

    def _on_host(self) -> torch.Tensor:
        assert self._space is not None and self._space.memory is not None
        return self._space.memory.view(self._dtype).view(self._shape)
