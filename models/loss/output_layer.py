"""The output layer of GPT and BERT: logits, or the loss without them."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from models.loss.rows import select_rows
from models.loss.tiles import token_tile
from models.loss.token_loss import Targets, VocabularyPart, mask_padding, token_loss

LossOutput = tuple[torch.Tensor, torch.Tensor]  # the sum of the losses, and each token's


class OutputLayer(ColumnParallelLinear):
    """Megatron-core's layer, whose padding is masked, and which has a loss. Its hooks are called for either, so that
    whoever changes its weight is waited for."""

    vocabulary: VocabularyPart
    chosen_tile: int | None

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, targets: Targets | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[s, b, v]` of hidden states `[s, b, h]`, and None. With targets, the sum of the losses `[]` and each
        token's `[b, s]`, both fp32, of this rank's rows `[m, h]` that predict."""
        if targets is None:
            logits, bias = super().forward(hidden, weight=weight)
            mask_padding(logits.detach(), self.vocabulary.num_real)  # autograd would copy the gradient of all logits
            return logits, bias
        weight = self.weight if weight is None else weight
        tile = token_tile(targets.labels.numel(), self.chosen_tile)
        return token_loss(hidden, weight, self.bias, targets, self.vocabulary, tile)

    def rows(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        """This rank's rows `[m, h]` of `[s, b, h]` that predict something."""
        rank = self.vocabulary.group.rank() if self.vocabulary.is_spread else 0
        return select_rows(hidden, targets.rows, rank)


def become_output_layer(layer: torch.nn.Module, vocab_size: int, chosen_tile: int | None) -> None:
    """Make Megatron-core's layer, which it builds itself, one of these. `vocab_size` is the logical one."""
    assert type(layer) is ColumnParallelLinear, type(layer)
    layer.__class__ = OutputLayer
    group, rows = layer.tp_group, layer.output_size_per_partition
    first = group.rank() * rows
    num_real = min(max(vocab_size - first, 0), rows)
    layer.vocabulary = VocabularyPart(group, first, num_real, layer.sequence_parallel)
    layer.chosen_tile = chosen_tile
