"""Check the limits that a shell or a batch system sets for a process (`ulimit`) before a rank exceeds them, because
torch and NCCL would end the process without naming the limit."""

from __future__ import annotations

import resource

from base.errors import ConfigError

# Measured with torch 2.13 on CPUs: 90 descriptors alone, 114 for each of 2 ranks and 133 of 4; gloo opens a socket for
# each pair of ranks of each group. NCCL's rings and trees have few neighbours, however many ranks there are.
DESCRIPTORS, OF_A_PEER, MOST_ON_GPUS = 128, 24, 1024
ADDRESSES = 3 * 2**30  # bytes for torch's libraries and the stacks of its threads; 2.3 GiB were measured


def check(world_size: int, may_be_gpu: bool) -> None:
    """Raise ConfigError if the limit on open files or on address space is too low for one rank of a job of `world_size`
    ranks. Raises the soft limit on open files if that is necessary and the hard limit allows it."""
    needed = DESCRIPTORS + OF_A_PEER * (world_size - 1)
    needed = min(needed, MOST_ON_GPUS) if may_be_gpu else needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"the limit on open files (ulimit -n, {hard}) must be at least {needed} for a rank of a job with "
                f"{world_size} rank{'s' if world_size > 1 else ''}. Try ulimit -n {max(4096, needed)} before the "
                "start, or set a higher limit in the batch system or container."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    check_addresses(0)


def check_addresses(model_bytes: float) -> None:
    """Raise ConfigError if the limit on address space is too low for torch and `model_bytes` bytes of host tensors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = ADDRESSES + model_bytes
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"the limit on address space (ulimit -v, {soft // 1024} KiB) must be at least {-(-int(needed) // 1024)} "
            "KiB for a rank, because torch and its threads reserve more memory addresses than they use. Try "
            "ulimit -v unlimited before the start."
        )
