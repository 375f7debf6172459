"""Rendezvous of a job's ranks: the key-value store of the current attempt, and the network interface for listening.

torchrun (2.11 to 2.13) keeps one store over all its restarts. Restarted ranks find the entries of the last attempt in
it: gloo then connects to addresses where nobody listens, and NCCL to an identity that no longer exists. Restart counts
do not identify attempts either: a node that joins later counts from 0. So rank 0 invents a name for the attempt and
gives it to each rank that asks.

A run on one node listens only on the loopback interface; docs/guide/network.md has the guarantees, and the rules for
several nodes. Otherwise gloo would listen at the address of the host's name, NCCL at that of the first network card,
and torch's store, which does not authenticate, on every interface.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import psutil
import torch.distributed as dist

from base.ranks import Launch

POLL = 0.02  # seconds
ADDRESS = "127.0.0.1"


def launcher_holds_store() -> bool:
    """Whether the job's key-value store is in torchrun's process instead of rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_joined: dist.Store | None = None


def job_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return the key-value store of the current attempt of a job, the same object until `forget`. All ranks call it.

    Raises TimeoutError or torch's DistError if some ranks do not call it in time.
    """
    global _joined
    if _joined is None:
        if launcher_holds_store():
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, is_master=False, timeout=timeout)
            name = _invite(store, launch.world_size, timeout) if launch.rank == 0 else _ask(store, launch.rank, timeout)
            _joined = dist.PrefixStore(name, store)  # a name that no earlier attempt has used
        elif launch.world_size == 1:
            _joined = dist.HashStore()  # there are no other ranks for which a port would have to be open
        else:
            _joined = loopback_store(launch.rank, launch.world_size, timeout)
            if _joined is None:
                _joined = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    return _joined


def absent(ranks: Sequence[int], timeout: timedelta) -> TimeoutError:
    """Return the error for ranks that did not join the job in time."""
    which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    text = f"{which} did not join the job within {timeout.total_seconds():g} s. Check the logs of all nodes."
    return TimeoutError(text)


def forget() -> None:
    """Forget the key-value store, so that the next call of `job_store` connects to a new one."""
    global _joined
    _joined = None


def _invite(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """Give the name of this attempt to each rank that asks, until all have it, and return it. Rank 0 calls this."""
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
            raise absent(sorted(missing), timeout)
        time.sleep(POLL)
    return name


def _ask(store: dist.Store, rank: int, timeout: timedelta) -> str:
    me = uuid.uuid4().hex
    store.set(f"asks/{rank}", me)
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check([f"name/{me}"]):
        if time.monotonic() > deadline:
            raise absent([0], timeout)
        time.sleep(POLL)
    name = store.get(f"name/{me}").decode()
    store.set(f"came/{name}/{rank}", "")
    return name


def is_loopback_enough(world_size: int) -> bool:
    """Whether all ranks of this job run on one node, according to the launcher's environment."""
    if world_size == 1:
        return True
    if "GROUP_WORLD_SIZE" in os.environ:  # torchrun's number of nodes
        return os.environ["GROUP_WORLD_SIZE"] == "1"
    return _is_loopback(os.environ.get("MASTER_ADDR", ""))


def use_loopback() -> None:
    """Make gloo and NCCL listen only on the loopback interface, unless the user chose one. Call it before any group."""
    interfaces = psutil.net_if_addrs().items()
    interface = next(name for name, entries in interfaces if any(entry.address == ADDRESS for entry in entries))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": the exact name, not a prefix


def loopback_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """Return a key-value store in rank 0's process for a job that was not started by torchrun. All ranks call it.

    Returns None if MASTER_ADDR is not the loopback address: then torch's own rendezvous must be used.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not port or not _is_loopback(address):
        return None
    # Ranks do not wait for each other here: if they were started with different world sizes, some would wait in vain.
    store = partial(dist.TCPStore, address, int(port), world_size, timeout=timeout, wait_for_workers=False)
    if rank != 0:
        return store(is_master=False)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, int(port)), family=family)
    return store(is_master=True, master_listen_fd=listener.detach())


def _is_loopback(host: str) -> bool:
    """Return whether a host is the loopback. A host's own name does not count: other nodes may not reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
