"""Budgets of host memory and of disk space per rank, and the bytes in use by purpose."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from typing import Any

from base.errors import ConfigError
from base.ranks import launched
from configs.schema import MemoryConfig
from configs.show import show
from memory import host_memory
from memory.host_memory import free_bytes, instead_of

MIB = 2**20
SHARE = 0.8  # of the free bytes, where no budget is given
MORE = {
    "memory.host_budget": "use more ranks, or nodes",
    "memory.disk_budget": "make room, or give memory.disk_dir on another disk",
}


class Budget:
    """Counts the bytes that a rank takes under one limit, by purpose. Any thread may call."""

    def __init__(self, key: str):
        self.key = key  # of the config
        self.limit = math.inf
        self.held: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.peak = 0  # of all together
        self._given: float | None = None
        self._free = math.inf  # a rank's share of the free bytes, where no budget is given
        self._lock = threading.RLock()  # a finalizer may run in between

    @property
    def total(self) -> int:
        """Bytes in use."""
        return sum(self.held.values())

    @property
    def headroom(self) -> float:
        """Bytes that can still be taken."""
        return self.limit - self.total

    def open(self, given: float | None, free: float) -> None:
        """Set the limit of a run: the given MiB, or a rank's share of the bytes that are free on the node."""
        launch = launched()
        ranks = launch.local_world_size or launch.world_size
        self._given, self._free = given, free / ranks if given is None else math.inf
        self.limit = SHARE * self._free if given is None else given * MIB
        self.peaks, self.peak = Counter(self.held), self.total

    def take(self, num_bytes: int, purpose: str) -> None:
        """Count bytes, before they are allocated. Raises ConfigError where they exceed the limit."""
        with self._lock:
            if self.total + num_bytes > self.limit:
                raise ConfigError(self.error_message(num_bytes, purpose))
            self._count(num_bytes, purpose)

    def give(self, num_bytes: int, purpose: str) -> None:
        """Give back bytes that were taken."""
        with self._lock:
            self._count(-num_bytes, purpose)
            assert self.held[purpose] >= 0, f"more {purpose} was given back than taken"

    def count(self, tensor: Any, purpose: str) -> None:
        """Count a tensor's bytes until it is deleted, even beyond the limit: it is allocated already."""
        with self._lock:
            self._count(tensor.nbytes, purpose)
        weakref.finalize(tensor, self.give, tensor.nbytes, purpose).atexit = False

    def _count(self, num_bytes: int, purpose: str) -> None:
        self.held[purpose] += num_bytes
        self.peaks[purpose] = max(self.peaks[purpose], self.held[purpose])
        self.peak = max(self.peak, self.total)

    def least(self, num_bytes: int) -> int:
        """Return the MiB of a budget that has these bytes in addition to those in use."""
        return math.ceil((self.total + num_bytes) / MIB)

    def could_be(self, mib: int) -> bool:
        """Whether the node has this number of MiB free; a budget that was given can always be raised."""
        return mib * MIB <= self._free

    def error_message(self, num_bytes: int, purpose: str, other_keys: str = "") -> str:
        """Return the message for bytes that exceed the limit. `other_keys`: to be set together with this one."""
        least, left = self.least(num_bytes), max(self.limit - self.total, 0)
        share = f" is {SHARE:.0%} of what is free, for this rank {self.limit / MIB:.1f} MiB, and"
        advice = (
            f"Try {self.key}={least}{other_keys}" if self.could_be(least) else f"More is not free: {MORE[self.key]}"
        )
        return (
            f"{self.key} ({show(self._given)}){share if self._given is None else ''} must leave "
            f"{num_bytes / MIB:.1f} MiB for {purpose}, and leaves {left / MIB:.1f}. {advice}"
        )


HOST = Budget("memory.host_budget")  # one of each in a process: whoever keeps something asks them
DISK = Budget("memory.disk_budget")


def open_budgets(config: MemoryConfig, host: Budget = HOST, disk: Budget = DISK) -> None:
    """Set the limits of a run, before its ranks take memory. Raises ConfigError."""
    host.open(config.host_budget, host_memory.available() if config.host_budget is None else 0)
    if config.disk_dir is not None:
        try:
            free = free_bytes(config.disk_dir)
        except OSError as error:
            raise ConfigError(
                f"memory.disk_dir ({config.disk_dir}) must be a folder that exists: {error.strerror}. "
                f"Try {instead_of('memory.disk_dir', config.disk_dir)}"
            ) from error
        disk.open(config.disk_budget, free)
