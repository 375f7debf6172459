"""Attention kernels for slices (a run of query rows with a run of key rows): torch's kernel on CPU, flash attention and
the memory-efficient kernel on CUDA. Each returns the output and the log-sum-exp of each query row's scores (`sums`);
the backward pass takes both, merged over the slices of a row.

Shapes: m slices of equal shape, n query heads, g key/value heads, q query and k key rows of a slice, d channels; t rows
of a launch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from models.attention.mask_slices import SHORT, SHORT_BACKWARD

aten = torch.ops.aten
FLASH_WIDTH = 256  # most channels of a head in flash attention
ALIGNED = 8  # CUDA kernels take multiples of this number of channels
# The memory-efficient kernel pads its sums of exponentials to a multiple of this number of query rows.
SUMS_ALIGNED = 32
HALF = (torch.bfloat16, torch.float16)

Found = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]  # output, sums, and what the backward pass needs
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class KernelDemandError(RuntimeError):
    """Raised for inputs that a CUDA attention kernel would reject, but that FakeTensor and a fake CUDA device
    accept."""


def takes_launches(query: torch.Tensor, width: int) -> bool:
    """Return whether one kernel launch can compute attention slices of different lengths. `width`: channels of a value
    head."""
    width = max(query.size(-1), width)
    return query.is_cuda and query.dtype in HALF and _aligned(width) <= FLASH_WIDTH


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, flash: bool) -> None:
    """Raise KernelDemandError if the CUDA attention kernel cannot take these inputs (dtypes, head sizes, strides)."""
    heads, widths = -2 if flash else 1, {tensor.size(-1) for tensor in (query, key, value)}
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    wrong = [
        text
        for is_wrong, text in (
            (len(dtypes) > 1, f"query, key and value of one dtype, not {dtypes}"),
            (flash and not dtypes <= set(HALF), f"bf16 or fp16, not {dtypes}"),
            (flash and len(widths) > 1, f"values with as many channels as keys, not {widths}"),
            (flash and max(widths) > FLASH_WIDTH, f"at most {FLASH_WIDTH} channels per head, not {max(widths)}"),
            (any(width % ALIGNED for width in widths), f"channels per head in multiples of {ALIGNED}, not {widths}"),
            (any(tensor.stride(-1) != 1 for tensor in (query, key, value)), "contiguous channels"),
            (query.size(heads) % key.size(heads) != 0, "a number of query heads that the number of key heads divides"),
            (not flash and query.size(1) != key.size(1), "as many key heads as query heads"),
        )
        if is_wrong
    ]
    if wrong:
        raise KernelDemandError(f"the CUDA attention kernel cannot take these inputs. It needs {'; '.join(wrong)}.")


# -- slices of equal shape ---------------------------------------------------------------------------------------------


def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float) -> Found:
    """Compute attention for slices of equal shape, with query `[m, n, q, d]`, key `[m, g, k, d]` and value
    `[m, g, k, dv]`. Returns output `[m, n, q, dv]`, fp32 log-sum-exp `[m, n, q]`, and tensors for the backward pass."""
    return (_efficient if query.is_cuda else _on_cpu)(query, key, value, causal, scale)


def backward(grad: torch.Tensor, inputs: Triple, result: Found, causal: bool, scale: float) -> Triple:
    """Return the gradients of query, key and value for slices of equal shape. `result`: what the forward pass returned;
    its output and log-sum-exp may be merged over several slices of a row."""
    return (_efficient_backward if grad.is_cuda else _on_cpu_backward)(grad, inputs, result, causal, scale)


def _on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float) -> Found:
    dtype, width = query.dtype, value.size(-1)
    query, key, value = (_for_cpu(tensor, query, value, SHORT) for tensor in (query, key, value))
    output, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return output[..., :width].to(dtype), sums, ()


def _on_cpu_backward(grad: torch.Tensor, inputs: Triple, result: Found, causal: bool, scale: float) -> Triple:
    query, _, value = inputs
    given = [_for_cpu(tensor, query, value, SHORT_BACKWARD) for tensor in (grad, *inputs, result[0])]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, result[1], 0.0, causal, scale=scale)
    return tuple(each[..., : tensor.size(-1)].to(tensor.dtype) for each, tensor in zip(grads, inputs))  # type: ignore[return-value]


def _for_cpu(tensor: torch.Tensor, query: torch.Tensor, value: torch.Tensor, short: int) -> torch.Tensor:
    """Convert a tensor for torch's CPU kernel: pad its channels to the wider of key and value heads, and convert it to
    fp32 if slices are in half precision and have fewer than `short` query rows."""
    if query.dtype in HALF and query.size(-2) < short:
        tensor = tensor.float()
    missing = max(query.size(-1), value.size(-1)) - tensor.size(-1)
    return F.pad(tensor, (0, missing)) if missing else tensor


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float) -> Found:
    length, width = query.size(2), value.size(-1)
    query, key, value = _for_cuda(query), _repeated(_for_cuda(key), query), _repeated(_for_cuda(value), query)
    check(query, key, value, flash=False)
    given = query, key, value, None, True, 0.0, causal
    output, sums, *seeds = aten._scaled_dot_product_efficient_attention(*given, scale=scale)
    return output[..., :width], sums[..., :length], tuple(seeds)


def _efficient_backward(grad: torch.Tensor, inputs: Triple, result: Found, causal: bool, scale: float) -> Triple:
    query, key, value = inputs
    groups = key.size(1)
    inputs = _for_cuda(query), _repeated(_for_cuda(key), query), _repeated(_for_cuda(value), query)
    check(*inputs, flash=False)
    # Padding rows get an infinite sum, and so weights of zero.
    sums = F.pad(result[1], (0, -query.size(2) % SUMS_ALIGNED), value=float("inf")).contiguous()
    given = [_for_cuda(grad), *inputs, None, _for_cuda(result[0]), sums, *result[2]]
    wanted = (True, True, True, False)
    grads = aten._scaled_dot_product_efficient_attention_backward(*given, 0.0, wanted, causal, scale=scale)
    of_query, of_key, of_value = (each[..., : tensor.size(-1)] for each, tensor in zip(grads, (query, key, value)))
    if groups < query.size(1):
        of_key, of_value = (each.unflatten(1, (groups, -1)).sum(2) for each in (of_key, of_value))
    return of_query, of_key, of_value


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values `[m, g, k, d]` for all query heads of their group: `[m, n, k, d]`."""
    times = query.size(1) // tensor.size(1)
    return tensor.repeat_interleave(times, dim=1) if times > 1 else tensor


# -- slices of any lengths ---------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Lengths of the attention slices in one kernel launch. `queries`, `keys`: cumulative numbers of rows, int32
    `[slices + 1]` on the device. `longest_query`, `longest_key`: most rows of a slice."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int


def launch_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, causal: bool, scale: float
) -> Found:
    """Compute flash attention for consecutive slices of any lengths, with query `[t, n, d]`, key `[t, g, d]` and value
    `[t, g, dv]`. Returns output `[t, n, dv]`, fp32 log-sum-exp `[n, t]`, and tensors for the backward pass."""
    width = value.size(-1)
    inputs = _equally_wide(query, key, value)
    check(*inputs, flash=True)
    output, sums, *seeds, _ = aten._flash_attention_forward(*inputs, *lengths, 0.0, causal, False, scale=scale)
    return output[..., :width], sums, tuple(seeds)


def launch_backward(
    grad: torch.Tensor, inputs: Triple, result: Found, lengths: Lengths, causal: bool, scale: float
) -> Triple:
    """Return the gradients of query, key and value for flash attention over consecutive slices. `result`: what the
    forward pass returned; its output and log-sum-exp may be merged over several slices of a row."""
    query, key, value = _equally_wide(*inputs)
    check(query, key, value, flash=True)
    output, grad, _ = _equally_wide(result[0], grad, query)
    given = grad.contiguous(), query, key, value, output.contiguous(), result[1].contiguous(), *lengths
    grads = aten._flash_attention_backward(*given, 0.0, causal, *result[2], scale=scale)
    return tuple(each[..., : tensor.size(-1)] for each, tensor in zip(grads, inputs))  # type: ignore[return-value]


def _equally_wide(*tensors: torch.Tensor) -> Triple:
    width = _aligned(max(tensor.size(-1) for tensor in tensors))
    return tuple(_padded(each, width) for each in tensors)  # type: ignore[return-value]


def _for_cuda(tensor: torch.Tensor) -> torch.Tensor:
    return _padded(tensor, _aligned(tensor.size(-1)))


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Pad a tensor with zeros to `width` channels, and make the channels of each row contiguous."""
    missing = width - tensor.size(-1)
    tensor = F.pad(tensor, (0, missing)) if missing else tensor
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def _aligned(width: int) -> int:
    return -(-width // ALIGNED) * ALIGNED
