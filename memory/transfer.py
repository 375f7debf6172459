"""Copies of small tensors from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device without waiting. From memory that is not pinned, the host would wait for all
    earlier work of the stream. A tensor on the device is returned as it is."""
    return values if values.device.type == device.type else values.pin_memory().to(device, non_blocking=True)


def lists_to_device(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Return lists of numbers as int64 tensors of the device, in one copy."""
    flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64)
    return list(to_device(flat, device).split([len(numbers) for numbers in lists]))
