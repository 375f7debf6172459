"""Computes the sum of all tokens' losses from hidden states, with the logits of one tile of tokens at a time.

For each tile logits, softmax, loss and immediately the gradients are computed. The gradients need only the gradient of
the sum, which is known before the forward pass. So only the gradient of the hidden states is stored, as in
Liger-Kernel's fused linear cross entropy (Hsu et al. 2024, arXiv:2410.10989, section 3.2); the weight's gradient is
added to its buffer tile by tile.

Tensor ranks hold different columns of the logits, so a token's largest logit, sum of exponentials and label's logit are
reduced over them (Shoeybi et al. 2019, section 3). Under sequence parallelism a tile has the same number of rows of
each rank: they are gathered, and their gradient is scattered.

Shapes: N rows that predict, over all tensor ranks; M of them on this rank (N without sequence parallelism); t rows of a
tile; H hidden size; V padded vocabulary rows of this tensor rank; b samples, s tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from models.loss.tiles import BLOCK_NUMBERS, HALF_GROUP, WIDE_GROUP
from parallel.megatron.grad_buffers import open_buffer


@dataclass(frozen=True)
class VocabularyShard:
    """The vocabulary rows of a tensor rank, starting at row `first`: `num_real` are tokens, the rest is padding.
    `is_spread`: tensor ranks hold different rows of the hidden states (sequence parallelism)."""

    group: dist.ProcessGroup
    first: int
    num_real: int
    is_spread: bool

    @property
    def ranks(self) -> int:
        """Number of ranks that hold different rows of the hidden states."""
        return self.group.size() if self.is_spread else 1


@dataclass(frozen=True)
class Targets:
    """The labels and masks from which the output layer computes the loss. `labels` int64 and `loss_mask` fp32, `[b,
    s]`. `loss_rows`: indices of the rows that predict a token, int64 `[ranks, m]`; None: all rows. `loss_grad`: fp32
    `[]`, the gradient of the sum of losses if it is known before the forward pass."""

    labels: torch.Tensor
    loss_mask: torch.Tensor
    loss_rows: torch.Tensor | None = None
    loss_grad: torch.Tensor | None = None


def targets_of(batch: dict[str, torch.Tensor]) -> Targets | None:
    """Return the labels and masks of a batch for the output layer; None if the batch has no labels."""
    if "labels" not in batch:
        return None
    return Targets(batch["labels"], batch["loss_mask"], batch.get("rows"), batch.get("loss_grad"))


def token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    shard: VocabularyShard,
    tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of tokens whose `loss_mask` is 1, fp32 `[]`, and the loss of each token, fp32 `[b,
    s]`, detached.

    With `targets.loss_grad`, the gradient of the sum, all gradients are computed in the forward pass, and the gradient
    that autograd passes is ignored. A weight
    with a `main_grad` then gets its gradient in the forward pass, unless a single tile has all tokens.

    Args: hidden `[M, H]`: this rank's rows of `targets.loss_rows`. weight `[V, H]`. bias `[V]` or None. tile: number of
    tokens over all tensor ranks.
    """
    with_grads = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _TokenLoss.apply(hidden, weight, bias, targets, shard, tile, with_grads)  # type: ignore[no-any-return]


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: Targets,
        shard: VocabularyShard,
        tile: int,
        with_grads: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = targets.loss_rows
        flat = [each.t().reshape(-1) for each in (targets.labels, targets.loss_mask)]
        labels, mask = (each.view(shard.ranks, -1) if chosen is None else each[chosen] for each in flat)  # [ranks, m]
        is_whole = tile >= targets.labels.numel()
        work = _Tiles(hidden, weight, bias, shard, max(1, tile // shard.ranks), is_whole)
        grads = None
        if with_grads:
            scales = mask if targets.loss_grad is None else mask * targets.loss_grad
            grads = _Gradients(hidden, weight, bias, is_whole, targets.loss_grad is not None)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), work.own_tile):
            own = slice(start, min(start + work.own_tile, len(hidden)))
            exponentials, label_logits, sums = work.softmax(own, labels[:, own].reshape(-1))
            losses[:, own] = (torch.log(sums) - label_logits).view(shard.ranks, -1)
            if grads is not None:
                logits_grad = work.logits_grad(exponentials, sums, scales[:, own].reshape(-1))
                grads.add_tile(own, logits_grad, shard)
                if work.is_full:
                    grads.add_group(*work.take_group())
        if grads is not None:
            grads.finish(shard)
        ctx.grads, ctx.loss_grad = grads, targets.loss_grad
        each = _of_samples(losses, targets) * targets.loss_mask
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        grads, ctx.grads = ctx.grads, None
        assert grads is not None, "the gradients were made in the forward pass, and are given once"
        if ctx.loss_grad is None:
            for each in (grads.hidden, grads.weight, grads.bias):
                if each is not None:
                    each.mul_(grad)
        return grads.hidden, grads.for_autograd(), grads.bias, None, None, None, None


def _of_samples(losses: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Scatter losses `[ranks, m]` to `[b, s]`, with 0 for rows that predict nothing."""
    samples, length = targets.labels.shape
    if targets.loss_rows is not None:
        whole = losses.new_zeros(samples * length)
        losses = whole.index_copy_(0, targets.loss_rows.reshape(-1), losses.reshape(-1))
    return losses.reshape(length, samples).t().contiguous()


class _Tiles:
    """Computation of the loss in the forward pass, tile by tile, in memory that all tiles share.

    The logit gradients of a few tiles form a group, with one matmul for the weight's gradient. That is as fast as with
    one tile of that size, and in half precision the group takes less memory than such a tile's logits in fp32.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shard: VocabularyShard,
        own_tile: int,
        is_whole: bool,
    ):
        self.hidden, self.weight, self.bias, self.shard, self.is_whole = hidden, weight, bias, shard, is_whole
        self.own_tile = max(1, min(own_tile, len(hidden)))
        is_wide = hidden.dtype == torch.float32
        in_group = 1 if is_whole else WIDE_GROUP if is_wide else HALF_GROUP
        self.own_group = min(self.own_tile * in_group, len(hidden))
        tile, group = self.own_tile * shard.ranks, self.own_group * shard.ranks
        self.logits = hidden.new_empty(group, len(weight))
        self.wide = None if is_wide else hidden.new_empty(tile, len(weight), dtype=torch.float32)
        self.gathered = hidden.new_empty(group, hidden.size(1)) if shard.is_spread else None
        self.own = slice(0, 0)  # this rank's rows of the group
        self.factor: torch.Tensor | None = None  # for this rank's exponentials

    @property
    def is_full(self) -> bool:
        """True if the last computed tile completes its group of tiles."""
        return self.own.stop - self.own.start == self.own_group or self.own.stop == len(self.hidden)

    def take_group(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logit gradients and the hidden states of the current group of tiles, over all ranks, and start the
        next group."""
        own, self.own = self.own, slice(self.own.stop, self.own.stop)
        num_rows = (own.stop - own.start) * self.shard.ranks
        return self.logits[:num_rows], self.hidden[own] if self.gathered is None else self.gathered[:num_rows]

    def softmax(self, own: slice, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the parts of a tile's softmax: exp(logit - largest logit of the row), fp32 `[t, V]`; the label's
        logit minus the largest logit, and the sum of exponentials, both `[t]` and over all ranks. `own`: this rank's
        rows of the tile."""
        shard = self.shard
        if self.is_full:
            self.own = slice(own.start, own.start)
        at = slice(*((row - self.own.start) * shard.ranks for row in (own.start, own.stop)))
        self.own, x, self.tile_span = slice(self.own.start, own.stop), self.hidden[own], at
        if self.gathered is not None:
            x = self.gathered[at]
            dist.all_gather_into_tensor(x, self.hidden[own].contiguous(), group=shard.group)
        logits = torch.mm(x, self.weight.t(), out=self.logits[at])
        if self.bias is not None:
            logits += self.bias
        mask_padding(logits, shard.num_real)
        wide = logits if self.wide is None else self.wide[: len(x)].copy_(logits)
        column = labels - shard.first
        self.is_mine = (column >= 0) & (column < wide.size(1))
        self.column = torch.where(self.is_mine, column, 0).unsqueeze(1)
        largest = wide.amax(dim=-1)
        if self.is_whole:
            _reduce(largest, shard.group, dist.ReduceOp.MAX)
        wide -= largest.unsqueeze(1)
        label_logits = torch.where(self.is_mine, wide.gather(1, self.column).squeeze(1), 0.0)
        wide.exp_()
        sums = wide.sum(dim=-1)
        if self.is_whole:
            _reduce(label_logits, shard.group)
            _reduce(sums, shard.group)
        elif shard.group.size() > 1:
            self.factor, label_logits, sums = self._reduced(largest, label_logits, sums)
        return wide, label_logits, sums

    def _reduced(self, *numbers: torch.Tensor) -> list[torch.Tensor]:
        """Reduce the largest logits, label's logits and sums of exponentials, `[t]` each, over the ranks with one
        all-gather.

        Returns the factor that rescales this rank's exponentials to the largest logit of all ranks, the label's logit
        minus that largest logit, and the sums.
        """
        group, own = self.shard.group, torch.stack((*numbers, self.is_mine.float()))
        gathered = own.new_empty(group.size() * len(own), own.size(1))
        dist.all_gather_into_tensor(gathered, own, group=group)
        largest, label_logits, sums, is_mine = gathered.view(group.size(), *own.shape).unbind(1)
        above = largest - largest.amax(dim=0)
        factors = above.exp()
        return [
            factors[group.rank()],
            torch.where(is_mine > 0, label_logits + above, 0).sum(dim=0),
            (sums * factors).sum(dim=0),
        ]

    def logits_grad(self, exponentials: torch.Tensor, sums: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the logit gradients of the last tile, (softmax - one-hot label) * scale, in the weight's dtype, stored
        over the logits."""
        targets = self.is_mine.float()
        if self.is_whole:  # in the order of Megatron-core's loss
            exponentials.div_(sums.unsqueeze(1)).scatter_add_(1, self.column, -targets.unsqueeze(1))
            exponentials.mul_(scales.unsqueeze(1))
        else:  # one pass fewer
            factors = scales / sums if self.factor is None else self.factor * scales / sums
            exponentials.mul_(factors.unsqueeze(1))
            exponentials.scatter_add_(1, self.column, -(targets * scales).unsqueeze(1))
        # A separate copy: torch's multiplication into another dtype is not vectorized.
        return exponentials if self.wide is None else self.logits[self.tile_span].copy_(exponentials)


class _Gradients:
    """Gradients of the loss, summed over tiles. `hidden`: of this rank's hidden states. `weight`: of the output weight;
    None if a gradient buffer already has it."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_whole: bool, is_known: bool
    ):
        self.parameter = weight
        self.hidden = torch.empty_like(hidden)
        self.weight: torch.Tensor | None = None
        adds_bias = bias is not None and bias.requires_grad
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if adds_bias else None
        self.buffer: torch.Tensor | None = None
        self.writes_over = self.to_buffer = False
        if weight.requires_grad and not is_whole:
            self.to_buffer = is_known and hasattr(weight, "main_grad")
            if self.to_buffer:
                self.buffer, self.writes_over = open_buffer(weight)
            else:
                self.buffer, self.writes_over = torch.empty_like(weight, dtype=torch.float32), True

    def add_tile(self, own: slice, logits_grad: torch.Tensor, shard: VocabularyShard) -> None:
        """Add a tile's gradients of hidden states and bias. `own`: this rank's rows of the tile."""
        if shard.is_spread:
            whole = torch.mm(logits_grad, self.parameter)
            dist.reduce_scatter_tensor(self.hidden[own], whole, group=shard.group)
        else:
            torch.mm(logits_grad, self.parameter, out=self.hidden[own])
        if self.bias is not None:
            self.bias += logits_grad.sum(dim=0, dtype=torch.float32)

    def add_group(self, logits_grad: torch.Tensor, x: torch.Tensor) -> None:
        """Add the weight gradient of a group of tiles, logits_grad^T x; if the buffer has another dtype, in blocks of
        rows."""
        buffer = self.buffer
        if buffer is None:
            if self.parameter.requires_grad:
                self.weight = logits_grad.t().matmul(x)
            return
        if buffer.dtype == x.dtype:
            torch.addmm(buffer, logits_grad.t(), x, beta=0 if self.writes_over else 1, out=buffer)
        else:
            size = max(1, min(len(buffer), BLOCK_NUMBERS // x.size(1)))
            memory = x.new_empty(size, x.size(1))
            for start in range(0, len(buffer), size):
                block = buffer[start : start + size]
                product = torch.mm(logits_grad[:, start : start + size].t(), x, out=memory[: len(block)])
                if self.writes_over:
                    block.copy_(product)
                else:
                    block += product
        self.writes_over = False

    def finish(self, shard: VocabularyShard) -> None:
        """Reduce the gradients over ranks and convert their dtypes, after the last tile."""
        if not shard.is_spread:
            _reduce(self.hidden, shard.group)
        if self.buffer is not None and self.writes_over:  # there was no tile
            self.buffer.zero_()
        if self.bias is not None:
            self.bias = self.bias.to(self.parameter.dtype)
        if not self.parameter.requires_grad or self.to_buffer:
            self.buffer = None
        elif self.buffer is not None:
            self.weight, self.buffer = self.buffer.to(self.parameter.dtype), None
        elif self.weight is None:
            self.weight = torch.zeros_like(self.parameter)

    def for_autograd(self) -> torch.Tensor | None:
        """Return the weight's gradient for autograd's hooks; a dummy if the gradient buffer already contains it."""
        if not self.to_buffer:
            return self.weight
        if getattr(self.parameter, "zero_out_wgrad", False):  # the gradient of the embedding follows
            return None
        # A dummy, as Megatron-core's fused products return: on the same device, so that the hooks run in their order,
        # and without memory of its own. DDP's hook drops it unread.
        return self.parameter.detach()


def mask_padding(logits: torch.Tensor, num_real: int) -> None:
    """Set the logits of padding tokens to the smallest finite number: their softmax and gradient are then exactly 0."""
    if num_real < logits.size(-1):
        logits[..., num_real:] = torch.finfo(logits.dtype).min


def _reduce(values: torch.Tensor, group: dist.ProcessGroup, operation: Any = dist.ReduceOp.SUM) -> None:
    if group.size() > 1 and values.numel() > 0:
        dist.all_reduce(values, op=operation, group=group)
