"""Rotary position embedding (Su et al., arXiv:2104.09864): queries, keys and values out of one product, turned on the
way.

Megatron-core's own is some twenty operations on a GPU for each layer; here each direction is one function of its
inputs, which a GPU runs as one kernel. The order of roundings is Megatron's.

Shapes: s sequence, b batch, g key/value heads of this rank, r query heads for each of them, n = g * r, d channels of a
head, of which the first ones turn.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from models.pointwise.out import product_into
from parallel.fused import fused


@functools.lru_cache(maxsize=8)
def tables(angles: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines, and sines with a minus in the first half, `[s, 1, 1, 1, rotating channels]`, of angles `[s, 1, 1,
    rotating channels]`, both times a factor; Megatron-core keeps the angles too."""
    sin = (torch.sin(angles) * factor).to(dtype)
    first, second = sin.chunk(2, dim=-1)
    return (torch.cos(angles) * factor).to(dtype).unsqueeze(2), torch.cat([-first, second], dim=-1).unsqueeze(2)


def _turn_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Write x `[s, b, g, r, d]` turned to `out`."""
    turning = cos.size(-1)
    half = turning // 2
    part, turned = x[..., :turning], out[..., :turning]
    crossed = torch.empty_like(turned)
    product_into(crossed[..., :half], part[..., half:], sin[..., :half])
    product_into(crossed[..., half:], part[..., :half], sin[..., half:])
    product_into(turned, part, cos)
    turned.add_(crossed)
    if turning < x.size(-1):
        out[..., turning:].copy_(x[..., turning:])


def _heads(x: torch.Tensor) -> torch.Tensor:
    """Room for x `[s, b, g, r, d]`. On a CPU each head lies alone, as its attention reads it: rows of all heads and
    samples are a power of two apart, in a few sets of the cache."""
    if x.device.type != "cpu":
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    s, b, g, r, d = x.shape
    return x.new_empty(b, g, r, s, d).permute(3, 0, 1, 2, 4)


@fused
def _split_forward(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = mixed.split([mixed.size(3) - 2, 1, 1], dim=3)
    results = _heads(query), _heads(key), _heads(value)
    _turn_into(results[0], query, cos, sin)
    _turn_into(results[1], key, cos, sin)
    results[2].copy_(value)
    return results


@fused
def _split_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    s, b, g, r, d = query.shape
    mixed = query.new_empty(s, b, g, r + 2, d)
    _turn_into(mixed[:, :, :, :r], query, cos, -sin)
    _turn_into(mixed[:, :, :, r : r + 1], key, cos, -sin)
    mixed[:, :, :, r + 1 :].copy_(value)
    return mixed


@fused
def _turned_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    _turn_into(result, x, cos, -sin)
    return result


@fused
def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    result = _heads(x)
    _turn_into(result, x, cos, sin)
    return result


class _SplitAndRotate(torch.autograd.Function):
    """Keeps tables alone."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _split_forward(mixed, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        return _split_backward(*grads, *ctx.saved_tensors), None, None


class _Rotate(torch.autograd.Function):
    """Keeps tables alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned_back(grad, cos, sin), None, None


def split_and_rotate(
    mixed: torch.Tensor, num_groups: int, head_dim: int, cos_sin: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Megatron's product for all of attention `[s, b, g * (r + 2) * d]`, r queries, key and value of each group after
    another, -> query `[s, b, n, d]`, turned, key `[s, b, g, d]`, turned, and value `[s, b, g, d]`."""
    s, b, _ = mixed.shape
    query, key, value = _SplitAndRotate.apply(mixed.view(s, b, num_groups, -1, head_dim), *cos_sin)
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads `[s, b, n, d]`, turned by `tables`."""
    return _Rotate.apply(x.unsqueeze(3), cos, sin).flatten(2, 3)
