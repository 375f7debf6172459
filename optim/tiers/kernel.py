"""AdamW on the pieces of a bucket, in place, by PyTorch's fused kernel, on the host or on the device.

The kernel is the one that the optimizer on the device uses (torch.optim.AdamW, fused), on the same slices or on cuts
of them that leave its bits: so that where a bucket is updated changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SCRATCH = 2**18  # elements of exp_avg that are fp32 at once where it is kept in bf16


@dataclass(frozen=True)
class UpdateScalars:
    """The numbers of one parameter group in one step."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float


@dataclass(frozen=True)
class State:
    """A bucket's tensors piece by piece, flat, all on one device. `masters` are what the update changes, in fp32."""

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
    """One step, the `step`-th (fp32 []); `rates` are the pieces'. `scratch` (fp32 [SCRATCH]) is used where exp_avg is
    in bf16."""
    for own in dict.fromkeys(rates):
        chosen = [index for index, each in enumerate(rates) if each == own]
        part = State(*([tensors[i] for i in chosen] for tensors in (state.masters, state.exp_avgs, state.exp_avg_sqs)))
        _one_group(part, [grads[index] for index in chosen], step, own, scratch)


def _one_group(
    state: State, grads: Sequence[torch.Tensor], step: torch.Tensor, rates: UpdateScalars, scratch: torch.Tensor
) -> None:
    if state.exp_avgs[0].dtype == torch.float32:
        _fused(state.masters, grads, state.exp_avgs, state.exp_avg_sqs, step, rates)
        return
    for master, grad, exp_avg, exp_avg_sq in zip(state.masters, grads, state.exp_avgs, state.exp_avg_sqs, strict=True):
        for start in range(0, master.numel(), SCRATCH):
            part = slice(start, start + SCRATCH)
            wide = scratch[: exp_avg[part].numel()].copy_(exp_avg[part])
            _fused([master[part]], [grad[part]], [wide], [exp_avg_sq[part]], step, rates)
            exp_avg[part].copy_(wide)


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
