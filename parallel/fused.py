"""Pointwise functions that run as one kernel on a GPU, compiled at the first call. On a CPU they are unchanged."""

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
    """Compile a function for a GPU without specializing on tensor sizes, which differ from call to call."""
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
                message = f"torch.compile failed for {function.__name__}, which now runs as several kernels: {reason}"
                warnings.warn(message, stacklevel=2)
        return function(*args)

    return call


def fused(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function of tensors on one device, so that it runs as one kernel on a GPU.

    It must not change its arguments, and each element of a result may depend only on elements of the same row.
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
    """Write the elementwise product left * right into `out`, which may be a view of a larger tensor."""
    if torch.compiler.is_compiling():  # torch.compile rejects a view as `out`, but fuses the copy
        out.copy_(left * right)
    else:
        torch.mul(left, right, out=out)
