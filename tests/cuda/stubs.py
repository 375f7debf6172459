"""The part of `torch.cuda` that the product and Megatron-core call, in front of the pretended device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.cuda import exchanges, streams
from tests.cuda.device import DeviceTensor, host_of, on_device, pin


def _with_pins(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return pin(tensor) if pin_memory else tensor

    return made


def _move_module(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    # torch swaps the storage of a parameter in place, which cannot turn one into a tensor of another class.
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, DeviceTensor):
                moved = torch.nn.Parameter(on_device(parameter.detach().clone()), requires_grad=parameter.requires_grad)
                vars(moved).update(vars(parameter))
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            part._buffers[name] = on_device(buffer)
    return module


def install() -> None:
    """Put all this in the place of `torch.cuda` for the rest of the process."""
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
        **{name: lambda device=None: 0 for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = cuda["get_rng_state"]
    torch.random.fork_rng = lambda devices=None, **kwargs: fork(devices=[], **kwargs)
    torch.Tensor.pin_memory = lambda tensor, device=None: pin(tensor.clone())
    torch.Tensor.record_stream = DeviceTensor.record_stream = lambda tensor, stream: streams.record(host_of(tensor))
    torch.empty, torch.zeros = _with_pins(torch.empty), _with_pins(torch.zeros)
    torch.nn.Module.to = _move_module
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the host and then moved
    exchanges.install()
