"""Which device a process would get, asked without torch: a wrong one is told before seconds of imports."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from configs.schema import ConfigError

AMD_DRIVER = Path("/dev/kfd")  # torch for AMD calls its GPUs cuda


def refuse_missing(device: str, key: str) -> None:
    """Raise ConfigError, naming `key`, for "cuda" on a machine without a GPU. Where in doubt it says nothing: torch has
    the last word."""
    if device == "cuda" and not _may_have_gpu():
        raise ConfigError(no_gpu(key))


def no_gpu(key: str) -> str:
    """What to say of a device that is not there."""
    return f"{key} (cuda) needs a CUDA GPU, and there is none here. Try {key}{' ' if key.startswith('--') else '='}cpu."


@functools.cache
def _may_have_gpu() -> bool:
    """False where there is neither a driver of AMD's nor one of NVIDIA's that sees a GPU."""
    if AMD_DRIVER.exists():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return bool(driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0)
    except (OSError, AttributeError):
        return False


def card_name() -> str | None:
    """Name of this machine's first NVIDIA GPU, such as "NVIDIA H100 80GB HBM3"; None where there is none. No context is
    made on it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            if driver.cuDeviceGetName(name, len(name), device) == 0:
                return name.value.decode(errors="replace")
    except (OSError, AttributeError):
        pass
    return None
