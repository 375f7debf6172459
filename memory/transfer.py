"""Copies of small tensors from the host to the device, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device through pinned memory, without waiting. A tensor on the device is returned."""
    return values if values.device.type == device.type else values.pin_memory().to(device, non_blocking=True)


def lists_to_device(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Return lists of integers as int64 tensors on the device, with a single copy."""
    flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64)
    return list(to_device(flat, device).split([len(numbers) for numbers in lists]))
