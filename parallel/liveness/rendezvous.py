"""A place in torchrun's key-value store that only the ranks of this start know.

torchrun (2.11 to 2.13) keeps one store over all its restarts, and the ranks that it starts again find in it what the
last ones left: gloo then connects to addresses where nobody listens, and NCCL to an identity that is gone. Restart
counts do not tell attempts apart either: a node that joins later counts from 0. So rank 0 makes up a name for the
attempt and gives it to each rank that asks.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from configs.ranks import Launch
from parallel.liveness import loopback

POLL = 0.02  # seconds


def launcher_holds_store() -> bool:
    """Whether the job's store lives in torchrun's process, not in rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_joined: dist.Store | None = None


def job_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """The store of the processes of a launch, for this attempt alone; the same object until `forget`. All ranks call
    it. Raises TimeoutError or torch's DistError if some do not come."""
    global _joined
    if _joined is None:
        if launcher_holds_store():
            _joined = fresh_store(launch.rank, launch.world_size, timeout)
        elif launch.world_size == 1:
            _joined = dist.HashStore()  # nobody else to meet, so nothing has to listen
        else:
            _joined = loopback.own_store(launch.rank, launch.world_size, timeout)
            if _joined is None:
                _joined = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    return _joined


def forget() -> None:
    """Leave the store: who joins again gets another."""
    global _joined
    _joined = None


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The job's store under a name that no earlier attempt has used. All ranks call it. Raises TimeoutError if some do
    not come."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    name = _invite(store, world_size, timeout) if rank == 0 else _ask(store, rank, timeout)
    return dist.PrefixStore(name, store)


def _invite(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """On rank 0: give the name to whoever asks, until all have it. Who asked in an earlier attempt has other keys."""
    name, missing = f"attempt-{uuid.uuid4().hex}", set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    answered: set[str] = set()
    while missing:
        for rank in sorted(missing):
            if store.check([f"came/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"asks/{rank}"]):
                asking = store.get(f"asks/{rank}").decode()
                if asking not in answered:
                    answered.add(asking)
                    store.set(f"name/{asking}", name)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(f"rank {ranks} of {world_size} did not come within {timeout.total_seconds():g} s")
        time.sleep(POLL)
    return name


def _ask(store: dist.Store, rank: int, timeout: timedelta) -> str:
    me = uuid.uuid4().hex
    store.set(f"asks/{rank}", me)
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check([f"name/{me}"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not come within {timeout.total_seconds():g} s")
        time.sleep(POLL)
    name = store.get(f"name/{me}").decode()
    store.set(f"came/{name}/{rank}", "")
    return name
