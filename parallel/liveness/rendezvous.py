"""Rendezvous of the ranks of a job: the store of this attempt, and the network interface that they listen on.

torchrun (2.11 to 2.13) keeps one key-value store over all its restarts, and restarted ranks find in it the entries of
the last attempt: gloo then connects to addresses where nobody listens, and NCCL to an identity that is gone. Restart
counts do not identify attempts either: a node that joins later counts from 0. So rank 0 makes up a name for the attempt
and gives it to each rank that asks.

A run on one node listens on the loopback alone. The guarantees of that, and the rules on several nodes, are in
docs/guide/network.md. Otherwise gloo would listen at the address of the host's name, NCCL at that of the first network
card, and torch's store, which does not authenticate, on every interface.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
import uuid
from datetime import timedelta

import psutil
import torch.distributed as dist

from base.ranks import Launch

POLL = 0.02  # seconds
ADDRESS = "127.0.0.1"


def launcher_holds_store() -> bool:
    """Whether the job's store is in torchrun's process, not in rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_joined: dist.Store | None = None


def job_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return the store of a launch's processes for this attempt; the same object until `forget`. All ranks call it.

    Raises TimeoutError or torch's DistError if some ranks do not call it in time.
    """
    global _joined
    if _joined is None:
        if launcher_holds_store():
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout
            )
            name = _invite(store, launch.world_size, timeout) if launch.rank == 0 else _ask(store, launch.rank, timeout)
            _joined = dist.PrefixStore(name, store)  # a name that no earlier attempt has used
        elif launch.world_size == 1:
            _joined = dist.HashStore()  # no other ranks, so nothing has to listen
        else:
            _joined = loopback_store(launch.rank, launch.world_size, timeout)
            if _joined is None:
                _joined = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    return _joined


def forget() -> None:
    """Leave the store: the next `job_store` returns another one."""
    global _joined
    _joined = None


def _invite(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """Give the attempt's name, on rank 0, to each rank that asks, until all have it. Keys differ per attempt."""
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


def is_loopback_enough(world_size: int) -> bool:
    """Whether all ranks of this job run on one node, according to their launcher."""
    if world_size == 1:
        return True
    if "GROUP_WORLD_SIZE" in os.environ:  # torchrun's number of nodes
        return os.environ["GROUP_WORLD_SIZE"] == "1"
    return _is_loopback(os.environ.get("MASTER_ADDR", ""))


def use_loopback() -> None:
    """Let gloo and NCCL listen on the loopback alone, unless the user has set an interface. Call it before groups
    exist."""
    interface = next(
        name for name, entries in psutil.net_if_addrs().items() if any(entry.address == ADDRESS for entry in entries)
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": the exact name, not a prefix


def loopback_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """Return a store held by rank 0, for a job without a launcher's store. All ranks call it.

    None if MASTER_ADDR is not the loopback: then torch's own rendezvous is right.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not port or not _is_loopback(address):
        return None
    # Ranks do not wait for others here: with different numbers of ranks some would wait in vain.
    if rank != 0:
        return dist.TCPStore(address, int(port), world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, int(port)), family=family)
    return dist.TCPStore(
        address,
        int(port),
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _is_loopback(host: str) -> bool:
    """Whether a host is the loopback. Its own name does not count: some systems give it a loopback address that other
    nodes do not know."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
