"""The norms of gradients, to fp32's precision whatever their size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 1024  # elements whose squares are added up in one go on a CPU


@torch.no_grad()
def tensor_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each tensor, in fp64.

    torch's norm on the CPU adds up squares one after the other: 1e-4 off at 4 million elements, so that the same
    gradients would have another norm in another layout. Norms of blocks, put together in fp64, are exact.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).to(torch.float64)
    return torch.stack([torch.linalg.vector_norm(_block_norms(tensor), dtype=torch.float64) for tensor in tensors])


def _block_norms(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1).float()
    whole = flat.numel() // BLOCK * BLOCK
    rest = torch.linalg.vector_norm(flat[whole:]).view(1)
    return torch.cat([torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1), rest]) if whole else rest
