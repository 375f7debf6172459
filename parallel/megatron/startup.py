"""Importing Megatron-core without what it would load there and a training does not use: half of a rank's start.

Its decorators compile functions as they are defined, which imports PyTorch's compiler, though most are never called;
here each is compiled when it is first called. Its timers and its inference engine import wandb, which Mixtrain's own
tracker does itself when a run asks for it, and TensorBoard. It imports TransformerEngine where that is installed, and
fails with it where its import fails: so that is tried first.
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
    """Why TransformerEngine cannot be used in this process; None where it can. Then nobody can import it any more."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer-engine is not installed"
    if not torch.cuda.is_available():
        fault = "torch sees no CUDA GPU"
    else:
        try:
            importlib.import_module("transformer_engine.pytorch")
            return None
        except Exception as error:  # of whatever kind: a library that is missing raises several
            reason = str(error).strip().splitlines() or [""]
            fault = f"its import failed ({type(error).__name__}: {reason[0]})"
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    return fault


@contextmanager
def spared() -> Iterator[None]:
    """While this lasts, `torch.compile` waits for the first call, and what is NOT_USED is not to be had unless it is
    loaded already. What has been imported is never looked through for garbage, nor taken apart at the end."""
    collects = gc.isenabled()
    gc.disable()
    transformer_engine_fault()
    compile_now, hidden = torch.compile, [name for name in NOT_USED if name not in sys.modules]
    torch.compile = compiled_when_called  # type: ignore[assignment]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes an import fail as if it were not installed
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
    """`torch.compile`, called or as a decorator with options, but for the import of the compiler, which waits for the
    first call."""
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
