"""Measured costs in files, by a key of everything they depend on. A group's first rank reads and writes them."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.costs.cache_files import cache_path, read_cache, write_cache

logger = logging.getLogger(__name__)


def hardware_key(device: torch.device) -> dict[str, Any]:
    """Return the properties of this machine that determine the speed of computation, as a cache key."""
    key: dict[str, Any] = {"device": device.type, "processor": _processor_name(), "cores": os.cpu_count()}
    key |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if device.type == "cuda":
        key["gpu"] = torch.cuda.get_device_name(device)
    return key


def layout_key(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the properties of a process group that determine the speed of communication, as a cache key."""
    if group is None:
        return {"group_size": 1}
    return {"group_size": group.size(), "world_size": dist.get_world_size(), "backend": str(dist.get_backend(group))}


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def cached(
    folder: str | os.PathLike[str] | None,
    key: dict[str, Any],
    make: Callable[[], dict[str, Any]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    still_true: Callable[[dict[str, Any]], bool] | None = None,
) -> dict[str, Any]:
    """Return measured costs (JSON values): those of the key's file in `folder`, else `make()`, which is written there.

    All ranks of `group` make the call and get the values of its first rank. `still_true(values)` may measure whether
    cached values are still valid; its answer must be equal on all ranks. Invalid files are replaced, with a log line.
    """
    is_first = group is None or group.rank() == 0
    path = None if folder is None else cache_path(folder, key)
    values = _from_first(read_cache(path, key) if path is not None and is_first else None, device, group)
    if values is not None and still_true is not None and not still_true(values):
        if is_first:
            logger.warning("measured costs in %s are no longer valid on this machine; measuring again", path)
        values = None
    if values is None:
        values = _from_first(make(), device, group)
        assert values is not None
        if path is not None and is_first:
            write_cache(path, key, values)
    return values


def _from_first(
    values: dict[str, Any] | None, device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, Any] | None:
    # Always through JSON, so that values are the same whether they were read, received or just measured.
    message = [json.dumps(values)]
    if group is not None and group.size() > 1:
        dist.broadcast_object_list(message, group=group, group_src=0, device=device)
    return json.loads(message[0])
