"""`run_dir/environment.json`, for people and the report: versions, hosts and devices of the run's latest start."""

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
from typing import Any

import torch
import torch.distributed as dist

from base import files
from training.report.sources import ENVIRONMENT
from training.run import Callback, Run

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


class Environment(Callback):
    """Writes versions, hosts and devices to `environment.json` when the run starts or resumes."""

    def on_start(self, run: Run) -> None:
        ranks: list[dict[str, Any]] = [{}] * run.topology.world_size
        dist.all_gather_object(ranks, describe_rank(run.topology.device))
        if run.is_main:
            with files.spared(run.run_dir / ENVIRONMENT):
                write(run.run_dir, ranks)


def describe_rank(device: torch.device) -> dict[str, Any]:
    """Return facts about this rank's host (name, processor, cores, memory in bytes) and device (the GPU's name, or
    "cpu")."""
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def write(run_dir: Path, ranks: Sequence[dict[str, Any]]) -> None:
    """Write the versions of libraries and the hosts to environment.json. `ranks`: facts about the host and device of
    each rank. Raises WriteError."""
    hosts: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        about = {key: value for key, value in rank.items() if key != "device"}
        host = hosts.setdefault(rank["host"], {**about, "ranks": 0, "devices": Counter()})
        host["ranks"] += 1
        host["devices"][rank["device"]] += 1
    versions = {
        "mixtrain": tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    content = {"time": time.time(), "versions": versions, "ranks": len(ranks), "hosts": list(hosts.values())}
    files.write_text(run_dir / ENVIRONMENT, json.dumps(content, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
