"""The part of `torch.cuda` that the product and Megatron-core call, in front of the pretended device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.profiler

from parallel import fused
from tests.cuda.pretended import collectives, memory, streams
from tests.cuda.pretended.device import Device, DeviceTensor, host_of, on_device, pin
from tests.cuda.pretended.observed import OBSERVED, call_site


def with_pins(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, which can mark what it makes as page-locked."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return _pinned(tensor) if pin_memory else tensor

    return made


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    OBSERVED.pinned[call_site()] += 1
    return pin(tensor)


_to = torch.nn.Module.to


def _move_module(module: torch.nn.Module, *target: Any, **options: Any) -> torch.nn.Module:
    if target and str(target[0]).startswith("cpu"):  # a run on the host beside the device
        return _to(module, *target, **options)
    # torch swaps the storage of a parameter in place, which cannot turn one into a tensor of another class.
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and not isinstance(parameter, DeviceTensor):
                moved = torch.nn.Parameter(on_device(parameter.detach().clone()), requires_grad=parameter.requires_grad)
                vars(moved).update(vars(parameter))
                submodule._parameters[name] = moved
        for name, buffer in submodule._buffers.items():
            submodule._buffers[name] = on_device(buffer)
    return module


class _Kernels(torch.autograd.Function):
    """A function that torch takes apart on the CPU, and that CUDA has kernels for: one, and `backward_kernels`."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], backward_kernels: int, *tensors: Any) -> torch.Tensor:
        ctx.function, ctx.backward_kernels = function, backward_kernels
        ctx.save_for_backward(*tensors)
        with OBSERVED.kernels(1):
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        with OBSERVED.kernels(ctx.backward_kernels), torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.function(*tensors), wanted, grad))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in tensors)


_rms_norm, _attention = torch.nn.functional.rms_norm, torch.nn.functional.scaled_dot_product_attention


def _rms_norm_of_cuda(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _Kernels.apply(lambda x, weight: _rms_norm(x, shape, weight, eps), 2, x, weight)


def _attention_of_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, **options: Any
) -> torch.Tensor:
    if dropout_p:  # drawn twice it would be another one
        return _attention(query, key, value, dropout_p=dropout_p, **options)
    return _Kernels.apply(lambda *given: _attention(*given, **options), 3, query, key, value)


def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with OBSERVED.kernels(1):
            return function(*args)

    return call


class _Profile(torch.profiler.profile):
    """Without the device's own side, which a torch without CUDA cannot record."""

    def __init__(self, *, activities: Any = None, **kwargs: Any) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)


def _on_threads() -> None:
    """Threads that start from now on make their tensors on the device too: torch's modes are of one thread."""
    run = threading.Thread.run

    @functools.wraps(run)
    def on_device(thread: threading.Thread) -> None:
        with Device():
            run(thread)

    threading.Thread.run = on_device  # type: ignore[assignment, method-assign]


def _inference_mode(mode: Any = True) -> Any:
    """No gradients: a tensor of the device that was made in torch's own inference mode could not be told from its
    views."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def _record_stream(tensor: torch.Tensor, stream: streams.Stream) -> None:
    streams.record(host_of(tensor), stream)


def install_cuda() -> None:
    """Put a `torch.cuda` that sees one card in the place of torch's, for the rest of the process."""
    properties = SimpleNamespace(total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132, name="pretended")
    fork = torch.random.fork_rng
    cuda: dict[str, Any] = {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.on_stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "synchronize": streams.synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "default_generators": (torch.default_generator,),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (properties.total_memory - memory.Bytes.now, properties.total_memory),
        "memory_allocated": lambda device=None: memory.Bytes.now,
        "memory_reserved": lambda device=None: memory.Bytes.now,
        "max_memory_allocated": lambda device=None: memory.Bytes.peak,
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.cuda.nccl.version = lambda: (2, 28, 0)
    torch.cuda.random.get_rng_state = cuda["get_rng_state"]
    torch.random.fork_rng = lambda devices=None, **kwargs: fork(devices=[], **kwargs)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the host and then moved


def install() -> None:
    """Put all this in the place of `torch.cuda` and of what works on the device, for the rest of the process."""
    install_cuda()
    torch.Tensor.pin_memory = lambda tensor, device=None: _pinned(tensor.clone())
    torch.Tensor.record_stream = DeviceTensor.record_stream = _record_stream
    torch.empty, torch.zeros = with_pins(torch.empty), with_pins(torch.zeros)
    torch.nn.Module.to = _move_module
    torch.inference_mode = _inference_mode
    torch.nn.functional.rms_norm, torch.nn.functional.scaled_dot_product_attention = (
        _rms_norm_of_cuda,
        _attention_of_cuda,
    )
    fused.compile_for_gpu = _one_kernel
    torch.profiler.profile = _Profile
    collectives.install()
    _on_threads()
