"""What a process that trains on a GPU tells CUDA and torch about the card. Imports no torch: part of it must be said
before CUDA starts.

None of it changes a number. On the CPU none of it has an effect.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from configs import derived
from configs.schema import Config

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# torch reads the second name too and calls the first one old; torch 2.11 to 2.13 know both.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Pinned memory of more MiB is as large as was asked for, not the next power of two: a checkpoint's snapshot of 17 GiB
# would take 32. Older releases of torch do not know it.
EXACT, EXACT_SINCE = "pinned_max_round_threshold_mb:64", (2, 13)

_sms_left = 0  # by products that run beside exchanges


def set_environment(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the driver and torch read when CUDA starts; what the user has set stays. Call it before CUDA starts."""
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
    """From now on products leave so many multiprocessors free while `exchanges_under_way` lasts."""
    global _sms_left
    _sms_left = sms


@contextmanager
def exchanges_under_way() -> Iterator[None]:
    """While this lasts, persistent products leave multiprocessors to NCCL's kernels.

    A grouped product has one block on each multiprocessor until it ends; an exchange that comes later would wait that
    long, whatever its stream's priority is. torch has this as an experiment, and says so once.
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


def in_words(config: Config, environment: MutableMapping[str, str] = os.environ) -> str:
    """What holds in this process, for the line of a run's start."""
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
