"""The compiled kernels of `kernels.cpp`: built once with the machine's C++ compiler, kept in the user's cache, called by address.

Where there is no compiler, or the source does not compile, torch's operations do the same work in more passes over memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import library as operations
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from moe.workspace import WORKSPACE

_Function = TypeVar("_Function", bound=Callable[..., None])

SOURCE = Path(__file__).with_suffix(".cpp")
# No -ffast-math: NaN and infinities must come through, and additions keep their order. OpenMP's functions are those that torch has loaded.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp", "-w")
COMPILE_SECONDS = 120.0
ACTIVATIONS = {"swiglu": 0, "gelu": 1, "gelu_tanh": 2}
SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}
MAX_COLUMNS = 1024  # of a top-k choice
BLOCK_NUMBERS = 4  # that say what a block is
ALIGNMENT = 32  # the block functions take sizes that are multiples of it

_LOGGER = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where the compiled kernels are kept; safe to delete."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixtrain"


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def build(folder: Path) -> Path:
    """The compiled library in `folder`, made if it is not there. Raises OSError or subprocess.SubprocessError if it can't be."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (c++, g++ or clang++) on the PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True).stdout
    key = hashlib.sha256("\n".join((SOURCE.read_text(), version, _processor(), *FLAGS)).encode()).hexdigest()[:16]
    library = folder / f"kernels-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            half, whole = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
            for command in ([*FLAGS, "-c", str(SOURCE), "-o", str(half)], ["-shared", str(half), "-o", str(whole)]):
                subprocess.run([compiler, *command], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
            whole.replace(library)  # ranks that build at the same time make the same file
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(build(cache_folder())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody knows the home folder
        reason = getattr(error, "stderr", None) or error
        _LOGGER.warning("no compiled kernels for experts on the host, torch's operations are used: %s", str(reason).strip().splitlines()[0])
        return None


def has(tensor: torch.Tensor) -> bool:
    """Whether the elementwise functions take tensors like this one."""
    return tensor.device.type == "cpu" and tensor.dtype in SUFFIXES and tensor.is_contiguous() and _library() is not None


@functools.cache
def _has_tiles() -> bool:
    library = _library()
    return library is not None and bool(library.mixtrain_has_tiles())


@functools.cache
def _gemm() -> int:
    """The address of the product that torch uses for fp32; 0 if it hides it."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def has_tiles(tensor: torch.Tensor, hidden_size: int, width: int) -> bool:
    """Whether the block functions compute by tiles for tensors like this one, with experts of this size."""
    aligned = hidden_size % ALIGNMENT == 0 and width % ALIGNMENT == 0
    return tensor.device.type == "cpu" and tensor.dtype is torch.bfloat16 and aligned and tensor.is_contiguous() and _has_tiles()


def has_blocks(tensor: torch.Tensor, hidden_size: int, width: int) -> bool:
    """Whether the block functions take tensors like this one, with experts of this size."""
    if tensor.dtype is torch.float32:
        return has(tensor) and _gemm() != 0
    return has_tiles(tensor, hidden_size, width)


def _call(name: str, *arguments: torch.Tensor | int | None) -> int:
    """Call a function with addresses and 64 bit integers; its last argument is the number of threads."""
    numbers = [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument or 0 for argument in arguments]
    return int(_function(name, len(numbers) + 1)(*numbers, torch.get_num_threads()))


@functools.cache
def _function(name: str, num_arguments: int) -> Callable[..., int]:
    library = _library()
    assert library is not None
    function: Any = getattr(library, f"mixtrain_{name}")
    function.argtypes, function.restype = [ctypes.c_int64] * num_arguments, ctypes.c_int64
    return cast(Callable[..., int], function)


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise
# ---------------------------------------------------------------------------------------------------------------------


def activate(activation: str, hidden: torch.Tensor, out: torch.Tensor) -> None:
    """See blocks.activate."""
    _call(f"activate_{SUFFIXES[out.dtype]}", ACTIVATIONS[activation], hidden, *out.shape, out)


def activate_backward(
    activation: str, hidden: torch.Tensor, grad: torch.Tensor, pair_weights: torch.Tensor, out: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    """See blocks.activate_backward; `grad` is left as it is."""
    weight_grad, name = torch.empty(len(grad)), f"activate_backward_{SUFFIXES[out.dtype]}"
    _call(name, ACTIVATIONS[activation], hidden, grad, pair_weights.float(), *grad.shape, out, activated, weight_grad)
    return weight_grad


def add_up(
    source: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """See route.add_up."""
    weights = None if weights is None else weights.float()
    _call(f"add_up_{SUFFIXES[source.dtype]}", source, source.size(1), index, starts, len(starts), len(index), weights, out)
    return out


def has_products() -> bool:
    """Whether `multiply` works here. The block functions take it in fp32 where the processor is not one that torch's BLAS is made for."""
    library = _library()
    return library is not None and bool(library.mixtrain_has_products())


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """`out` [m, n] (+)= `left` [m, k] times `right` [k, n] in fp32; one of the factors may be a transposed view."""
    orders = [int(not factor.is_contiguous()) for factor in (left, right)]
    _call("multiply_float", *orders, *out.shape, left.size(1), left, right, out, int(add))


def takes_top_k(scores: torch.Tensor, k: int) -> bool:
    """Whether `top_k` is for this."""
    return scores.dtype is torch.float32 and k <= scores.size(1) <= MAX_COLUMNS and has(scores)


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The columns [rows, k] of each row's greatest numbers, as torch.topk gives them; of equal ones the first."""
    indices = torch.empty(len(scores), k, dtype=torch.int64)
    _call("top_k", scores, *scores.shape, k, indices)
    return indices


# ---------------------------------------------------------------------------------------------------------------------
# Blocks: operations that torch knows, so that its counter of operations sees them
# ---------------------------------------------------------------------------------------------------------------------

# `blocks`: expert, first pair, the last one's next, and whether its gradients are added to what is there, of each block; `tile`:
# rows are computed in multiples of it.
_LIBRARY = operations.Library("mixtrain", "DEF")
_MATRICES = "Tensor fc1, Tensor? fc1_bias, Tensor fc2, Tensor? fc2_bias, str activation"


def _operation(arguments: str) -> Callable[[_Function], _Function]:
    """Make a function an operation of torch's with these arguments, which it calls by position."""

    def define(function: _Function) -> _Function:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(f"{name}({arguments}) -> ()")
        _LIBRARY.impl(name, function, "CPU")
        return function

    return define


def _call_for(
    blocks: list[int], name: str, source: torch.Tensor, *arguments: torch.Tensor | int | None, kind: tuple[int, ...] = ()
) -> None:
    array = (ctypes.c_int64 * len(blocks))(*blocks)
    which = *kind, ctypes.addressof(array), len(blocks) // BLOCK_NUMBERS, _gemm()
    _call(f"{name}_{SUFFIXES[source.dtype]}", *which, source, *arguments)


@_operation(f"int[] blocks, int tile, Tensor source, Tensor rows, {_MATRICES}, Tensor(a!)? hidden, Tensor(b!) output, Tensor(c!) scratch")
def _forward_blocks(
    blocks: list[int],
    tile: int,
    source: torch.Tensor,
    rows: torch.Tensor,
    fc1: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2: torch.Tensor,
    fc2_bias: torch.Tensor | None,
    activation: str,
    *outputs: torch.Tensor | None,
) -> None:
    sizes = source.size(1), fc2.size(2)
    matrices = fc1, fc1_bias, fc2, fc2_bias
    _call_for(blocks, "forward_blocks", source, rows, *sizes, *matrices, *outputs, kind=(ACTIVATIONS[activation],))


@_operation(
    f"int[] blocks, int tile, Tensor source, Tensor rows, Tensor output_grad, Tensor output_rows, Tensor pair_weights, {_MATRICES}, "
    "Tensor? hidden, Tensor(a!)? hidden_grad, Tensor(b!)? activated, Tensor(c!) weight_grad, Tensor(d!) input_grad, "
    "Tensor(e!)? fc1_grad, Tensor(f!)? fc2_grad, Tensor(g!) scratch"
)
def _backward_blocks(
    blocks: list[int],
    tile: int,
    source: torch.Tensor,
    rows: torch.Tensor,
    output_grad: torch.Tensor,
    output_rows: torch.Tensor,
    pair_weights: torch.Tensor,
    fc1: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2: torch.Tensor,
    fc2_bias: torch.Tensor | None,
    activation: str,
    *tensors: torch.Tensor | None,
) -> None:
    inputs = source, rows, output_grad, output_rows, pair_weights.float(), source.size(1), fc2.size(2)
    _call_for(blocks, "backward_blocks", *inputs, fc1, fc1_bias, fc2, fc2_bias, *tensors, kind=(ACTIVATIONS[activation],))


@_operation(
    "int[] blocks, int tile, Tensor source, Tensor rows, Tensor output_grad, Tensor output_rows, Tensor hidden_grad, Tensor activated, "
    "Tensor(a!) fc1_grad, Tensor(b!) fc2_grad, Tensor(c!) scratch"
)
def _weights_blocks(
    blocks: list[int],
    tile: int,
    source: torch.Tensor,
    rows: torch.Tensor,
    output_grad: torch.Tensor,
    output_rows: torch.Tensor,
    hidden_grad: torch.Tensor,
    activated: torch.Tensor,
    *outputs: torch.Tensor,
) -> None:
    sizes = source.size(1), activated.size(1), hidden_grad.size(1)
    _call_for(blocks, "weights_blocks", source, rows, output_grad, output_rows, hidden_grad, activated, *sizes, *outputs)


@_operation("Tensor x, Tensor weight, Tensor(a!) logits, Tensor(b!) scratch")
def _gate(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, scratch: torch.Tensor) -> None:
    _call("gate", x, *x.shape, weight, logits.size(1), logits, scratch)


forward_blocks = torch.ops.mixtrain.forward_blocks
backward_blocks = torch.ops.mixtrain.backward_blocks
weights_blocks = torch.ops.mixtrain.weights_blocks


def gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Products [T, E] in fp32 of tokens [T, H] and a router's weight [E, H], both in bf16; where `has_tiles` is true."""
    num_experts = len(weight)
    logits = torch.empty(len(x), num_experts)
    scratch = WORKSPACE.take((_call("gate_scratch_bytes", *x.shape, num_experts),), x, torch.uint8)
    torch.ops.mixtrain.gate(x, F.pad(weight, (0, 0, 0, -num_experts % ALIGNMENT)), logits, scratch)
    WORKSPACE.give(scratch)
    return logits


def _computed(blocks: Sequence[int], tile: int) -> int:
    """Rows, each block's a multiple of `tile`."""
    return sum(-(-(end - start) // tile) * tile for start, end in zip(blocks[1::BLOCK_NUMBERS], blocks[2::BLOCK_NUMBERS], strict=True))


@register_flop_formula(torch.ops.mixtrain.gate)
def _gate_flops(x: Sequence[int], weight: Sequence[int], logits: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * logits[1]


@register_flop_formula(forward_blocks)
def _forward_flops(
    blocks: Sequence[int],
    tile: int,
    source: Sequence[int],
    rows: Sequence[int],
    fc1: Sequence[int],
    fc1_bias: object,
    fc2: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    return 2 * _computed(blocks, tile) * (math.prod(fc1[1:]) + math.prod(fc2[1:]))


@register_flop_formula(backward_blocks)
def _backward_flops(*shapes: Any, out_shape: object = None) -> int:
    blocks, tile, _, _, _, _, _, fc1, _, fc2, _, _, hidden, _, _, _, _, fc1_grad, *_ = shapes
    again, weights = int(hidden is None), int(fc1_grad is not None)
    return 2 * _computed(blocks, tile) * (math.prod(fc1[1:]) * (1 + again + weights) + math.prod(fc2[1:]) * (1 + weights))


@register_flop_formula(weights_blocks)
def _weights_flops(
    blocks: Sequence[int],
    tile: int,
    source: Sequence[int],
    rows: Sequence[int],
    output_grad: Sequence[int],
    output_rows: Sequence[int],
    hidden_grad: Sequence[int],
    activated: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    return 2 * _computed(blocks, tile) * source[1] * (hidden_grad[1] + activated[1])


# Scratch memory of computation by tiles.


def forward_bytes(longest: int, hidden_size: int, width: int, hidden_columns: int) -> int:
    """Scratch memory of `forward_blocks` for blocks of up to `longest` rows."""
    return _call("scratch_bytes", 0, longest, hidden_size, width, hidden_columns, 0, 0)


def backward_bytes(longest: int, hidden_size: int, width: int, hidden_columns: int, recompute: bool, weights: bool) -> int:
    """That of `backward_blocks`; `recompute`: it gets no hidden activation; `weights`: it computes the weights' gradients too."""
    return _call("scratch_bytes", 1, longest, hidden_size, width, hidden_columns, int(recompute), int(weights))


def weights_bytes(longest: int, hidden_size: int, width: int, hidden_columns: int) -> int:
    """That of `weights_blocks`."""
    return _call("weights_scratch_bytes", longest, hidden_size, width, hidden_columns)


def main() -> int:
    """Compile the kernels ahead of the first training."""
    if _library() is not None:
        print(f"kernels: compiled for this CPU, in {cache_folder()}{', bfloat16 products too' if _has_tiles() else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
