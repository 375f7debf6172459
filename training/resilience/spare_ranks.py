"""Ranks that a smaller layout leaves over: they wait, without a device, until the others have ended, and end alike.

They must not end before: a torchrun whose ranks have all ended closes the rendezvous, and the others could not be
started again. Without torchrun, whose process holds the job's store, there is nothing to wait for.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from configs.schema import Config
from parallel.liveness import rendezvous

POLL = 1.0  # seconds
SETTLE = 3.0  # seconds in which rank 0 takes away what an earlier attempt has left


def wait_for_end(config: Config) -> int:
    """Wait for the ranks in use; the exit status that they end with, 1 when the launcher is lost."""
    if not rendezvous.launcher_holds_store():
        return 0
    try:
        store, key = _store(config), _key()
        time.sleep(SETTLE)
        while not store.check([key]):
            time.sleep(POLL)
        return int(store.get(key))
    except RuntimeError:  # torch's errors of stores
        return 1


def clear(config: Config) -> None:
    """Take away what an earlier attempt has left. Rank 0 calls it before the ranks in use meet."""
    if rendezvous.launcher_holds_store():
        _store(config).delete_key(_key())


def release(config: Config, exit_status: int) -> None:
    """Let the waiting ranks end. Rank 0 calls it last."""
    if rendezvous.launcher_holds_store():
        _store(config).set(_key(), str(exit_status))


def _store(config: Config) -> Any:
    import torch.distributed as dist  # seconds that a wrong config need not wait for

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=config.parallel.timeout_seconds))


def _key() -> str:
    return f"standby/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
