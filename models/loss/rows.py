"""Which rows of a micro-batch predict something: the others never reach the output layer.

Rows are tokens in Megatron-core's order, `[s, b]` flattened. They are chosen on the host, so that their number is known
without waiting for the device.
"""

from __future__ import annotations

from typing import Any

import torch


def predicted_rows(loss_mask: torch.Tensor, ranks: int = 1) -> torch.Tensor | None:
    """Rows where `loss_mask` (`[b, s]`, on the host) is not 0: int64 `[ranks, m]`; None if these are all.

    Under sequence parallelism `ranks` tensor ranks hold a part of the rows each. All get as many: some that predict
    nothing fill up those of a rank with fewer.
    """
    predicts = (loss_mask.t().reshape(ranks, -1) != 0).to(torch.int8)
    counts = predicts.sum(dim=1)
    most = int(counts.max())
    if int(counts.min()) == predicts.size(1):
        return None
    # Of each rank's rows first those that predict, each kind in order.
    chosen = torch.argsort(predicts, dim=1, descending=True, stable=True)[:, :most].sort(dim=1).values
    return chosen + torch.arange(ranks).unsqueeze(1) * predicts.size(1)


def select_rows(hidden: torch.Tensor, rows: torch.Tensor | None, rank: int) -> torch.Tensor:
    """This rank's rows `[m, h]` of `[s, b, h]`: those of `rows[rank]`, or all."""
    flat = hidden.flatten(0, 1)
    if rows is None:
        return flat
    rank = rank if rows.size(0) > 1 else 0
    return _Select.apply(flat, rows[rank] - rank * flat.size(0))  # type: ignore[no-any-return]


class _Select(torch.autograd.Function):
    """Different rows of a matrix. Torch's own adds the gradients up, row by row."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.shape = whole.shape
        ctx.save_for_backward(rows)
        return whole.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, rows, grad), None
