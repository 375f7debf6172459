"""`run_dir/environment.json`: what a run was last started on: versions, hosts, devices. For people, and for the
report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import files

if TYPE_CHECKING:
    import torch

ENVIRONMENT = "environment.json"
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def of_this_rank(device: torch.device) -> dict[str, Any]:
    """The host of this rank, and its device: a GPU's name, or "cpu"."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "host": socket.gethostname(),
        "device": name,
        "processor": _processor(),
        "cores": cores,
        "memory_bytes": memory,
    }


def versions() -> dict[str, str]:
    """Versions of Mixtrain and of what it stands on."""
    import torch

    found = {
        "mixtrain": tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    return found | ({"CUDA": torch.version.cuda} if torch.version.cuda else {})


def write(run_dir: Path, ranks: Sequence[dict[str, Any]]) -> None:
    """Write what the ranks said of themselves, by host. Raises WriteError."""
    hosts: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        about = {key: value for key, value in rank.items() if key != "device"}
        host = hosts.setdefault(rank["host"], {**about, "ranks": 0, "devices": Counter()})
        host["ranks"] += 1
        host["devices"][rank["device"]] += 1
    content = {"time": time.time(), "versions": versions(), "ranks": len(ranks), "hosts": list(hosts.values())}
    files.write_text(run_dir / ENVIRONMENT, json.dumps(content, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
