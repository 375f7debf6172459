"""AdamW on a bucket's tensors, in place, by PyTorch's fused kernel, on the host or on the device.

The kernel is that of the optimizer on the device (torch.optim.AdamW, fused), on the same slices or on cuts of them that
keep its bits: the engine that updates a bucket changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SCRATCH = 2**18  # elements of exp_avg that are in fp32 at once where it is stored in bf16


@dataclass(frozen=True)
class UpdateScalars:
    """The hyperparameters of one parameter group in one step."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float


@dataclass(frozen=True)
class State:
    """A bucket's tensors by span, flat, all on one device. The update changes `masters`, in fp32."""

    masters: Sequence[torch.Tensor]
    exp_avgs: Sequence[torch.Tensor]
    exp_avg_sqs: Sequence[torch.Tensor]


def adamw(
    state: State,
    grads: Sequence[torch.Tensor],
    step: torch.Tensor,
    rates: Sequence[UpdateScalars],
    scratch: torch.Tensor,
) -> None:
    """Take the `step`-th step (fp32 []); `rates` are the spans'. `scratch` (fp32 [SCRATCH]) is used where exp_avg is in
    bf16."""
    for own in dict.fromkeys(rates):
        chosen = [index for index, each in enumerate(rates) if each == own]
        masters, own_grads, exp_avgs, exp_avg_sqs = (
            [each[i] for i in chosen] for each in (state.masters, grads, state.exp_avgs, state.exp_avg_sqs)
        )
        if exp_avgs[0].dtype == torch.float32:
            _fused(masters, own_grads, exp_avgs, exp_avg_sqs, step, own)
            continue
        for master, grad, exp_avg, exp_avg_sq in zip(masters, own_grads, exp_avgs, exp_avg_sqs, strict=True):
            for start in range(0, master.numel(), SCRATCH):
                span = slice(start, start + SCRATCH)
                wide = scratch[: exp_avg[span].numel()].copy_(exp_avg[span])
                _fused([master[span]], [grad[span]], [wide], [exp_avg_sq[span]], step, own)
                exp_avg[span].copy_(wide)


def _fused(
    masters: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    step: torch.Tensor,
    rates: UpdateScalars,
) -> None:
    torch._fused_adamw_(
        list(masters),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [step] * len(masters),
        amsgrad=False,
        lr=rates.lr,
        beta1=rates.beta1,
        beta2=rates.beta2,
        weight_decay=rates.weight_decay,
        eps=rates.epsilon,
        maximize=False,
    )
