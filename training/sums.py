"""Sums over all ranks that share the all-reduce of the loss, so that a step needs one message and one wait for the
device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Entry = Callable[[], torch.Tensor]


class StepSums:
    """Named float64 device tensors that every step sums over all ranks, in one all-reduce with the loss.

    Code that needs a sum registers a function at the start of training or in a callback's `before_step`; all ranks must
    register the same names with tensors of the same shapes. The function is called after the passes of each step and
    must not wait for the device. The sum is on the host as `StepResult.sums[name]` in `before_update` and `after_step`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, entry: Entry) -> None:
        """Add a sum: from now on, every step sums the tensor that `entry()` returns over all ranks."""
        assert name not in self._entries, f"{name} is summed in every step already"
        self._entries[name] = entry

    def take(self) -> dict[str, torch.Tensor]:
        """Call every registered function, and return this rank's tensors by name, in the order of registration."""
        return {name: entry() for name, entry in self._entries.items()}


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors into one flat tensor, for a single all-reduce."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split a flat tensor into views with the shapes of `tensors`, in order."""
    sizes = [tensor.numel() for tensor in tensors]
    assert flat.numel() == sum(sizes)
    return [view.view(tensor.shape) for view, tensor in zip(flat.split(sizes), tensors, strict=True)]
