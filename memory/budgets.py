"""How much of the host's memory and of its disk a rank may keep, and who keeps how much of it."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from typing import Any

from configs.ranks import launched
from configs.schema import ConfigError, MemoryConfig
from configs.show import show
from memory import host_memory
from memory.host_memory import free_bytes, instead_of

MIB = 2**20
SHARE = 0.8  # of what is free, where no budget is given
MORE = {
    "memory.host_budget": "use more ranks, or nodes",
    "memory.disk_budget": "make room, or give memory.disk_dir on another disk",
}


class Budget:
    """Bytes that are kept under one limit, by what they are kept for. Any thread may call."""

    def __init__(self, key: str):
        self.key = key  # of the config
        self.limit = math.inf
        self.held: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.peak = 0  # of all together
        self._given: float | None = None
        self._free = math.inf  # a rank's share of what is free, where no budget is given
        self._lock = threading.RLock()  # a finalizer may come in between

    @property
    def total(self) -> int:
        """Bytes that are kept now."""
        return sum(self.held.values())

    @property
    def room(self) -> float:
        """Bytes that are left."""
        return self.limit - self.total

    def open(self, given: float | None, free: float) -> None:
        """A run begins: its limit is what is given, in MiB, or a rank's share of the bytes that the node has free."""
        launch = launched()
        ranks = launch.local_world_size or launch.world_size
        self._given, self._free = given, free / ranks if given is None else math.inf
        self.limit = SHARE * self._free if given is None else given * MIB
        self.peaks, self.peak = Counter(self.held), self.total

    def take(self, num_bytes: int, what: str) -> None:
        """Before so many bytes are allocated. Raises ConfigError where they are too many."""
        with self._lock:
            if self.total + num_bytes > self.limit:
                raise ConfigError(self.refusal(num_bytes, what))
            self._count(num_bytes, what)

    def give(self, num_bytes: int, what: str) -> None:
        """They are free again."""
        with self._lock:
            self._count(-num_bytes, what)
            assert self.held[what] >= 0, f"more {what} was given back than taken"

    def count(self, tensor: Any, what: str) -> None:
        """Keep a tensor's bytes until nobody refers to it. Nothing is refused: it is there already."""
        with self._lock:
            self._count(tensor.nbytes, what)
        weakref.finalize(tensor, self.give, tensor.nbytes, what).atexit = False

    def _count(self, num_bytes: int, what: str) -> None:
        self.held[what] += num_bytes
        self.peaks[what] = max(self.peaks[what], self.held[what])
        self.peak = max(self.peak, self.total)

    def least(self, num_bytes: int) -> int:
        """MiB of a budget that leaves so many bytes beside what is kept."""
        return math.ceil((self.total + num_bytes) / MIB)

    def could_be(self, mib: int) -> bool:
        """Whether a budget of so many MiB is free; one that was given is its giver's to raise."""
        return mib * MIB <= self._free

    def refusal(self, num_bytes: int, what: str, beside: str = "") -> str:
        """Why so many bytes are too many. `beside`: other keys that must be set with this one."""
        least, left = self.least(num_bytes), max(self.limit - self.total, 0)
        share = f" is {SHARE:.0%} of what is free, for this rank {self.limit / MIB:.1f} MiB, and"
        advice = f"Try {self.key}={least}{beside}" if self.could_be(least) else f"More is not free: {MORE[self.key]}"
        return (
            f"{self.key} ({show(self._given)}){share if self._given is None else ''} must leave "
            f"{num_bytes / MIB:.1f} MiB for {what}, and leaves {left / MIB:.1f}. {advice}"
        )


HOST = Budget("memory.host_budget")  # one of each in a process: whoever keeps something asks them
DISK = Budget("memory.disk_budget")


def open_budgets(config: MemoryConfig, host: Budget = HOST, disk: Budget = DISK) -> None:
    """The limits of a run, to be called before its ranks take what they need. Raises ConfigError."""
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
