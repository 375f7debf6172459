"""The norms of gradients, whatever their size and however they are cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def tensor_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each tensor, in fp64.

    Squares are added up in fp64: in fp32 the same gradients would have another norm where they are cut otherwise.
    """
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float64))
