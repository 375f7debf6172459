"""The free memory of this host, and the free space of its disks. Without torch, as a run's plan needs them, too."""

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
# Names by cgroup version: limit, use, and the fields for the bytes in use that the kernel can drop and that are mapped.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "file_mapped"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_mapped_file"),
}

BLOCK = 4096  # bytes; a disk is read and written in whole blocks


def padded(num_bytes: int) -> int:
    """Round bytes up to whole blocks of a disk."""
    return -(-num_bytes // BLOCK) * BLOCK


def available() -> int:
    """Return the bytes that this process and its children can still take: free on the host, with swap, and within its
    cgroups."""
    limited = left_by_cgroups()
    return free() if limited is None else min(free(), limited)


def free() -> int:
    """Return the free bytes of the host, with swap."""
    return psutil.virtual_memory().available + psutil.swap_memory().free


def left_of_addresses() -> int | None:
    """Return the bytes that this process may still take under its own limit (`ulimit -v`); None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def left_by_cgroups() -> int | None:
    """Return the bytes that the cgroups of this process leave; None where none has a limit."""
    return min(_left_by_cgroups(), default=None)


def free_bytes(folder: str) -> int:
    """Return the free bytes of a folder's disk for a user."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def instead_of(key: str, folder: str) -> str:
    """Return advice where a key's folder does not exist: create it if possible, otherwise use another one."""
    own = Path(folder).absolute()
    there = next(path for path in (own, *own.parents) if os.path.exists(path))
    above = there if there.is_dir() else there.parent
    try:
        tempfile.TemporaryDirectory(
            dir=above
        ).cleanup()  # permissions are not enough: no folder can be created in /proc
    except OSError:
        return "another one"
    return f"mkdir -p {shlex.quote(folder)}" if there == above else f"{key}={above}"


def _left_by_cgroups() -> Iterator[int]:
    """Yield the bytes that each limit on this process leaves (https://docs.kernel.org/admin-guide/cgroup-v2.html)."""
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
        # In a container the path may be the host's, of which only the root is visible.
        for group in [folder, *folder.parents]:
            yield from _left(group, *FILES[version])
            if group == root:
                break


def _left(folder: Path, limit_name: str, use_name: str, reclaimable_name: str, mapped_name: str) -> Iterator[int]:
    try:
        limit, use = (folder / limit_name).read_text().strip(), int((folder / use_name).read_text())
        entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if limit != "max":
            reclaimable, mapped = (int(entries.get(name, 0)) for name in (reclaimable_name, mapped_name))
            # Mapped pages of programs and libraries are kept: without them every step would wait for the disk.
            yield int(limit) - use + max(0, reclaimable - mapped)
    except (OSError, ValueError):
        return  # no limit here
