"""Imports Megatron-core without packages that training does not use, which take half of a rank's start.

Megatron-core's decorators compile functions when they are defined, which imports PyTorch's compiler; here each is
compiled at its first call. Its timers and its inference engine import TensorBoard and wandb. It imports
TransformerEngine if that is installed, and fails if the import fails; so the import is tried first.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NOT_USED = ("wandb", "torch.utils.tensorboard")


@functools.cache
def transformer_engine_fault() -> str | None:
    """Return why TransformerEngine cannot be used in this process, and block its import; None if it can be used."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer-engine is not installed"
    if not torch.cuda.is_available():
        fault = "torch sees no CUDA GPU"
    else:
        try:
            importlib.import_module("transformer_engine.pytorch")
            return None
        except Exception as error:  # of any type, as missing libraries raise several types
            reason = str(error).strip().splitlines() or [""]
            fault = f"its import failed ({type(error).__name__}: {reason[0]})"
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    return fault


@contextmanager
def spared() -> Iterator[None]:
    """Within this context, `torch.compile` waits for the first call, and packages in NOT_USED cannot be newly imported.

    Objects that exist at the end are excluded from garbage collection.
    """
    collects = gc.isenabled()
    gc.disable()
    transformer_engine_fault()
    compile_now, hidden = torch.compile, [name for name in NOT_USED if name not in sys.modules]
    torch.compile = compiled_when_called  # type: ignore[assignment]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes imports fail as if it were not installed
    try:
        yield
    finally:
        torch.compile = compile_now
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()


def compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Act like `torch.compile`, as a call or a decorator with options, but compile only at the first call."""
    if function is None:
        return functools.partial(compiled_when_called, **options)
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = torch.compile(function, **options)
        return compiled(*args, **kwargs)

    return call
