"""What attention's kernels of CUDA compute, by torch's kernel for the CPU: flash attention over slices of any lengths,
and the memory-efficient kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten
SUMS_ALIGNED = 32


def _slices(of_queries: torch.Tensor, of_keys: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows of queries and of keys of each slice."""
    ends = [each.tolist() for each in (of_queries, of_keys)]
    for begin, end, first, last in zip(ends[0], ends[0][1:], ends[1], ends[1][1:]):
        assert begin < end and first < last, "an empty slice"
        yield slice(begin, end), slice(first, last)


def _of_heads(tensor: torch.Tensor, query_rows: slice) -> torch.Tensor:
    return tensor[query_rows].transpose(0, 1).unsqueeze(0)


def _flash(*given: Any, scale: float) -> Any:
    query, key, value, of_queries, of_keys, longest_query, longest_key, dropout, causal, _ = given
    assert dropout == 0.0 and of_queries.dtype == of_keys.dtype == torch.int32
    output, sums = torch.empty_like(query), query.new_empty(query.size(1), len(query), dtype=torch.float32)
    for query_rows, keys in _slices(of_queries, of_keys):
        assert query_rows.stop - query_rows.start <= longest_query and keys.stop - keys.start <= longest_key
        inputs = _of_heads(query, query_rows), _of_heads(key, keys), _of_heads(value, keys)
        found, of_rows = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
        output[query_rows], sums[:, query_rows] = found[0].transpose(0, 1), of_rows[0]
    seeds = torch.empty(2, dtype=torch.int64), torch.empty((), dtype=torch.int64)
    return output, sums, *seeds, query.new_empty(0)


def _flash_backward(*given: Any, scale: float) -> Any:
    grad, query, key, value, output, sums, of_queries, of_keys, _, _, _, causal, *_ = given
    grads = [torch.empty_like(each) for each in (query, key, value)]
    for query_rows, keys in _slices(of_queries, of_keys):
        inputs = _of_heads(query, query_rows), _of_heads(key, keys), _of_heads(value, keys)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _of_heads(grad, query_rows),
            *inputs,
            _of_heads(output, query_rows),
            sums[None, :, query_rows],
            0.0,
            causal,
            scale=scale,
        )
        for each, where, grad_part in zip(grads, (query_rows, keys, keys), found):
            each[where] = grad_part[0].transpose(0, 1)
    return tuple(grads)


def _efficient(
    query: Any, key: Any, value: Any, bias: Any, with_sums: bool, dropout: float = 0.0, causal: bool = False, **of: Any
) -> Any:
    assert bias is None and with_sums and dropout == 0.0
    output, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, **of)
    sums = torch.nn.functional.pad(sums, (0, -query.size(2) % SUMS_ALIGNED), value=torch.inf)
    return output, sums, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)


def _efficient_backward(*given: Any, scale: float) -> Any:
    grad, query, key, value, _, output, sums, _, _, _, _, *rest = given
    causal = bool(rest and rest[0])  # false is not given
    length = query.size(2)
    if any(stride % SUMS_ALIGNED for stride in sums.stride()[:2]):  # as CUDA's kernel refuses them
        raise RuntimeError("LSE is not correctly aligned (strideH)")
    assert sums.size(2) % SUMS_ALIGNED == 0 and bool(sums[..., length:].isinf().all())
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, sums[..., :length], 0.0, causal, scale=scale
    )
    return *found, None


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._flash_attention_forward: _flash,
    aten._flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
