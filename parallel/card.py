"""CUDA and torch settings of this process's GPU, and a check whether there is a GPU. No setting changes a number.

Does not import torch: some settings must be made before CUDA starts, and a missing GPU is reported before slow imports.
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
# torch 2.11 to 2.13 read both names, and call the first one deprecated.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Pinned allocations above 64 MiB get the requested size instead of the next power of two: a checkpoint's snapshot of
# 17 GiB would take 32 GiB. Older releases of torch do not have the setting.
EXACT, EXACT_SINCE = "pinned_max_round_threshold_mb:64", (2, 13)

AMD_DRIVER = Path("/dev/kfd")  # torch for AMD calls its GPUs cuda

_sms_left = 0  # multiprocessors that matmuls leave free during collectives


def set_environment(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables that CUDA reads at its start, unless the user has. Call it before CUDA starts."""
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
    """Set how many multiprocessors the GPU's matmuls leave free for NCCL while exchanges are in flight."""
    global _sms_left
    _sms_left = sms


@contextmanager
def exchanges_under_way() -> Iterator[None]:
    """Within this context, persistent matmul kernels leave multiprocessors free for NCCL's kernels.

    A grouped matmul occupies all multiprocessors until it ends, so a collective that starts later would have to wait,
    whatever its stream's priority is. torch calls this setting experimental, and warns once.
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
    """Describe the GPU settings of this process in one line, for the log at the start of a run."""
    parallel, sms = config.parallel, derived.exchange_sms(config)
    allocator = next((environment[name] for name in ALLOCATOR if name in environment), "settings are torch's defaults")
    return "; ".join(
        (
            f"collectives have {'high' if parallel.priority_exchanges else 'no'} priority",
            f"matmuls leave {sms} multiprocessors to them",
            f"communicators are created {'at the start' if parallel.early_communicators else 'at their first use'}",
            f"{CONNECTIONS} {environment.get(CONNECTIONS, 'unset')}",
            f"allocator {allocator}",
        )
    )


def refuse_missing(device: str, key: str) -> None:
    """Raise ConfigError if `device` is "cuda" and this machine certainly has no GPU.

    key: config key or option to name in the message. In doubt nothing is raised, and torch reports the problem later.
    """
    if device == "cuda" and not _may_have_gpu():
        option = f"{key}{' ' if key.startswith('--') else '='}cpu"
        raise ConfigError(f"{key} (cuda) needs a CUDA GPU, but this machine has none. Try {option}.")


@functools.cache
def _may_have_gpu() -> bool:
    """Whether this machine has an AMD driver, or an NVIDIA driver that finds a GPU."""
    if AMD_DRIVER.exists():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return bool(driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0)
    except (OSError, AttributeError):
        return False


def card_name() -> str | None:
    """Return the name of the first NVIDIA GPU, such as "NVIDIA H100 80GB HBM3", or None. Creates no CUDA context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            if driver.cuDeviceGetName(name, len(name), device) == 0:
                return name.value.decode(errors="replace")
    except (OSError, AttributeError):
        pass
    return None
