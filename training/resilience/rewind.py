"""What a step changes before its weights are touched, put back: a refused step leaves no trace.

Passes draw random numbers (dropout by stream), add to the routers' biases and counts, and lower the fp16 loss scale.
Were that kept, the steps after a refused one would depend on whether its batch was refused now, or passed over because
of an earlier run's record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parallel.megatron.optimizer import members
from parallel.megatron.random_state import random_states, restore_random_states


class Mark:
    """A moment between two steps: random numbers, the routers' biases and counts, and the loss scale as they are
    now."""

    def __init__(self, buffers: Sequence[torch.Tensor], optimizer: Any):
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._random = {name: state.clone() for name, state in random_states().items()}
        scalers = {
            id(scaler): scaler
            for member in members(optimizer)
            if (scaler := getattr(member, "grad_scaler", None)) is not None
        }
        # The scale is a tensor that is replaced, never changed in place: to remember it costs no wait for the device.
        self._scalers = [(scaler, dict(vars(scaler))) for scaler in scalers.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        self.restore_buffers()
        restore_random_states(self._random)
        for scaler, before in self._scalers:
            vars(scaler).update(before)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put the routers' biases and counts back alone: a step whose fp16 gradients overflowed moves none of them,
        while its loss scale stays lowered."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
