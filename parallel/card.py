"""This process's GPU: settings of CUDA and torch, and whether there is a GPU at all.

No setting changes a number, and none has an effect on the CPU. The module imports no torch: some settings must be made
before CUDA starts, and a missing GPU is reported before seconds of imports.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from base.errors import ConfigError
from configs import derived
from configs.schema import Config

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# torch reads the second name too and calls the first one deprecated; torch 2.11 to 2.13 know both.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Pinned allocations of more MiB have the requested size, not the next power of two: a checkpoint's snapshot of 17 GiB
# would take 32. Older releases of torch do not know the setting.
EXACT, EXACT_SINCE = "pinned_max_round_threshold_mb:64", (2, 13)

AMD_DRIVER = Path("/dev/kfd")  # torch for AMD calls its GPUs cuda

_sms_left = 0  # multiprocessors that products leave free during exchanges


def set_environment(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the driver and torch read when CUDA starts, unless the user has set them.

    Call it before CUDA starts.
    """
    if config.training.device == "cpu":
        return
    connections = derived.device_connections(config)
    if connections is not None:
        environment.setdefault(CONNECTIONS, str(connections))
    settings = ["expandable_segments:True"] if config.training.expandable_segments else []
    if _torch_release() >= EXACT_SINCE:
        settings.append(EXACT)
    if settings and not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[-1]] = ",".join(settings)


def _torch_release() -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))


def leave_to_exchanges(sms: int) -> None:
    """Set the number of multiprocessors that products leave free inside `exchanges_under_way`."""
    global _sms_left
    _sms_left = sms


@contextmanager
def exchanges_under_way() -> Iterator[None]:
    """Inside, persistent products leave multiprocessors to NCCL's kernels.

    A grouped product has one block on each multiprocessor until it ends; a later exchange would wait that long, with
    any priority of its stream. torch calls this experimental, and warns once.
    """
    if _sms_left == 0:
        yield
        return
    import torch

    torch._C._set_sm_carveout_experimental(_sms_left)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


def describe(config: Config, environment: MutableMapping[str, str] = os.environ) -> str:
    """Describe the settings of this process, for a line at a run's start."""
    parallel, sms = config.parallel, derived.exchange_sms(config)
    allocator = next((environment[name] for name in ALLOCATOR if name in environment), "torch's own")
    return "; ".join(
        (
            f"exchanges {'go first' if parallel.priority_exchanges else 'have no priority'}",
            f"products leave them {sms} multiprocessors",
            f"communicators are set up {'at the start' if parallel.early_communicators else 'at their first use'}",
            f"{CONNECTIONS} {environment.get(CONNECTIONS, 'unset')}",
            f"allocator {allocator}",
        )
    )


def refuse_missing(device: str, key: str) -> None:
    """Raise ConfigError, naming `key`, for "cuda" on a machine without a GPU. In doubt it does not raise: torch
    decides."""
    if device == "cuda" and not _may_have_gpu():
        option = f"{key}{' ' if key.startswith('--') else '='}cpu"
        raise ConfigError(f"{key} (cuda) needs a CUDA GPU, and there is none here. Try {option}.")


@functools.cache
def _may_have_gpu() -> bool:
    """Whether there is an AMD driver, or an NVIDIA driver that sees a GPU."""
    if AMD_DRIVER.exists():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return bool(driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0)
    except (OSError, AttributeError):
        return False


def card_name() -> str | None:
    """Return the name of this machine's first NVIDIA GPU, such as "NVIDIA H100 80GB HBM3"; None without one.

    It makes no context on the GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            if driver.cuDeviceGetName(name, len(name), device) == 0:
                return name.value.decode(errors="replace")
    except (OSError, AttributeError):
        pass
    return None
