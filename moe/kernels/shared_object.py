"""The compiled library: load it once, query its capabilities, and call its functions."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from moe.kernels.compiler import SOURCE, cache_folder, compile_library, flags_for

ACTIVATIONS = {"swiglu": 0, "gelu": 1, "gelu_tanh": 2}
SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}
ALIGNMENT = 32  # the block functions take sizes that are multiples of it

_LOGGER = logging.getLogger(__name__)


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """Return the compiled library, loaded once. If it cannot be compiled or loaded, log a warning and return None."""
    try:
        flags = flags_for(torch.backends.cpu.get_cpu_capability())
        return ctypes.CDLL(str(compile_library(SOURCE, cache_folder(), flags)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the home folder is unknown
        reason = getattr(error, "stderr", None) or error
        first_line = str(reason).strip().splitlines()[0]
        _LOGGER.warning(
            "the CPU kernels for experts cannot be compiled or loaded, so torch's slower operations run instead: %s",
            first_line,
        )
        return None


def has(tensor: torch.Tensor) -> bool:
    """Return whether the compiled elementwise functions accept tensors of this device, dtype and layout."""
    return tensor.device.type == "cpu" and tensor.dtype in SUFFIXES and tensor.is_contiguous() and loaded() is not None


@functools.cache
def can_multiply_tiles() -> bool:
    """Return whether the processor can multiply bf16 matrices in tiles, and the system allows it for this process."""
    library = loaded()
    return library is not None and bool(library.mixtrain_has_tiles())


@functools.cache
def gemm() -> int:
    """Return the address of torch's own fp32 matmul (sgemm); 0 if torch does not export it."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def has_tiles(tensor: torch.Tensor, hidden_size: int, width: int) -> bool:
    """Return whether compiled block functions compute experts of this size in bf16 tiles for tensors like `tensor`."""
    fits = tensor.device.type == "cpu" and tensor.dtype is torch.bfloat16 and tensor.is_contiguous()
    return fits and hidden_size % ALIGNMENT == 0 and width % ALIGNMENT == 0 and can_multiply_tiles()


def has_blocks(tensor: torch.Tensor, hidden_size: int, width: int) -> bool:
    """Return whether the compiled block functions compute experts of this size for tensors like `tensor`."""
    if tensor.dtype is torch.float32:
        return has(tensor) and gemm() != 0
    return has_tiles(tensor, hidden_size, width)


def call(name: str, *arguments: torch.Tensor | int | None) -> int:
    """Call a function of the library. Pass tensors as addresses, None as 0, and the number of threads at the end."""
    numbers = [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument or 0 for argument in arguments]
    return int(_function(name, len(numbers) + 1)(*numbers, torch.get_num_threads()))


@functools.cache
def _function(name: str, num_arguments: int) -> Callable[..., int]:
    library = loaded()
    assert library is not None
    function: Any = getattr(library, f"mixtrain_{name}")
    function.argtypes, function.restype = [ctypes.c_int64] * num_arguments, ctypes.c_int64
    return cast(Callable[..., int], function)
