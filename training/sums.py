"""Sums over all ranks that share the loss's all-reduce: one message and one wait for the device per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Entry = Callable[[], torch.Tensor]


class StepSums:
    """The tensors that a step sums over all ranks: float64, on the device, of the same name and shape on every rank.

    Code that needs a sum registers an entry at the start, or before a step (a callback's `before_step`). The entry is
    called after the passes of each step, and must not wait for the device. The sum is on the host in `StepResult.sums`,
    under the entry's name, in a callback's `before_update` and `after_step`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, entry: Entry) -> None:
        """Sum the tensor that `entry()` returns in every step from now on."""
        assert name not in self._entries, f"{name} is summed in every step already"
        self._entries[name] = entry

    def take(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensor of every entry, in the order of their registration."""
        return {name: entry() for name, entry in self._entries.items()}


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors, for one all-reduce."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undo `pack`: return views of `flat` in the shapes of `tensors`."""
    sizes = [tensor.numel() for tensor in tensors]
    assert flat.numel() == sum(sizes)
    return [view.view(tensor.shape) for view, tensor in zip(flat.split(sizes), tensors, strict=True)]
