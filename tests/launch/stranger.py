"""A process that writes to a run's sockets from outside: `python -m tests.launch.stranger MARK RENDEZVOUS STORE
SOCKET...`.

First it writes bytes of all kinds to each socket (HOST:PORT), and a pickle to each key of the ranks' store. It says so,
waits for a line on its standard input, and writes the pickle to where torch's rendezvous keeps its state. Whoever
unpickles it makes the folder MARK.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import random
import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.waits import LONG


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._mark,)


def main(mark: str, rendezvous: str, store: str, *addresses: str) -> None:
    payload = pickle.dumps(Payload(mark))
    sized = len(payload).to_bytes(8, "little") + payload
    numbers = random.Random(0)
    for address in addresses:
        for content in (
            payload,
            base64.b64encode(payload),
            sized,
            numbers.randbytes(1),
            numbers.randbytes(100_000),
            bytes(64),
        ):
            host, _, port = address.rpartition(":")
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection((host, int(port)), timeout=LONG) as connection,
            ):
                connection.sendall(content)
    ranks = connect(store)
    keys = ranks.list_keys()
    assert any("watchdog" in key for key in keys), keys
    for key in keys:
        ranks.set(key, payload)
    print("written", flush=True)
    sys.stdin.readline()
    launchers = connect(rendezvous)
    assert launchers.check(["torch.rendezvous.mixtrain"])
    launchers.set("torch.rendezvous.mixtrain", base64.b64encode(payload))
    assert launchers.check(["torch.rendezvous.mixtrain"])  # it has arrived
    print("written", flush=True)


def connect(address: str) -> Any:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=LONG))


if __name__ == "__main__":
    main(*sys.argv[1:])
