"""What emulated_step.py measures: a config's overrides, and what a rank has beside its links."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass

from configs.compose import compose
from configs.schema import Config
from configs.validate import validate


@dataclass(frozen=True)
class Machine:
    """FLOP/s of a rank's products, and bytes per second of its link to the host (each way) and of its disk."""

    flops_per_second: float = 15e9
    host_link: float = 400e6
    disk_read: float = 200e6
    disk_write: float = 150e6

    def of_stream(self, name: str) -> float | None:
        """What a stream of memory/host_link.py is held to; None: nothing."""
        rates = {
            "to device": self.host_link,
            "from device": self.host_link,
            "disk read": self.disk_read,
            "disk write": self.disk_write,
        }
        rate = rates.get(name, math.inf)
        return None if math.isinf(rate) else rate


@dataclass(frozen=True)
class Setting:
    """A config as overrides of the presets, and the vocabulary it is run with."""

    overrides: tuple[str, ...]
    vocab_size: int = 1024

    def config(self, ranks: int) -> Config:
        """Composed and checked. Raises ConfigError."""
        disk = f"memory.disk_dir={tempfile.gettempdir()}"
        config = compose([disk, *self.overrides, "training.device=cpu", "training.steps=1000000"])
        validate(config, ranks)
        return config
