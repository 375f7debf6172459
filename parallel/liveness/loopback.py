"""A run on one node listens on the loopback alone. What that promises, and what holds on several nodes:
docs/guide/network.md.

Without this gloo listens at the address that the host's name has, NCCL at that of the first network card, and torch's
store, which asks nobody who he is, on every interface.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

ADDRESS = "127.0.0.1"


def is_enough(world_size: int) -> bool:
    """Whether all ranks of this job run on one node, as far as their launcher tells."""
    if world_size == 1:
        return True
    if "GROUP_WORLD_SIZE" in os.environ:  # torchrun's number of nodes
        return os.environ["GROUP_WORLD_SIZE"] == "1"
    return _is_loopback(os.environ.get("MASTER_ADDR", ""))


def use() -> None:
    """Let gloo and NCCL listen on the loopback alone, unless the user has named an interface. Call it before groups
    exist."""
    interface = next(
        name for name, entries in psutil.net_if_addrs().items() if any(entry.address == ADDRESS for entry in entries)
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": not any interface whose name begins so


def own_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """The job's store where no launcher holds one: rank 0 does. All ranks call it. None where MASTER_ADDR is not the
    loopback: there torch's own way is right."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not port or not _is_loopback(address):
        return None
    # Nobody waits for others here: ranks that take different numbers of them for all would wait in vain.
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
    """A host's own name does not count: some systems give it a loopback address that other nodes do not know."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
