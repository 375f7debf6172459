"""Pointwise functions that are one kernel on a GPU: compiled there at the first call, and unchanged elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compile_for_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for a GPU, without specializing on tensor sizes, which change with every call."""
    if importlib.util.find_spec("triton") is None:
        return function
    compiled = torch.compile(function, dynamic=True, fullgraph=True)
    broken = False

    def call(*args: Any) -> Any:
        nonlocal broken
        if not broken:
            try:
                return compiled(*args)
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                broken = True
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    f"{function.__name__} runs as several kernels: torch.compile failed ({reason})", stacklevel=2
                )
        return function(*args)

    return call


def fused(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function of tensors of one device to run as one kernel on a GPU.

    It must not change its arguments; each element of a result depends on the elements at the same index or in its row.
    """
    on_gpu: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        nonlocal on_gpu
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        if first.device.type != "cuda":
            return function(*args, **kwargs)
        if on_gpu is None:
            on_gpu = compile_for_gpu(function)
        return on_gpu(*args, **kwargs)

    return call


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left * right to `out`, which may be a view of a larger tensor."""
    if torch.compiler.is_compiling():  # torch.compile refuses such an `out`, and fuses the copy
        out.copy_(left * right)
    else:
        torch.mul(left, right, out=out)
