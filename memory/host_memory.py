"""The memory that this host has for a run on its CPUs, and the room on its disks. Without torch: a run's plan asks
too."""

from __future__ import annotations

import os
import resource
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# What a cgroup's limit, use, and the parts of it that the kernel can drop and that are mapped are called, by version.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "file_mapped"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_mapped_file"),
}

BLOCK = 4096  # bytes that a disk is read and written in multiples of


def padded(num_bytes: int) -> int:
    """So many bytes, rounded up to whole blocks of a disk."""
    return -(-num_bytes // BLOCK) * BLOCK


def available() -> int:
    """Bytes that this process and its children can still take: what the host has free, with swap, and what its cgroups
    leave."""
    limited = left_by_cgroups()
    return free() if limited is None else min(free(), limited)


def free() -> int:
    """Bytes that the host has free, with swap."""
    return psutil.virtual_memory().available + psutil.swap_memory().free


def left_of_addresses() -> int | None:
    """Bytes that this process may still take under its own limit (`ulimit -v`); None where there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def left_by_cgroups() -> int | None:
    """Bytes that the control groups of this process leave; None where none limits it."""
    return min(_left_by_cgroups(), default=None)


def free_bytes(folder: str) -> int:
    """Bytes that a user may still take of a folder's disk."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def instead_of(key: str, folder: str) -> str:
    """What to try where a key's folder is not one: to make it where that can be done, else another."""
    own = Path(folder).absolute()
    there = next(path for path in (own, *own.parents) if os.path.exists(path))
    above = there if there.is_dir() else there.parent
    try:
        tempfile.TemporaryDirectory(dir=above).cleanup()  # permissions do not say it: nobody can make one in /proc
    except OSError:
        return "another one"
    return f"mkdir -p {shlex.quote(folder)}" if there == above else f"{key}={above}"


def _left_by_cgroups() -> Iterator[int]:
    """What each limit above this process leaves (https://docs.kernel.org/admin-guide/cgroup-v2.html)."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = (1, CGROUP_ROOT / "memory") if controllers else (2, CGROUP_ROOT)
        folder = root / path.lstrip("/")
        # In a container the path may be the host's, of which only the root is there to be seen.
        for place in [folder, *folder.parents]:
            yield from _left(place, *FILES[version])
            if place == root:
                break


def _left(folder: Path, limit_name: str, use_name: str, reclaimable_name: str, mapped_name: str) -> Iterator[int]:
    try:
        limit, use = (folder / limit_name).read_text().strip(), int((folder / use_name).read_text())
        entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if limit != "max":
            reclaimable, mapped = (int(entries.get(name, 0)) for name in (reclaimable_name, mapped_name))
            # Pages of programs and libraries: without them every step would wait for the disk.
            yield int(limit) - use + max(0, reclaimable - mapped)
    except (OSError, ValueError):
        return  # no limit here
