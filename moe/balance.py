"""The load-balancing loss over the global batch, the same in every layout.

Of a layer it is E * sum over e of f_e * P_e (Switch Transformer, arXiv 2101.03961, equation 4): f_e is the share of
expert e in all choices, P_e the mean of its scores. Both are over the global batch, as in arXiv 2501.11873.

A step's f is known when its last micro-batch has chosen; the first one's backward pass comes before. So the gradients
are those of the loss with the f of the last update, and nothing waits: docs/decisions/balance-by-the-update-before.md.

Shapes: L MoE layers, T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory.transfer import to_device
from moe.router import Router


class GlobalBalance:
    """The loss of the routers in `chunks`, and what it is made of. `layers`: the numbers of the model's MoE layers.

    Nothing here communicates. `take` gives this rank's part of two sums over the step's tokens, float64 [2, L, E]:
    choices, and scores.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], layers: Sequence[int], num_experts: int, device: torch.device
    ):
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._sums = torch.zeros(2, len(layers), num_experts, dtype=torch.float64, device=device)
        self._shares = torch.empty(len(layers), num_experts, device=device)
        self.follow(None)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.global_balance = self._loss

    def begin(self) -> None:
        """A step begins: forget what passes have left."""
        self._sums.zero_()

    def take(self) -> torch.Tensor:
        """This rank's sums since `begin`."""
        return self._sums

    def follow(self, choices: torch.Tensor | None) -> None:
        """Weigh scores by these choices of a global batch from now on: float64 [L, E] on the host. None: by even ones,
        whose loss has no gradient."""
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
    """The loss of each layer [L] by the sums [2, L, E] of a whole global batch: 1 for perfect balance."""
    f, p = sums / sums.sum(dim=2, keepdim=True)
    return sums.size(2) * (f * p).sum(dim=1)
