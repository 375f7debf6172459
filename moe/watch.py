"""What the routers did since it was last asked: tokens per expert and auxiliary losses, by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import Router

# Megatron's tracker names -> ours. Under sequence parallelism each tensor rank sees its own tokens: their load-balancing
# losses are parts of a sum, their z-losses parts of a mean.
LOSSES = {"load_balancing_loss": "aux_loss", "seq_load_balancing_loss": "sequence_aux_loss", "z_loss": "z_loss"}


class RouterWatch:
    """Counts each router's choices in training passes, on its device, without any communication.

    `take` returns a flat float64 tensor: [num_layers * num_experts] tokens per expert (rows of dense layers and of
    layers on other ranks are zero), then [num_losses * num_layers] sums over micro-batches; summed over all ranks of the
    job it is the whole step's. `losses` lists the names of the auxiliary losses in order.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int, num_experts: int, losses: Sequence[str], device: torch.device):
        self.num_layers, self.num_experts, self.losses = num_layers, num_experts, list(losses)
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(self._count)

    def _count(self, router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Without gradients it is an evaluation, or the first of two passes under recompute.
        if torch.is_grad_enabled():
            self._counts[router.layer_number - 1] += output[1].sum(dim=0)

    def take(self) -> torch.Tensor:
        """The flat statistics of this rank since the last call; resets them."""
        tracker = get_moe_layer_wise_logging_tracker()
        parts = [self._counts.flatten()]
        for name in self.losses:
            entry = tracker.get(next(theirs for theirs, ours in LOSSES.items() if ours == name))
            values = self._counts.new_zeros(self.num_layers) if entry is None else entry["values"].to(self._counts.dtype)
            parts.append(values)
        flat = torch.cat(parts)
        self._counts.zero_()
        for entry in tracker.values():
            entry["values"].zero_()
        return flat

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Undo the layout of `take`: tokens per expert [num_layers, num_experts] and each loss [num_layers]."""
        counts, losses = flat.split([self.num_layers * self.num_experts, len(self.losses) * self.num_layers])
        by_name = dict(zip(self.losses, losses.view(len(self.losses), self.num_layers), strict=True))
        return counts.view(self.num_layers, self.num_experts), by_name
