"""The load-balancing loss over the global batch, the same in every layout.

The loss of a layer is E * sum over e of f_e * P_e (Switch Transformer, arXiv 2101.03961, equation 4): f_e is the share
of expert e in all choices, P_e the mean of its scores. Both are over the global batch, as in arXiv 2501.11873.

The f of a step is known only after its last micro-batch was routed, but the first micro-batch's backward pass runs
earlier. The gradients therefore use the f of the last update: docs/decisions/global-aux-loss-of-previous-step.md.

Shapes: L MoE layers, T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory.transfer import to_device
from moe.router import Router


class GlobalBalance:
    """The load-balancing loss over the global batch, which this object adds to all routers of `chunks`.

    It sums over this rank's tokens. The caller must reduce the result of `take` over ranks, and pass the choices to
    `follow`. `layers`: the numbers of the model's MoE layers.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], layers: Sequence[int], num_experts: int, device: torch.device
    ):
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._sums = torch.zeros(2, len(layers), num_experts, dtype=torch.float64, device=device)
        self._shares = torch.empty(len(layers), num_experts, device=device)
        self.follow(None)
        for module in (each for chunk in chunks for each in chunk.modules() if isinstance(each, Router)):
            module.global_balance = self._loss  # Megatron builds the router from its spec

    def begin(self) -> None:
        """Reset this rank's sums of choices and scores at the start of a step."""
        self._sums.zero_()

    def take(self) -> torch.Tensor:
        """Return this rank's sums over the step's tokens, float64 [2, L, E]: choices and scores of each expert."""
        return self._sums

    def follow(self, choices: torch.Tensor | None) -> None:
        """Set the f of the loss from the choices per expert in a global batch, float64 [L, E] on the host.

        With None all experts have the same f, and the loss has no gradient.
        """
        if choices is None:
            self._shares.fill_(1 / self._shares.size(1))
        else:
            shares = (choices / choices.sum(dim=1, keepdim=True)).float()
            self._shares.copy_(to_device(shares, self._shares.device))

    def _loss(self, layer: int, scores_TE: torch.Tensor, choices_TE: torch.Tensor) -> torch.Tensor:
        row, scores_E = self._row[layer], scores_TE.sum(dim=0)
        with torch.no_grad():
            self._sums[0, row] += choices_TE.sum(dim=0)
            self._sums[1, row] += scores_E
        return torch.dot(scores_E, self._shares[row]) * (scores_TE.size(1) / len(scores_TE))


def values(sums: torch.Tensor) -> torch.Tensor:
    """Return each layer's load-balancing loss [L] from a global batch's sums [2, L, E] of choices and scores.

    A perfectly balanced layer has the loss 1.
    """
    f, p = sums / sums.sum(dim=2, keepdim=True)
    return sums.size(2) * (f * p).sum(dim=1)
