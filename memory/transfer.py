"""Small tensors of the host, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device; the host goes on at once. From memory that is not pinned it would wait for all that
    the stream has to do before. What is on the device stays as it is."""
    return values if values.device.type == device.type else values.pin_memory().to(device, non_blocking=True)


def lists_to_device(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Lists of numbers as int64 tensors of the device, in one copy."""
    flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64)
    return list(to_device(flat, device).split([len(numbers) for numbers in lists]))
