"""The output layer of GPT and BERT: returns logits, or the loss without storing them, for the rows that predict a
token.

Rows are tokens in Megatron-core's order, `[s, b]` flattened. The rows that predict are selected on the host, so that
their number is known without waiting for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from models.loss.tiles import token_tile
from models.loss.token_loss import Targets, VocabularyShard, mask_padding, token_loss

LossOutput = tuple[torch.Tensor, torch.Tensor]  # the sum of the losses, and each token's


class OutputLayer(ColumnParallelLinear):
    """Megatron-core's output layer, which masks padding and can return the loss in place of logits. Both are results of
    `forward`, whose hooks first finish a pending update of the weight."""

    vocabulary: VocabularyShard
    chosen_tile: int | None

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, targets: Targets | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits `[s, b, v]` for hidden states `[s, b, h]`, and the bias. With targets, take this rank's rows
        `[m, h]` that predict, and return the sum of the losses `[]` and the loss per token `[b, s]`, both fp32."""
        if targets is None:
            logits, bias = super().forward(hidden, weight=weight)
            mask_padding(logits.detach(), self.vocabulary.num_real)  # autograd would copy the gradient of all logits
            return logits, bias
        weight = self.weight if weight is None else weight
        tile = token_tile(targets.labels.numel(), self.chosen_tile)
        return token_loss(hidden, weight, self.bias, targets, self.vocabulary, tile)

    def select(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return this rank's rows `[m, h]` of hidden states `[s, b, h]` that predict a token."""
        return select_rows(hidden, targets.loss_rows, self.vocabulary.group.rank())


def become_output_layer(layer: torch.nn.Module, vocab_size: int, chosen_tile: int | None) -> None:
    """Turn the output layer that Megatron-core built into an OutputLayer. `vocab_size` is without padding.
    `chosen_tile`: training.token_tile."""
    assert type(layer) is ColumnParallelLinear, type(layer)
    layer.__class__ = OutputLayer  # Megatron's models build the layer themselves, and take no class for it
    group, num_rows = layer.tp_group, layer.output_size_per_partition
    first = group.rank() * num_rows
    num_real = min(max(vocab_size - first, 0), num_rows)
    layer.vocabulary = VocabularyShard(group, first, num_real, layer.sequence_parallel)
    layer.chosen_tile = chosen_tile


def predicted_rows(loss_mask: torch.Tensor, ranks: int = 1) -> torch.Tensor | None:
    """Return the indices of the rows where `loss_mask` (`[b, s]`, on the host) is not 0: int64 `[ranks, m]`. None means
    all rows.

    Under sequence parallelism each of `ranks` tensor ranks holds a shard of the rows. All get the same number: a rank
    with fewer predicting rows also gets rows that predict nothing.
    """
    predicts = (loss_mask.t().reshape(ranks, -1) != 0).to(torch.int8)
    counts = predicts.sum(dim=1)
    most = int(counts.max())
    if int(counts.min()) == predicts.size(1):
        return None
    # For each rank the rows that predict first; rows that predict, and other rows, stay in order.
    chosen = torch.argsort(predicts, dim=1, descending=True, stable=True)[:, :most].sort(dim=1).values
    return chosen + torch.arange(ranks).unsqueeze(1) * predicts.size(1)


def select_rows(hidden: torch.Tensor, loss_rows: torch.Tensor | None, rank: int) -> torch.Tensor:
    """Return the rows `[m, h]` of hidden states `[s, b, h]` that `loss_rows[rank]` selects; all rows if it is None."""
    flat = hidden.flatten(0, 1)
    if loss_rows is None:
        return flat
    rank = rank if loss_rows.size(0) > 1 else 0
    return _Select.apply(flat, loss_rows[rank] - rank * flat.size(0))  # type: ignore[no-any-return]


class _Select(torch.autograd.Function):
    """Autograd function that selects distinct rows of a matrix. torch's own function would add gradients row by row."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.shape = whole.shape
        ctx.save_for_backward(index)
        return whole.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, index, grad), None
