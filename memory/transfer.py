"""Small tensors of the host, on their way to the device."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device; the host goes on at once. From memory that is not pinned it would wait for all that
    the stream has to do before."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
