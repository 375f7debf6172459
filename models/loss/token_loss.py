"""The sum of the tokens' losses from hidden states, without logits of more than a tile of tokens.

For each tile: logits, softmax, loss, and at once the gradients, which need nothing but the gradient of the sum. That is
known before the forward pass. So a pass keeps the hidden states' gradient alone, as Liger-Kernel's fused linear cross
entropy does (Hsu et al. 2024, arXiv:2410.10989, section 3.2); the weight's is added to its buffer tile by tile.

Over tensor ranks, which hold columns of the logits, a token reduces its largest logit, its sum of exponentials and its
label's logit (Shoeybi et al. 2019, section 3). Under sequence parallelism a tile has as many rows of each rank: they
are gathered, and their gradient is scattered again.

Shapes: N rows that predict, of all tensor ranks; M of them this rank's (N without sequence parallelism); t rows of a
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
class VocabularyPart:
    """The part of the vocabulary that a tensor rank holds. `num_real` of its rows are tokens, the last ones padding.
    `is_spread`: each tensor rank has its own share of the hidden states' rows."""

    group: dist.ProcessGroup
    first: int
    num_real: int
    is_spread: bool

    @property
    def ranks(self) -> int:
        """How many hold rows of their own."""
        return self.group.size() if self.is_spread else 1


@dataclass(frozen=True)
class Targets:
    """What the output layer is to predict.

    `labels` int64 and `loss_mask` fp32, `[b, s]`; `rows` as models/loss/rows.py chooses them; `loss_grad` fp32 `[]`:
    the gradient of the sum of losses, where it is known before the forward pass.
    """

    labels: torch.Tensor
    loss_mask: torch.Tensor
    rows: torch.Tensor | None = None
    loss_grad: torch.Tensor | None = None


def targets_of(batch: dict[str, torch.Tensor]) -> Targets | None:
    """A batch's targets; None without labels."""
    if "labels" not in batch:
        return None
    return Targets(batch["labels"], batch["loss_mask"], batch.get("rows"), batch.get("loss_grad"))


def token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    part: VocabularyPart,
    tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses of the tokens whose `loss_mask` is 1, fp32 `[]`, and each one's, fp32 `[b, s]` and detached.

    With `targets.loss_grad` gradients are made of it, whatever comes back; a weight that has a `main_grad` gets its own
    in the forward pass, unless a single tile has all tokens.

    Args:
        hidden: `[M, H]`, this rank's rows of `targets.rows`.
        weight: `[V, H]`; bias: `[V]` or None.
        tile: tokens, of all tensor ranks.
    """
    with_grads = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _TokenLoss.apply(hidden, weight, bias, targets, part, tile, with_grads)  # type: ignore[no-any-return]


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: Targets,
        part: VocabularyPart,
        tile: int,
        with_grads: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        labels, mask = (_in_rows(each, targets.rows, part.ranks) for each in (targets.labels, targets.loss_mask))
        is_whole = tile >= targets.labels.numel()
        work = _Tiles(hidden, weight, bias, part, max(1, tile // part.ranks), is_whole)
        grads = None
        if with_grads:
            scales = mask if targets.loss_grad is None else mask * targets.loss_grad
            grads = _Gradients(hidden, weight, bias, is_whole, targets.loss_grad is not None)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        for rows in work.slices():
            exponentials, label_logits, sums = work.softmax(rows, labels[:, rows].reshape(-1))
            losses[:, rows] = (torch.log(sums) - label_logits).view(part.ranks, -1)
            if grads is not None:
                logits_grad = work.logits_grad(exponentials, sums, scales[:, rows].reshape(-1))
                grads.add_tile(rows, logits_grad, part)
                if work.is_full:
                    grads.add_group(*work.take_group())
        if grads is not None:
            grads.finish(part)
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


def _in_rows(values: torch.Tensor, rows: torch.Tensor | None, ranks: int) -> torch.Tensor:
    """`[b, s]` -> `[ranks, m]`."""
    flat = values.t().reshape(-1)
    return flat.view(ranks, -1) if rows is None else flat[rows]


def _of_samples(losses: torch.Tensor, targets: Targets) -> torch.Tensor:
    """`[ranks, m]` -> `[b, s]`; 0 for those left out."""
    samples, length = targets.labels.shape
    if targets.rows is not None:
        whole = losses.new_zeros(samples * length)
        losses = whole.index_copy_(0, targets.rows.reshape(-1), losses.reshape(-1))
    return losses.reshape(length, samples).t().contiguous()


class _Tiles:
    """The forward pass of one tile after the other, in memory that they share.

    The gradients of the logits of a few tiles are kept, for one product: it is as good as of so large a tile, and in
    half precision they take less than its logits in fp32.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        part: VocabularyPart,
        own_tile: int,
        is_whole: bool,
    ):
        self.hidden, self.weight, self.bias, self.part, self.is_whole = hidden, weight, bias, part, is_whole
        self.own_tile = max(1, min(own_tile, len(hidden)))
        is_wide = hidden.dtype == torch.float32
        in_group = 1 if is_whole else WIDE_GROUP if is_wide else HALF_GROUP
        self.own_group = min(self.own_tile * in_group, len(hidden))
        tile, group = self.own_tile * part.ranks, self.own_group * part.ranks
        self.logits = hidden.new_empty(group, len(weight))
        self.wide = None if is_wide else hidden.new_empty(tile, len(weight), dtype=torch.float32)
        self.gathered = hidden.new_empty(group, hidden.size(1)) if part.is_spread else None
        self.own = slice(0, 0)  # this rank's rows of the group
        self.factor: torch.Tensor | None = None  # of this rank's exponentials

    def slices(self) -> list[slice]:
        """This rank's rows of each tile."""
        end = len(self.hidden)
        return [slice(start, min(start + self.own_tile, end)) for start in range(0, end, self.own_tile)]

    @property
    def is_full(self) -> bool:
        """Whether no tile follows in the group."""
        return self.own.stop - self.own.start == self.own_group or self.own.stop == len(self.hidden)

    def take_group(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's gradients of logits and its hidden states, of all ranks; the next tile begins another."""
        own, self.own = self.own, slice(self.own.stop, self.own.stop)
        rows = (own.stop - own.start) * self.part.ranks
        return self.logits[:rows], self.hidden[own] if self.gathered is None else self.gathered[:rows]

    def softmax(self, own: slice, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exponentials of a tile's logits less the largest of their row, fp32 `[t, V]`; of all ranks the label's logit,
        less the same, and the sums `[t]`. The tile has this rank's rows `own`."""
        part = self.part
        if self.is_full:
            self.own = slice(own.start, own.start)
        at = slice(*((row - self.own.start) * part.ranks for row in (own.start, own.stop)))
        self.own, x, self.place = slice(self.own.start, own.stop), self.hidden[own], at
        if self.gathered is not None:
            x = self.gathered[at]
            dist.all_gather_into_tensor(x, self.hidden[own].contiguous(), group=part.group)
        logits = torch.mm(x, self.weight.t(), out=self.logits[at])
        if self.bias is not None:
            logits += self.bias
        mask_padding(logits, part.num_real)
        wide = logits if self.wide is None else self.wide[: len(x)].copy_(logits)
        column = labels - part.first
        self.is_mine = (column >= 0) & (column < wide.size(1))
        self.column = torch.where(self.is_mine, column, 0).unsqueeze(1)
        largest = wide.amax(dim=-1)
        if self.is_whole:
            _reduce(largest, part.group, dist.ReduceOp.MAX)
        wide -= largest.unsqueeze(1)
        label_logits = torch.where(self.is_mine, wide.gather(1, self.column).squeeze(1), 0.0)
        wide.exp_()
        sums = wide.sum(dim=-1)
        if self.is_whole:
            _reduce(label_logits, part.group)
            _reduce(sums, part.group)
        elif part.group.size() > 1:
            self.factor, label_logits, sums = self._joined(largest, label_logits, sums)
        return wide, label_logits, sums

    def _joined(self, *numbers: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' largest logits, label's logits and sums `[t]` as one, by a single exchange: the factor that turns
        this rank's exponentials into those of all, the label's logit less the largest of all, and the sums."""
        group, own = self.part.group, torch.stack((*numbers, self.is_mine.float()))
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
        """(softmax - label) * scale, of the last tile, in the weight's dtype and in the logits' memory."""
        targets = self.is_mine.float()
        if self.is_whole:  # as Megatron-core's loss has it
            exponentials.div_(sums.unsqueeze(1)).scatter_add_(1, self.column, -targets.unsqueeze(1))
            exponentials.mul_(scales.unsqueeze(1))
        else:  # a pass less
            factors = scales / sums if self.factor is None else self.factor * scales / sums
            exponentials.mul_(factors.unsqueeze(1))
            exponentials.scatter_add_(1, self.column, -(targets * scales).unsqueeze(1))
        # Not in the product: torch multiplies into another dtype number by number.
        return exponentials if self.wide is None else self.logits[self.place].copy_(exponentials)


class _Gradients:
    """What the tiles' gradients add up to. `hidden` has the rank's rows; `weight` is there unless it goes to a
    buffer."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_whole: bool, is_known: bool
    ):
        self.parameter, self.is_whole = weight, is_whole
        self.hidden = torch.empty_like(hidden)
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        self.writes_over = self.to_buffer = False
        if not weight.requires_grad:
            pass
        elif is_known and not is_whole and hasattr(weight, "main_grad"):
            self.to_buffer = True
            self.buffer, self.writes_over = open_buffer(weight)
        elif not is_whole:
            self.buffer, self.writes_over = torch.empty_like(weight, dtype=torch.float32), True
        if bias is not None and bias.requires_grad:
            self.bias = torch.zeros_like(bias, dtype=torch.float32)

    def add_tile(self, rows: slice, logits_grad: torch.Tensor, part: VocabularyPart) -> None:
        """Add a tile's, but for the weight."""
        if part.is_spread:
            whole = torch.mm(logits_grad, self.parameter)
            dist.reduce_scatter_tensor(self.hidden[rows], whole, group=part.group)
        else:
            torch.mm(logits_grad, self.parameter, out=self.hidden[rows])
        if self.bias is not None:
            self.bias += logits_grad.sum(dim=0, dtype=torch.float32)

    def add_group(self, logits_grad: torch.Tensor, x: torch.Tensor) -> None:
        """Add a group's gradient of the weight."""
        if self.buffer is not None:
            _add_product(self.buffer, logits_grad, x, self.writes_over)
            self.writes_over = False
        elif self.parameter.requires_grad:
            self.weight = logits_grad.t().matmul(x)

    def finish(self, part: VocabularyPart) -> None:
        """After the last tile."""
        if not part.is_spread:
            _reduce(self.hidden, part.group)
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
        """The weight's gradient for autograd, whose hooks wait for one."""
        if not self.to_buffer:
            return self.weight
        if getattr(self.parameter, "zero_out_wgrad", False):  # the embedding's comes
            return None
        # One that means nothing, as Megatron-core's fused products leave it: on the same device, so that the hooks run
        # in their order, and without memory of its own. DDP's hook drops it unread.
        return self.parameter.detach()


def _add_product(buffer: torch.Tensor, logits_grad: torch.Tensor, x: torch.Tensor, writes_over: bool) -> None:
    """buffer = logits_grad^T x, or more by that: in place, and in half precision some rows after the others."""
    if buffer.dtype == x.dtype:
        torch.addmm(buffer, logits_grad.t(), x, beta=0 if writes_over else 1, out=buffer)
        return
    rows = max(1, min(len(buffer), BLOCK_NUMBERS // x.size(1)))
    memory = x.new_empty(rows, x.size(1))
    for start in range(0, len(buffer), rows):
        of_rows = buffer[start : start + rows]
        product = torch.mm(logits_grad[:, start : start + rows].t(), x, out=memory[: len(of_rows)])
        if writes_over:
            of_rows.copy_(product)
        else:
            of_rows += product


def mask_padding(logits: torch.Tensor, num_real: int) -> None:
    """Make logits of rows that pad the vocabulary the smallest number: softmax gives them exactly 0, and their gradient
    is 0."""
    if num_real < logits.size(-1):
        logits[..., num_real:] = torch.finfo(logits.dtype).min


def _reduce(values: torch.Tensor, group: dist.ProcessGroup, operation: Any = dist.ReduceOp.SUM) -> None:
    if group.size() > 1 and values.numel() > 0:
        dist.all_reduce(values, op=operation, group=group)
