"""Controllers of control groups, version 1 or 2, and the disk of a path, or the reason why there are none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS, OWN_GROUPS = Path("/proc/self/mounts"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Controller:
    """The folder in which groups of a controller are made: `memory`, or `blkio`, which version 2 calls `io`."""

    version: int
    parent: Path


def find_controller(name: str, mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> Controller | str:
    """Return the controller `memory` or `blkio`; a line with the reason if there is none."""
    modern = {"blkio": "io"}.get(name, name)
    groups = dict(_own_groups(own))
    reason = f"no control groups have a {name} controller here"
    for line in mounts.read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        root = Path(where)
        if kind == "cgroup" and name in options.split(","):
            return Controller(1, _own_or_top(root, groups.get(name, "/")))
        if kind == "cgroup2" and modern in _words(root / "cgroup.controllers"):
            # Only a group whose children have the controller can hold ours; processes inside it would forbid that.
            group = _own_or_top(root, groups.get("", "/"))
            for parent in (group, *group.parents):
                if modern in _words(parent / "cgroup.subtree_control"):
                    return Controller(2, parent)
                if parent == root:
                    break
            reason = f"no control group above this process gives its {modern} controller to groups below it"
    return reason


def can_limit_memory() -> str | None:
    """Return None, or a line with the reason why a MemoryCgroup cannot be made here."""
    return _why_not("memory")


def can_limit_disk(path: Path) -> str | None:
    """Return None, or a line with the reason why a DiskCgroup cannot throttle reads of files under `path`."""
    reason = _why_not("blkio")
    if reason is None:
        try:
            disk_of(path)
        except ValueError as error:
            return str(error)
    return reason


def disk_of(path: Path) -> str:
    """Return `major:minor` of the whole disk of a path: a partition cannot be throttled. Raises ValueError for a path
    that is on no disk (tmpfs, overlayfs, a network)."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise ValueError(f"{path} is on no disk of this machine, so its reads cannot be throttled")
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    return (device / "dev").read_text().strip()


def _why_not(name: str) -> str | None:
    found = find_controller(name)
    if isinstance(found, str):
        return found
    if os.geteuid() != 0 or not os.access(found.parent, os.W_OK):
        return f"control groups under {found.parent} can only be made by root"
    return None


def _own_groups(file: Path) -> Iterator[tuple[str, str]]:
    """Return this process' (controller, group) in each tree; the controller of version 2 is ''."""
    for line in file.read_text().splitlines():
        _, names, group = line.split(":", 2)
        for name in names.split(","):
            yield name, group


def _own_or_top(root: Path, group: str) -> Path:
    """Return this process' group, or the top of the tree: in a container the group may be named as on the host, where
    it does not exist."""
    own = root / group.lstrip("/")
    return own if own.is_dir() else root


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []
