"""What a search of layouts says: the fastest layout that fits, those that come next, and why they lose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.schema import Config
from simulator.clock.prediction import Prediction


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes of the fullest rank by tier: of its device, of its node's host and of the disk."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes of each tier that a rank may take, and what limits the device and the host."""

    device: float = math.inf
    host: float = math.inf
    disk: float = 0.0
    device_name: str = "the device's memory"
    host_name: str = "the node's memory"


@dataclass(frozen=True)
class SearchedLayout:
    """A layout that fits. `overrides`: what to type beside the command line that the search was given; `why`: why it
    loses against the best, empty for the best itself; `choices`: those of which it is the best found, as typed."""

    config: Config = field(repr=False)
    overrides: list[str]
    prediction: Prediction
    memory: LayoutMemory
    tokens_per_second: float
    why: str = ""
    choices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "overrides": self.overrides,
            "step_seconds": self.prediction.seconds,
            "tokens_per_second": self.tokens_per_second,
            "reasons": dict(self.prediction.reasons),
            "memory_bytes": {"device": self.memory.device, "host": self.memory.host, "disk": self.memory.disk},
            "why": self.why,
            "choices": list(self.choices),
        }


@dataclass(frozen=True)
class SearchCounts:
    """How many layouts the rules allow; of them those that bounds dropped, by time and by memory; those whose memory
    was counted and was too much; those that were timed; and those left, which are faster by the share `near` at
    most."""

    candidates: int
    bounded_by_time: int
    bounded_by_memory: int
    too_large: int
    timed: int
    left: int = 0
    near: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class TooLargeChoice:
    """A choice, as typed, with which no layout that was looked at fits: the nearest is `short` bytes over a tier."""

    choice: str
    short: float
    tier: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"choice": self.choice, "short_bytes": self.short, "tier": self.tier}


@dataclass(frozen=True)
class LayoutAnswer:
    """The best layout and the runners-up, the fastest found with each choice that differs from the best's; `too_large`:
    choices with which nothing fits. `errors`: what back-tests of the hardware's figures found."""

    best: SearchedLayout
    runners_up: list[SearchedLayout]
    counts: SearchCounts
    limits: MemoryLimits
    hardware: str
    world_size: int
    errors: tuple[Mapping[str, Any], ...] = ()
    too_large: tuple[TooLargeChoice, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For search.json."""
        limits = {name: getattr(self.limits, name) for name in ("device", "host", "disk")}
        return {
            "hardware": self.hardware,
            "back_tests": [dict(error) for error in self.errors],
            "world_size": self.world_size,
            "limits_bytes": {name: None if math.isinf(limit) else limit for name, limit in limits.items()},
            "counts": self.counts.as_dict(),
            "best": self.best.as_dict(),
            "runners_up": [layout.as_dict() for layout in self.runners_up],
            "too_large": [each.as_dict() for each in self.too_large],
        }
