"""Norms of gradients that do not depend on how the gradients are cut, and stay exact for tensors of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 1024  # elements per partial norm on a CPU


@torch.no_grad()
def tensor_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of each tensor, fp64 [number of tensors].

    Squares are added in fp64: in fp32 the norm would depend on how the same gradients are cut. On a CPU, the norms of
    blocks are combined, because torch would add square after square, with a growing error.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, dtype=torch.float64))
    return torch.stack([torch.linalg.vector_norm(_block_norms(tensor)) for tensor in tensors])


@torch.no_grad()
def squares_into(tensors: Sequence[torch.Tensor], squares: torch.Tensor) -> None:
    """Write the squared L2 norm of each tensor to `squares`, fp64 [number of tensors]. Allocates nothing on a GPU."""
    if not tensors:
        return
    if squares.device.type == "cpu":
        squares.copy_(tensor_norms(tensors))
    else:
        for tensor, square in zip(tensors, squares, strict=True):
            torch.linalg.vector_norm(tensor, dtype=torch.float64, out=square)
    squares.square_()


def _block_norms(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).view(1)
    if not whole:
        return rest
    return torch.cat([torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1, dtype=torch.float64), rest])
