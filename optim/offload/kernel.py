"""AdamW on the tensors of a bucket, in place, with PyTorch's fused kernel, on the host or on the device.

It is the kernel of torch.optim.AdamW(fused=True), with the same bits, so the choice of the engine changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SCRATCH = 2**18  # elements of exp_avg that are converted to fp32 at a time if it is stored in bf16


@dataclass(frozen=True)
class UpdateScalars:
    """The AdamW hyperparameters of one parameter group in one step."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float


@dataclass(frozen=True)
class State:
    """A bucket's master weights (fp32) and moments as flat tensors per slice, on one device. Updates change them."""

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
    """Update a bucket in place.

    step: fp32 []. rates: hyperparameters per slice. scratch: fp32 [SCRATCH], used if exp_avg is bf16.
    """
    for own in dict.fromkeys(rates):
        chosen = [index for index, each in enumerate(rates) if each == own]
        tensors = [[each[i] for i in chosen] for each in (state.masters, grads, state.exp_avgs, state.exp_avg_sqs)]
        if tensors[2][0].dtype == torch.float32:
            _fused(tensors, step, own)
            continue
        for master, grad, exp_avg, exp_avg_sq in zip(*tensors, strict=True):
            for start in range(0, master.numel(), SCRATCH):
                span = slice(start, start + SCRATCH)
                wide = scratch[: exp_avg[span].numel()].copy_(exp_avg[span])
                _fused([[master[span]], [grad[span]], [wide], [exp_avg_sq[span]]], step, own)
                exp_avg[span].copy_(wide)


def _fused(tensors: list[list[torch.Tensor]], step: torch.Tensor, rates: UpdateScalars) -> None:
    torch._fused_adamw_(
        *tensors,  # masters, gradients, exp_avg, exp_avg_sq
        [],
        [step] * len(tensors[0]),
        amsgrad=False,
        lr=rates.lr,
        beta1=rates.beta1,
        beta2=rates.beta2,
        weight_decay=rates.weight_decay,
        eps=rates.epsilon,
        maximize=False,
    )
