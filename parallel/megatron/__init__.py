"""All changes that Mixtrain makes to Megatron-core 0.16.1.

`fixes.py` fixes defects on every device, `grad_buffers.py` saves passes over gradients and weights; `cpu.py` lets
Megatron-core, whose code names CUDA, run on the host. `cpu.py` is not imported on a machine that trains on GPUs.
`startup.py` avoids most of what Megatron-core loads when it is imported; for that this package must be imported before
any other module of Megatron-core. `router.py`, `optimizer.py` and `ddp.py` use its private names; the last two support
parameters that its buffers do not hold (parallel/owned.py).
"""

from __future__ import annotations

import torch

from parallel.megatron import startup

with startup.spared():
    import megatron.core

EXPECTED_VERSION = "0.16.1"
_applied: str | None = None


def require_version() -> None:
    """Raise RuntimeError for a Megatron-core version that this package was not written for."""
    if megatron.core.__version__ != EXPECTED_VERSION:
        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} is installed, but the patches in parallel/megatron were "
            f"written for {EXPECTED_VERSION}. Run launch/setup.sh, or check each patch against the new version and "
            "raise EXPECTED_VERSION."
        )


def apply_patches(device_type: str | None = None) -> None:
    """Patch Megatron-core once per process, before any of its objects is built.

    `device_type` is "cuda" or "cpu"; None takes CUDA when there is one. Raises RuntimeError for another Megatron-core
    version, or when a process asks for a second device type.
    """
    global _applied
    if device_type is None:
        device_type = _applied or ("cuda" if torch.cuda.is_available() else "cpu")
    if _applied == device_type:
        return
    if _applied is not None:
        raise RuntimeError(
            f"Megatron-core is already patched for {_applied}; one process trains on one device type, not also "
            f"{device_type}."
        )
    require_version()
    from parallel.megatron import fixes, grad_buffers

    fixes.apply()
    grad_buffers.apply()
    if device_type == "cpu":
        from parallel.megatron import cpu

        cpu.apply()
    _applied = device_type
