"""What rides with the loss's all-reduce: one message and one wait a step for all who want something summed over the
ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Entry = Callable[[], torch.Tensor]


class StepSums:
    """The entries of a step: a float64 tensor each, on the device, of the same name and shape on every rank of the job.

    Whoever wants a sum registers its entry at the start, or before a step (a callback's `before_step`). It is asked for
    its tensor after the passes of each step, must not wait for the device, and finds the sum over all ranks on the
    host, under its name in `StepResult.sums`: in a callback's `before_update` and `after_step`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, entry: Entry) -> None:
        """Have what `entry()` gives summed in every step from now on."""
        assert name not in self._entries, f"{name} rides in every step already"
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Sum it no more."""
        del self._entries[name]

    def take(self) -> dict[str, torch.Tensor]:
        """This rank's part of every entry, in the order of their registration."""
        return {name: entry() for name, entry in self._entries.items()}


def pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of all parts, for one all-reduce."""
    return torch.cat([part.flatten() for part in parts])


def unpack(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undo `pack`: views of `flat` in the shapes of `parts`."""
    assert flat.numel() == sum(part.numel() for part in parts)
    return [
        piece.view(part.shape) for piece, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True)
    ]
