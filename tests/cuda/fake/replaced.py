"""What FakeTensorMode on a torch without CUDA needs replaced, each with its reason. The product stays as it is.

The device guard (guard.cpp of tests/cuda/pretended) is loaded before torch, and torch.cuda is that of its stubs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from tests.cuda.fake.live import LIVE
from tests.cuda.pretended import stubs
from tests.cuda.pretended.device import pin

aten = torch.ops.aten
# Operations with a kernel on CUDA. Where torch finds none it takes them apart before any mode sees them.
KERNELS = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
RANKS_PER_NODE = 8

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """For the rest of the process."""
    stubs.install_cuda()
    for name in KERNELS:
        _library.impl(name, _not_reached, "CUDA")
    torch.nn.functional.scaled_dot_product_attention = attention
    # Page-locked memory needs a driver.
    torch.Tensor.pin_memory = lambda tensor, device=None: pin(tensor.clone())
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.empty = stubs.with_pins(torch.empty)
    # torch swaps parameters in place, which FakeTensors refuse. Their dtype is the model's already.
    torch.nn.Module.to = _move_module
    torch.nn.Module.bfloat16 = torch.nn.Module.half = lambda module: module
    # The fake group's own name would lead past what is done for NCCL alone.
    dist.get_backend = dist.distributed_c10d.get_backend = lambda group=None: "nccl"
    dist.ProcessGroupNCCL = SimpleNamespace(Options=lambda **_: None)
    # Objects travel as numbers, and there are none.
    dist.all_gather_object = _all_gather_object
    from models import build
    from moe.alltoall import hierarchical
    from parallel import fused

    build.initialize_weights = lambda chunks, config: None  # minutes of drawing for nobody
    hierarchical.ranks_per_node = lambda group: RANKS_PER_NODE  # they would tell each other their hosts
    fused.compile_for_gpu = _one_kernel


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch chooses on CUDA (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): flash attention, or
    for fp32 and masks the memory-efficient one. Without CUDA it would choose none and make the scores."""
    if attn_mask is None and query.dtype is not torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    assert not enable_gqa, "the memory-efficient kernel has no grouped queries"
    if attn_mask is not None:  # a mask of bool becomes numbers that are added to the scores
        numbers = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = numbers.expand(*query.shape[:3], key.size(2))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


def _not_reached(*_: Any, **__: Any) -> Any:
    raise AssertionError("FakeTensorMode asks no kernel")


def _move_module(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                moved = torch.nn.Parameter(parameter.detach().to("cuda"), requires_grad=parameter.requires_grad)
                vars(moved).update(vars(parameter))
                submodule._parameters[name] = moved
        for name, buffer in submodule._buffers.items():
            submodule._buffers[name] = None if buffer is None else buffer.to("cuda")
    return module


def _all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
    """Everybody says the same."""
    objects[:] = [own] * len(objects)


def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with LIVE.kernel():
            result = function(*args)
        LIVE.see(result)
        return result

    return call
