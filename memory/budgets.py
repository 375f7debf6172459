"""Limits on the host memory and the disk space that each rank uses, with the bytes in use per purpose."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from typing import Any

from base.errors import ConfigError
from base.ranks import launched
from base.units import MIB
from configs.schema import MemoryConfig
from configs.show import show
from memory import host_memory
from memory.host_memory import free_bytes, instead_of

SHARE = 0.8  # of the free bytes that the ranks of a node may use, if no budget is given
NOT_FREE = "This node does not have that much free: "
MORE = {
    "memory.host_budget": "use more ranks or more nodes",
    "memory.disk_budget": "free some space, or set memory.disk_dir to a folder on another disk",
}


class Budget:
    """Counts the bytes of host memory or disk that a rank has reserved, per purpose, under a limit. Thread-safe."""

    def __init__(self, key: str):
        self.key = key  # config key of the limit
        self.limit = math.inf
        self.held: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.peak = 0  # of the total
        self._given: float | None = None
        self._free = math.inf  # this rank's share of the free bytes, if no budget is given
        self._lock = threading.RLock()  # reentrant: a finalizer of `count` may run while the lock is held

    @property
    def total(self) -> int:
        """Bytes that are reserved now, over all purposes."""
        return sum(self.held.values())

    @property
    def headroom(self) -> float:
        """Bytes that can still be reserved under the limit."""
        return self.limit - self.total

    def open(self, given: float | None, free: float) -> None:
        """Set the limit for a run: `given` MiB or, if None, 80% of this rank's equal share of the `free` bytes."""
        launch = launched()
        ranks = launch.local_world_size or launch.world_size
        self._given, self._free = given, free / ranks if given is None else math.inf
        self.limit = SHARE * self._free if given is None else given * MIB
        self.peaks, self.peak = Counter(self.held), self.total

    def take(self, num_bytes: int, purpose: str) -> None:
        """Reserve bytes before they are allocated. Raises ConfigError if they would exceed the limit."""
        with self._lock:
            if self.total + num_bytes > self.limit:
                raise ConfigError(self.error_message(num_bytes, purpose))
            self._count(num_bytes, purpose)

    def give(self, num_bytes: int, purpose: str) -> None:
        """Release bytes that were reserved for a purpose."""
        with self._lock:
            self._count(-num_bytes, purpose)
            assert self.held[purpose] >= 0, f"more bytes were released than reserved for {purpose}"

    def count(self, tensor: Any, purpose: str) -> None:
        """Count the bytes of an allocated tensor until Python deletes it, even if they exceed the limit."""
        with self._lock:
            self._count(tensor.nbytes, purpose)
        weakref.finalize(tensor, self.give, tensor.nbytes, purpose).atexit = False

    def _count(self, num_bytes: int, purpose: str) -> None:
        self.held[purpose] += num_bytes
        self.peaks[purpose] = max(self.peaks[purpose], self.held[purpose])
        self.peak = max(self.peak, self.total)

    def least(self, num_bytes: int) -> int:
        """Return the smallest limit, in MiB, under which `num_bytes` more could be reserved."""
        return math.ceil((self.total + num_bytes) / MIB)

    def could_be(self, mib: int) -> bool:
        """Return whether the limit can be set to `mib` MiB: at most the free bytes, unless the user has set a limit."""
        return mib * MIB <= self._free

    def error_message(self, num_bytes: int, purpose: str, other_keys: str = "") -> str:
        """Return the error message for `num_bytes` that exceed the limit. `other_keys`: further settings to try."""
        least, left = self.least(num_bytes), max(self.limit - self.total, 0)
        share = f" is {SHARE:.0%} of the free bytes by default, which is {self.limit / MIB:.1f} MiB per rank. It"
        advice = f"Try {self.key}={least}{other_keys}" if self.could_be(least) else NOT_FREE + MORE[self.key]
        return (
            f"{self.key} ({show(self._given)}){share if self._given is None else ''} must leave "
            f"{num_bytes / MIB:.1f} MiB for {purpose}, but leaves only {left / MIB:.1f} MiB. {advice}"
        )


HOST = Budget("memory.host_budget")  # one of each per process, shared by all users of host memory and disk
DISK = Budget("memory.disk_budget")


def open_budgets(config: MemoryConfig, host: Budget = HOST, disk: Budget = DISK) -> None:
    """Set the limits on host memory and disk space for a run. Raises ConfigError if memory.disk_dir does not exist."""
    host.open(config.host_budget, host_memory.available() if config.host_budget is None else 0)
    if config.disk_dir is not None:
        try:
            free = free_bytes(config.disk_dir)
        except OSError as error:
            raise ConfigError(
                f"memory.disk_dir ({config.disk_dir}) must be an existing folder: {error.strerror}. "
                f"Try {instead_of('memory.disk_dir', config.disk_dir)}"
            ) from error
        disk.open(config.disk_budget, free)
