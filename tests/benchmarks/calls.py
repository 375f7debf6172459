"""What tests have ranks of a cluster do."""

from __future__ import annotations

import os
import subprocess
import time

import torch
import torch.distributed as dist

_kept: list[int] = []


def where(argument: str) -> tuple[int, str, str]:
    """This rank, its argument back, and the name of its network namespace."""
    return dist.get_rank(), argument, os.readlink("/proc/self/ns/net")


def keep_and_add(number: int) -> int:
    """The sum of all ranks' numbers so far, over the network."""
    _kept.append(number * (dist.get_rank() + 1))
    total = torch.tensor(sum(_kept))
    dist.all_reduce(total)
    return int(total)


def start_child() -> int:
    """A process that leaves the rank's session, so that nothing but its environment ties it to the cluster."""
    return subprocess.Popen(["sleep", "300"], start_new_session=True).pid


def fail_on(rank: int) -> None:
    """One rank raises, the others wait for it."""
    if dist.get_rank() == rank:
        raise KeyError("no such thing")
    dist.barrier()


def end_on(rank: int) -> None:
    """One rank's process ends, the others wait for it."""
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def sleep_on(rank: int) -> None:
    """One rank does not come back."""
    if dist.get_rank() == rank:
        time.sleep(300)
