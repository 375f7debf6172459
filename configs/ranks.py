"""This process's place among those that were started together, as the launcher put it into the environment."""

from __future__ import annotations

import os
from typing import NamedTuple

from configs.schema import ConfigError

LAUNCHERS = "bash launch/torchrun.sh, or none of these variables for one process"


class Launch(NamedTuple):
    """A process of a launch; rank 0 of 1 without a launcher."""

    rank: int
    world_size: int

    def check_meeting(self) -> None:
        """Raises ConfigError where several processes are not told where to meet."""
        if self.world_size == 1:
            return
        several = f"where WORLD_SIZE ({self.world_size}) is above 1: the launcher sets it. Try {LAUNCHERS}"
        if not os.environ.get("MASTER_ADDR"):
            raise ConfigError(f"MASTER_ADDR must be set {several}")
        port = _number("MASTER_PORT", 1)
        if port is None or port >= 2**16:
            raise ConfigError(f"MASTER_PORT ({port or 'unset'}) must be a port from 1 to 65535 {several}")


def launched() -> Launch:
    """Read and check RANK and WORLD_SIZE, and LOCAL_RANK beside them: with wrong ones ranks wait for each other in vain.

    Raises:
        ConfigError: naming the variable.
    """
    rank, world_size, local_rank = _number("RANK"), _number("WORLD_SIZE", 1), _number("LOCAL_RANK")
    if world_size is None:
        if rank is not None:
            raise ConfigError(f"WORLD_SIZE must be set where RANK ({rank}) is: a launcher sets both. Try {LAUNCHERS}")
        return Launch(0, 1)
    if rank is None:
        if world_size > 1:
            raise ConfigError(f"RANK must be set where WORLD_SIZE ({world_size}) is above 1: a launcher sets both. Try {LAUNCHERS}")
        return Launch(0, 1)
    on_this_node, name = _number("LOCAL_WORLD_SIZE", 1), "LOCAL_WORLD_SIZE"
    if on_this_node is None:
        on_this_node, name = world_size, "WORLD_SIZE"
    _below("RANK", rank, "WORLD_SIZE", world_size)
    _below("LOCAL_RANK", local_rank or 0, name, on_this_node)
    return Launch(rank, world_size)


def world_size() -> int:
    """Number of processes of this launch; 1 without a launcher. Raises ConfigError as `launched` does."""
    return launched().world_size


def _number(name: str, least: int = 0) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"{name} ({text}) must be an integer of at least {least}: it is set by the launcher. Try {LAUNCHERS}")
    return int(text)


def _below(name: str, value: int, other: str, limit: int) -> None:
    if value >= limit:
        raise ConfigError(f"{name} ({value}) must be less than {other} ({limit}): the launcher sets both. Try {LAUNCHERS}")
