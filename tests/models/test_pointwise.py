"""Rotary embedding and SwiGLU against what they replace: the same bits, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core)

# isort: split
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from models.pointwise.rotary import rotate, split_and_rotate, tables
from models.pointwise.swiglu import swiglu

pytestmark = pytest.mark.fast

S, B, D = 6, 2, 8
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def angles(channels: int) -> torch.Tensor:
    half = torch.arange(S).float().outer(1.0 / 100.0 ** (torch.arange(channels // 2) / 4))
    return torch.cat([half, half], dim=-1)[:, None, None, :]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "ratio", "channels"), [(3, 1, D), (2, 3, D), (1, 4, 4)])
def test_split_and_rotated_as_megatron_does(dtype: torch.dtype, groups: int, ratio: int, channels: int) -> None:
    mixed, turning = random(S, B, groups * (ratio + 2) * D, dtype=dtype), angles(channels)
    query, key, value = mixed.view(S, B, groups, -1).split([ratio * D, D, D], dim=3)
    theirs = [
        _apply_rotary_pos_emb_bshd(query.reshape(S, B, -1, D), turning),
        _apply_rotary_pos_emb_bshd(key, turning),
        value,
    ]
    ours = split_and_rotate(mixed, groups, D, tables(turning, dtype))
    grads = [random(*each.shape, dtype=dtype).detach() for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(*(torch.autograd.grad(results, mixed, grads)[0] for results in (ours, theirs)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [D, 4])
def test_heads_are_rotated_as_megatron_does(dtype: torch.dtype, channels: int) -> None:
    heads, turning = random(S, B, 3, D, dtype=dtype), angles(channels)
    theirs, ours = _apply_rotary_pos_emb_bshd(heads, turning), rotate(heads, *tables(turning, dtype))
    grad = random(*ours.shape, dtype=dtype).detach()
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(result, heads, grad)[0] for result in (ours, theirs)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_that_of_its_parts(dtype: torch.dtype) -> None:
    preactivation = random(S, B, 2 * D, dtype=dtype)
    gate, up = preactivation.chunk(2, dim=-1)
    theirs, ours = F.silu(gate) * up, swiglu(preactivation)
    grad = random(*ours.shape, dtype=dtype).detach()
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(result, preactivation, grad)[0] for result in (ours, theirs)))


def test_gradients_are_those_of_finite_differences() -> None:
    mixed, turning = random(S, B, 2 * 4 * D, dtype=torch.float64), angles(4).double()
    assert torch.autograd.gradcheck(lambda x: split_and_rotate(x, 2, D, tables(turning, x.dtype)), mixed)
    assert torch.autograd.gradcheck(swiglu, random(3, 2, D, dtype=torch.float64))
