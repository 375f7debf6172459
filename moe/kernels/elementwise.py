"""The elementwise functions of the compiled library, for tensors that `shared_object.has` takes."""

from __future__ import annotations

import torch

from moe.kernels.shared_object import ACTIVATIONS, SUFFIXES, call, has

MAX_COLUMNS = 1024  # of a top-k choice


def activate(activation: str, preactivation: torch.Tensor, out: torch.Tensor) -> None:
    """`out` [n, F] = the activation of `preactivation` [n, G]; G = 2 F for SwiGLU ([gate | up]) else F."""
    call(f"activate_{SUFFIXES[out.dtype]}", ACTIVATIONS[activation], preactivation, *out.shape, out)


def activate_backward(
    activation: str,
    preactivation: torch.Tensor,
    grad: torch.Tensor,
    probs: torch.Tensor,
    out: torch.Tensor,
    activated: torch.Tensor,
) -> torch.Tensor:
    """Undo `activate` and the assignment's weight after it; `grad` [n, F] is the gradient after the weight, and stays
    as it is.

    Fills `out` [n, G] with the gradient of `preactivation` and `activated` [n, F] with the activation times the weight.
    Returns the weights' gradient [n] in fp32.
    """
    probs_grad, name = torch.empty(len(grad)), f"activate_backward_{SUFFIXES[out.dtype]}"
    call(name, ACTIVATIONS[activation], preactivation, grad, probs.float(), *grad.shape, out, activated, probs_grad)
    return probs_grad


def add_up(
    source: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Sums [outputs, H] into `out`: of rows of `source`, each times its weight, in the order of `index`; of none
    zero."""
    weights = None if weights is None else weights.float()
    call(
        f"add_up_{SUFFIXES[source.dtype]}", source, source.size(1), index, starts, len(starts), len(index), weights, out
    )
    return out


def takes_top_k(scores: torch.Tensor, k: int) -> bool:
    """Whether `top_k` is for this."""
    return scores.dtype is torch.float32 and k <= scores.size(1) <= MAX_COLUMNS and has(scores)


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The columns [rows, k] of each row's greatest numbers, as torch.topk gives them; of equal ones the first."""
    indices = torch.empty(len(scores), k, dtype=torch.int64)
    call("top_k", scores, *scores.shape, k, indices)
    return indices
