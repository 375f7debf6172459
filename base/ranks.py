"""The rank of this process and the number of ranks, from the environment variables that the launcher sets.

No other module reads RANK, WORLD_SIZE and related variables. Imports nothing heavy, since base/exit_handler.py needs
this module first.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from base.errors import ConfigError

LAUNCHERS = "bash launch/torchrun.sh, or unset these variables to run one process"


class Launch(NamedTuple):
    """Rank of this process and number of processes: rank 0 of 1 without a launcher. `local_rank` and `local_world_size`
    count within this node; None if the launcher does not set them."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None

    def check_meeting(self) -> None:
        """Raise ConfigError if there are several processes and MASTER_ADDR or MASTER_PORT is unset or wrong."""
        if self.world_size == 1:
            return
        several = f"if WORLD_SIZE ({self.world_size}) is above 1; the launcher sets it. Try {LAUNCHERS}"
        if not os.environ.get("MASTER_ADDR"):
            raise ConfigError(f"MASTER_ADDR must be set {several}")
        port = _number("MASTER_PORT", 1)
        if port is None or port >= 2**16:
            raise ConfigError(f"MASTER_PORT ({port or 'unset'}) must be a port from 1 to 65535 {several}")


def launched() -> Launch:
    """Read and check RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. With wrong values the ranks would wait for each
    other forever.

    Code with process groups uses parallel/topology.py instead. Raises ConfigError with the name of the wrong variable.
    """
    rank, world_size, local_rank = _number("RANK"), _number("WORLD_SIZE", 1), _number("LOCAL_RANK")
    if world_size is None:
        if rank is not None:
            raise ConfigError(f"WORLD_SIZE must be set if RANK ({rank}) is set; a launcher sets both. Try {LAUNCHERS}")
        return Launch(0, 1, local_rank)
    if rank is None:
        if world_size > 1:
            raise ConfigError(
                f"RANK must be set if WORLD_SIZE ({world_size}) is above 1; a launcher sets both. Try {LAUNCHERS}"
            )
        return Launch(0, 1, local_rank)
    on_this_node = _number("LOCAL_WORLD_SIZE", 1)
    _below("RANK", rank, "WORLD_SIZE", world_size)
    local = ("WORLD_SIZE", world_size) if on_this_node is None else ("LOCAL_WORLD_SIZE", on_this_node)
    _below("LOCAL_RANK", local_rank or 0, *local)
    return Launch(rank, world_size, local_rank, on_this_node)


def world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher. Raises ConfigError."""
    return launched().world_size


def use_fewer(world_size: int) -> None:
    """Reduce the number of processes of this run to `world_size`; the other started processes stay idle."""
    os.environ["WORLD_SIZE"] = str(world_size)


def label() -> str:
    """Return the prefix of a printed line, such as `[rank 3] `, if a launcher started several ranks, else an empty
    string. Works even with wrong environment variables of the launcher."""
    rank = os.environ.get("RANK")
    return f"[rank {rank}] " if rank is not None and os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _number(name: str, least: int = 0) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(
            f"{name} ({text}) must be an integer of at least {least}; the launcher sets it. Try {LAUNCHERS}"
        )
    return int(text)


def _below(name: str, value: int, other: str, limit: int) -> None:
    if value >= limit:
        raise ConfigError(
            f"{name} ({value}) must be less than {other} ({limit}); the launcher sets both. Try {LAUNCHERS}"
        )
