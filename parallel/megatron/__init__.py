"""All changes that Mixtrain makes to Megatron-core 0.16.1.

`fixes.py` fixes defects on every device, and `grad_buffers.py` avoids passes over gradients and weights. `cpu.py` makes
Megatron-core, whose code names CUDA, run on a CPU; it is not imported on a machine that trains on GPUs. `startup.py`
avoids most of what Megatron-core imports, so this package must be imported before any other module of Megatron-core.
`router.py`, `optimizer.py` and `ddp.py` use private names of Megatron-core; the last two handle parameters that its
buffers do not have (parallel/owned.py).
"""

from __future__ import annotations

import torch

from parallel.megatron import startup

with startup.spared():
    import megatron.core

EXPECTED_VERSION = "0.16.1"
_applied: str | None = None


def require_version() -> None:
    """Raise RuntimeError unless the Megatron-core version is the one that these patches were written for."""
    if megatron.core.__version__ != EXPECTED_VERSION:
        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} is installed, but the patches in parallel/megatron were "
            f"written for {EXPECTED_VERSION}. Run launch/setup.sh, or check each patch against the new version and "
            "raise EXPECTED_VERSION."
        )


def apply_patches(device_type: str | None = None) -> None:
    """Patch Megatron-core once per process, before any of its objects is created.

    `device_type` is "cuda" or "cpu"; None means CUDA if there is a GPU. Raises RuntimeError for a second device type.
    """
    global _applied
    if device_type is None:
        device_type = _applied or ("cuda" if torch.cuda.is_available() else "cpu")
    if _applied == device_type:
        return
    if _applied is not None:
        raise RuntimeError(
            f"Megatron-core is already patched for {_applied} in this process. Use another process for {device_type}."
        )
    require_version()
    from parallel.megatron import fixes, grad_buffers

    fixes.apply()
    grad_buffers.apply()
    if device_type == "cpu":
        from parallel.megatron import cpu

        cpu.apply()
    _applied = device_type
