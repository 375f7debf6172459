"""What a rank may take of each memory tier: what the config says, else what the hardware has."""

from __future__ import annotations

import math

from configs.schema import Config
from memory.budgets import MIB
from optim.arrangement.arrange import Capacity
from simulator.clock.hardware import Hardware
from simulator.memory import TOLERANCE
from simulator.search.answer import MemoryLimits

GIB = 2**30
SHARE = 0.8  # of a node's memory that its ranks may take together, as memory/budgets.py has it of what is free


def memory_limits(config: Config, world_size: int, hardware: Hardware) -> MemoryLimits:
    """The limits of a rank in bytes."""
    ranks = max(1, min(int(hardware["ranks_per_node"]), world_size))
    cap = config.training.memory_limit_gib
    device = hardware["device.memory"] * (1 - TOLERANCE) if cap is None else cap * GIB
    host, disk = (_share(hardware[name], ranks) for name in ("host.memory", "disk.memory"))
    if config.memory.host_budget is not None:
        host = config.memory.host_budget * MIB
    if config.memory.disk_budget is not None:
        disk = config.memory.disk_budget * MIB
    return MemoryLimits(
        device or math.inf,
        host,
        0.0 if config.memory.disk_dir is None else disk,
        f"{1 - TOLERANCE:.0%} of the device's memory" if cap is None else "training.memory_limit_gib",
        "the node's memory" if config.memory.host_budget is None else "memory.host_budget",
    )


def capacity(limits: MemoryLimits) -> Capacity:
    """The same for those who arrange optimizer state."""
    return Capacity(limits.device, limits.host, limits.disk)


def _share(num_bytes: float, ranks: int) -> float:
    return num_bytes / ranks * SHARE
