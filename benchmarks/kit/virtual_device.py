"""A virtual accelerator for whole models: matrix products and attention take the time of their operations at a given
rate and give zeros; all else is real.

Kernels of torch are replaced in this process (torch.library), so that everything else runs as fast as ever, forward and
backward, in whatever thread. Experts' kernels are benchmarks/kit/accelerator.py's. Routers choose evenly: each expert
gets as many tokens as the others, otherwise by chance. What comes out is meaningless as numbers.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.kit.accelerator import Clock, VirtualAccelerator
from moe.layer import layers_of
from moe.router import Router

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 2**25  # <malloc.h>; glibc takes no larger one
FORWARD, BACKWARD = 4.0, 10.0  # operations of attention for a pair of rows and a channel: two products, and five


class Device:
    """The clock of the process's products. One for all of them: a device does one thing after the
    other."""

    def __init__(self) -> None:
        self.clock = Clock(math.inf)
        self.num_products = 0

    def work(self, flops: float) -> None:
        """Return when a product would be finished."""
        self.num_products += 1
        self.clock.work(flops)


DEVICE = Device()


class _Experts(VirtualAccelerator):
    """Experts that take their time from the process's device."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.clock = DEVICE.clock


def _product(left: torch.Tensor, columns: torch.Tensor) -> None:
    DEVICE.work(2.0 * left.numel() * columns.size(-1))


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    _product(left, right)
    return left.new_zeros(left.size(0), right.size(1))


def _mm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    _product(left, right)
    return out.zero_()


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _mm(left, right)


def _addmm_out(
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    _product(left, right)
    return out if beta and out.data_ptr() == bias.data_ptr() else out.zero_()


def _addmm_in_place(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    _product(left, right)
    return bias


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    _product(left, right)
    return left.new_zeros(left.size(0), left.size(1), right.size(2))


def _bmm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    _product(left, right)
    return out.zero_()


def pairs(queries: int, keys: int, causal: bool) -> float:
    """Return the number of pairs of a query and a key that attend to each other."""
    if not causal:
        return float(queries * keys)
    both = min(queries, keys)
    return both * (both + 1) / 2 + (queries - both) * keys


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, heads, num_rows, width = query.shape
    DEVICE.work(FORWARD * samples * heads * width * pairs(num_rows, key.size(2), is_causal))
    # In the memory order that the real kernel gives: its callers transpose it.
    output = query.new_zeros(samples, num_rows, heads, width).transpose(1, 2)
    return output, query.new_zeros(samples, heads, num_rows, dtype=torch.float32)


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    samples, heads, num_rows, width = query.shape
    DEVICE.work(BACKWARD * samples * heads * width * pairs(num_rows, key.size(2), is_causal))
    return tuple(
        each.new_zeros(each.size(0), each.size(2), each.size(1), each.size(3)).transpose(1, 2)
        for each in (query, key, value)
    )


KERNELS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "mm.out": _mm_out,
    "addmm": _addmm,
    "addmm.out": _addmm_out,
    "addmm_": _addmm_in_place,
    "bmm": _bmm,
    "bmm.out": _bmm_out,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
_installed: list[Any] = []


def install(flops_per_second: float) -> None:
    """Make this process's products take a virtual accelerator's time. May be called again, for another rate."""
    DEVICE.clock.flops_per_second = flops_per_second
    if _installed:
        return
    torch.set_flush_denormal(True)
    # Memory that is freed stays with the process, as on a device: else each tensor's pages are new, and pointwise
    # operations take twice as long.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGEST)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901  (lives as long as the process)
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    gating = Router.gating

    def even(layer: Router, states: torch.Tensor) -> torch.Tensor:
        logits = gating(layer, states)  # zeros, and a bias
        tokens, experts = logits.numel() // logits.size(-1), logits.size(-1)
        return logits + even_choice(tokens, experts).to(logits.dtype).view_as(logits)

    Router.gating = even  # type: ignore[method-assign, assignment]
    _installed.append(library)


def use_for_experts(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the experts of all MoE layers take the device's time, too."""
    for layer in layers_of(list(chunks)).values():
        before, layer.expert_compute = layer.expert_compute, _Experts()
        layer.expert_compute.link, layer.expert_compute.streamed = before.link, before.streamed


@functools.cache
def even_choice(tokens: int, experts: int) -> torch.Tensor:
    """Return logits [tokens, experts] by which each expert is chosen as often as the others, whatever top-k is: each
    block of as many tokens as there are experts is a Latin square of a permutation of its own."""
    generator = torch.Generator().manual_seed(tokens)
    shifts = torch.arange(experts)
    order = (shifts[:, None] + shifts[None, :]) % experts
    blocks = [order[:, torch.randperm(experts, generator=generator)] for _ in range(-(-tokens // experts))]
    return torch.cat(blocks)[:tokens].float() / experts
