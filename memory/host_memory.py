"""Free memory of this host, and free space of its disks. Does not import torch, so that planning a run is quick."""

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
# By cgroup version: the files with limit and use, and the fields of memory.stat for droppable and mapped bytes.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "file_mapped"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_mapped_file"),
}

BLOCK = 4096  # bytes; a disk is read and written in whole blocks


def padded(size: int, block: int = BLOCK) -> int:
    """Round a size up to a multiple of `block`: by default, bytes to whole blocks of a disk."""
    return -(-size // block) * block


def available() -> int:
    """Return the bytes that this process and its children can still allocate: free memory and swap, within cgroups."""
    limited = left_by_cgroups()
    return free() if limited is None else min(free(), limited)


def free() -> int:
    """Return the free bytes of this host's memory and swap."""
    return psutil.virtual_memory().available + psutil.swap_memory().free


def left_of_addresses() -> int | None:
    """Return the bytes of address space that `ulimit -v` still allows this process, or None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def left_by_cgroups() -> int | None:
    """Return the bytes that the cgroups of this process still allow, or None if no cgroup has a limit."""
    return min(_left_by_cgroups(), default=None)


def free_bytes(folder: str) -> int:
    """Return the bytes that an unprivileged user can still write to the disk of a folder."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def instead_of(key: str, folder: str) -> str:
    """Return advice for a config key whose folder does not exist: a command that creates it, or another folder."""
    own = Path(folder).absolute()
    there = next(path for path in (own, *own.parents) if os.path.exists(path))
    above = there if there.is_dir() else there.parent
    try:
        tempfile.TemporaryDirectory(dir=above).cleanup()  # permissions do not tell: no folder can be created in /proc
    except OSError:
        return "another folder"
    return f"mkdir -p {shlex.quote(folder)}" if there == above else f"{key}={above}"


def _left_by_cgroups() -> Iterator[int]:
    """Yield the bytes that each cgroup limit leaves this process (docs.kernel.org/admin-guide/cgroup-v2.html)."""
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
        # In a container the path may be that of the host, of which only the root is visible.
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
            # Mapped pages of programs and libraries count as used: without them every step would wait for the disk.
            yield int(limit) - use + max(0, reclaimable - mapped)
    except (OSError, ValueError):
        return  # this cgroup has no limit
