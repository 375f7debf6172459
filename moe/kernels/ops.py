"""The functions of the compiled library, for tensors that `shared_object.has` accepts.

Functions with matmuls are registered as torch operators, so that torch's FLOP counter sees them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import library as operations
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from memory.pool import WORKSPACE
from moe.kernels.shared_object import ACTIVATIONS, ALIGNMENT, SUFFIXES, call, gemm, has

BLOCK_NUMBERS = 4  # integers that describe a block
MAX_COLUMNS = 1024  # most columns of a top-k choice

_Function = TypeVar("_Function", bound=Callable[..., None])

# Elementwise functions


def activate(activation: str, preactivation: torch.Tensor, out: torch.Tensor) -> None:
    """Apply an activation function to `preactivation` [n, G], and write the result to `out` [n, F].

    G = 2 F for SwiGLU ([gate | up]), else F.
    """
    call(f"activate_{SUFFIXES[out.dtype]}", ACTIVATIONS[activation], preactivation, *out.shape, out)


def activate_backward(
    activation: str,
    preactivation: torch.Tensor,
    grad: torch.Tensor,
    probs: torch.Tensor,
    out: torch.Tensor,
    activated: torch.Tensor,
) -> torch.Tensor:
    """Compute the backward pass of an activation whose output is multiplied by each assignment's probability.

    `grad` [n, F] is the gradient of the product, and is not changed. Fills `out` [n, G] with the gradient of
    `preactivation` and `activated` [n, F] with the product. Returns the gradient of `probs` [n] in fp32.
    """
    probs_grad, name = torch.empty(len(grad)), f"activate_backward_{SUFFIXES[out.dtype]}"
    call(name, ACTIVATIONS[activation], preactivation, grad, probs.float(), *grad.shape, out, activated, probs_grad)
    return probs_grad


def add_up(
    source: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Write weighted sums of rows of `source` to `out` [outputs, H]. Sum i adds rows `index[starts[i]:starts[i+1]]`.

    The rows are added in the order of `index`; a sum of no rows is zero.
    """
    weights = None if weights is None else weights.float()
    call(
        f"add_up_{SUFFIXES[source.dtype]}", source, source.size(1), index, starts, len(starts), len(index), weights, out
    )
    return out


def takes_top_k(scores: torch.Tensor, k: int) -> bool:
    """Return whether the compiled `top_k` accepts these scores."""
    return scores.dtype is torch.float32 and k <= scores.size(1) <= MAX_COLUMNS and has(scores)


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the columns of each row's `k` greatest numbers in descending order, int64 [rows, k].

    Among equal numbers, the first column comes first.
    """
    indices = torch.empty(len(scores), k, dtype=torch.int64)
    call("top_k", scores, *scores.shape, k, indices)
    return indices


# `blocks`: for each block its expert, the range [start, end) of its assignments, and whether its gradients are added to
# earlier ones; `tile`: rows are computed in multiples of it.
_LIBRARY = operations.Library("mixtrain", "DEF")
_MATRICES = "Tensor fc1, Tensor? fc1_bias, Tensor fc2, Tensor? fc2_bias, str activation"


def _operation(arguments: str) -> Callable[[_Function], _Function]:
    """Return a decorator that registers a function as a torch operator; `arguments` are those of its schema."""

    def define(function: _Function) -> _Function:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(f"{name}({arguments}) -> ()")
        _LIBRARY.impl(name, function, "CPU")
        return function

    return define


def _call_for(
    blocks: list[int],
    name: str,
    source: torch.Tensor,
    *arguments: torch.Tensor | int | None,
    kind: tuple[int, ...] = (),
) -> None:
    array = (ctypes.c_int64 * len(blocks))(*blocks)
    which = *kind, ctypes.addressof(array), len(blocks) // BLOCK_NUMBERS, gemm()
    call(f"{name}_{SUFFIXES[source.dtype]}", *which, source, *arguments)


@_operation(
    f"int[] blocks, int tile, Tensor source, Tensor rows, {_MATRICES}, Tensor(a!)? preactivation, Tensor(b!) output, "
    "Tensor(c!) scratch"
)
def _forward_blocks(
    blocks: list[int],
    tile: int,
    source: torch.Tensor,
    token_rows: torch.Tensor,
    fc1: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2: torch.Tensor,
    fc2_bias: torch.Tensor | None,
    activation: str,
    *outputs: torch.Tensor | None,
) -> None:
    sizes = source.size(1), fc2.size(2)
    matrices = fc1, fc1_bias, fc2, fc2_bias
    _call_for(
        blocks, "forward_blocks", source, token_rows, *sizes, *matrices, *outputs, kind=(ACTIVATIONS[activation],)
    )


@_operation(
    "int[] blocks, int tile, Tensor source, Tensor rows, Tensor output_grad, Tensor output_rows, Tensor probs, "
    f"{_MATRICES}, Tensor? preactivation, Tensor(a!)? preactivation_grad, Tensor(b!)? activated, "
    "Tensor(c!) probs_grad, Tensor(d!) input_grad, Tensor(e!)? fc1_grad, Tensor(f!)? fc2_grad, Tensor(g!) scratch"
)
def _backward_blocks(
    blocks: list[int],
    tile: int,
    source: torch.Tensor,
    token_rows: torch.Tensor,
    output_grad: torch.Tensor,
    output_rows: torch.Tensor,
    probs: torch.Tensor,
    fc1: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2: torch.Tensor,
    fc2_bias: torch.Tensor | None,
    activation: str,
    *tensors: torch.Tensor | None,
) -> None:
    inputs = source, token_rows, output_grad, output_rows, probs.float(), source.size(1), fc2.size(2)
    _call_for(
        blocks, "backward_blocks", *inputs, fc1, fc1_bias, fc2, fc2_bias, *tensors, kind=(ACTIVATIONS[activation],)
    )


@_operation(
    "int[] blocks, int tile, Tensor source, Tensor rows, Tensor output_grad, Tensor output_rows, "
    "Tensor preactivation_grad, Tensor activated, Tensor(a!) fc1_grad, Tensor(b!) fc2_grad, Tensor(c!) scratch"
)
def _weights_blocks(
    blocks: list[int],
    tile: int,
    source: torch.Tensor,
    token_rows: torch.Tensor,
    output_grad: torch.Tensor,
    output_rows: torch.Tensor,
    preactivation_grad: torch.Tensor,
    activated: torch.Tensor,
    *outputs: torch.Tensor,
) -> None:
    sizes = source.size(1), activated.size(1), preactivation_grad.size(1)
    _call_for(
        blocks,
        "weights_blocks",
        source,
        token_rows,
        output_grad,
        output_rows,
        preactivation_grad,
        activated,
        *sizes,
        *outputs,
    )


@_operation("Tensor x, Tensor weight, Tensor(a!) logits, Tensor(b!) scratch")
def _gate(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, scratch: torch.Tensor) -> None:
    call("gate", x, *x.shape, weight, logits.size(1), logits, scratch)


forward_blocks = torch.ops.mixtrain.forward_blocks
backward_blocks = torch.ops.mixtrain.backward_blocks
weights_blocks = torch.ops.mixtrain.weights_blocks


def gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the router's fp32 logits [T, E] of the tokens `x` [T, H], with its weight [E, H]; both are in bf16.

    The kernels must compute in tiles: `has_tiles` must be true.
    """
    num_experts = len(weight)
    logits = torch.empty(len(x), num_experts)
    scratch = WORKSPACE.take((call("gate_scratch_bytes", *x.shape, num_experts),), x, torch.uint8)
    torch.ops.mixtrain.gate(x, F.pad(weight, (0, 0, 0, -num_experts % ALIGNMENT)), logits, scratch)
    WORKSPACE.give(scratch)
    return logits


def _computed(blocks: Sequence[int], tile: int) -> int:
    """Return the number of rows that the kernels compute, with each block padded to a multiple of `tile`."""
    return sum(
        -(-(end - start) // tile) * tile
        for start, end in zip(blocks[1::BLOCK_NUMBERS], blocks[2::BLOCK_NUMBERS], strict=True)
    )


@register_flop_formula(torch.ops.mixtrain.gate)
def _gate_flops(x: Sequence[int], weight: Sequence[int], logits: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * logits[1]


@register_flop_formula(forward_blocks)
def _forward_flops(
    blocks: Sequence[int],
    tile: int,
    source: Sequence[int],
    token_rows: Sequence[int],
    fc1: Sequence[int],
    fc1_bias: object,
    fc2: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    return 2 * _computed(blocks, tile) * (math.prod(fc1[1:]) + math.prod(fc2[1:]))


@register_flop_formula(backward_blocks)
def _backward_flops(*shapes: Any, out_shape: object = None) -> int:
    blocks, tile, _, _, _, _, _, fc1, _, fc2, _, _, preactivation, _, _, _, _, fc1_grad, *_ = shapes
    again, weights = int(preactivation is None), int(fc1_grad is not None)
    return (
        2 * _computed(blocks, tile) * (math.prod(fc1[1:]) * (1 + again + weights) + math.prod(fc2[1:]) * (1 + weights))
    )


@register_flop_formula(weights_blocks)
def _weights_flops(
    blocks: Sequence[int],
    tile: int,
    source: Sequence[int],
    token_rows: Sequence[int],
    output_grad: Sequence[int],
    output_rows: Sequence[int],
    preactivation_grad: Sequence[int],
    activated: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    return 2 * _computed(blocks, tile) * source[1] * (preactivation_grad[1] + activated[1])


# Scratch memory for computation in tiles


def forward_bytes(longest: int, hidden_size: int, width: int, hidden_columns: int) -> int:
    """Return the bytes of scratch memory that `forward_blocks` needs for blocks of at most `longest` rows."""
    return call("scratch_bytes", 0, longest, hidden_size, width, hidden_columns, 0, 0)


def backward_bytes(
    longest: int, hidden_size: int, width: int, hidden_columns: int, recompute: bool, weights: bool
) -> int:
    """Return the bytes of scratch memory that `backward_blocks` needs for blocks of at most `longest` rows.

    `recompute`: the preactivation is recomputed. `weights`: weight gradients are computed, too.
    """
    return call("scratch_bytes", 1, longest, hidden_size, width, hidden_columns, int(recompute), int(weights))


def weights_bytes(longest: int, hidden_size: int, width: int, hidden_columns: int) -> int:
    """Return the bytes of scratch memory that `weights_blocks` needs for blocks of at most `longest` rows."""
    return call("weights_scratch_bytes", longest, hidden_size, width, hidden_columns)
