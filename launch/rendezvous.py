"""The rendezvous of a job's launchers: on one node over the loopback alone, on several without unpickling foreign data.

torch's stores (2.11 to 2.13) listen on every interface, whatever address they are given, and anyone can read and write
them. torchrun's rendezvous keeps its state in one as a pickle, so whoever reaches the port can run code in the
launcher. Here

* one node needs no rendezvous: its launcher holds the ranks' store itself, behind a socket that listens on 127.0.0.1;
* several nodes use torch's rendezvous, with its state as JSON.

docs/guide/network.md describes what this protects from.
"""

from __future__ import annotations

import json
import socket
from argparse import Namespace
from datetime import datetime
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

LOOPBACK = "127.0.0.1"
BACKEND = "loopback"  # among torchrun's rendezvous backends


def secure(options: Namespace) -> Namespace:
    """Change torchrun's options to a safe rendezvous: `--standalone` uses the loopback address, and the state of the
    c10d rendezvous is stored as JSON. Returns the options."""
    if options.standalone:
        rendezvous_handler_registry.register(BACKEND, OneNode)
        options.standalone, options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = (
            False,
            BACKEND,
            LOOPBACK,  # never read; without it torch warns about --master-addr, which was not given
            str(uuid4()),
        )
    # The only module of torch.distributed that unpickles the content of a store.
    assert hasattr(dynamic_rendezvous, "pickle"), (
        "this torch reads its rendezvous state in another way; see launch/rendezvous.py"
    )
    dynamic_rendezvous.pickle = JsonState  # type: ignore[attr-defined]
    return options


class OneNode(RendezvousHandler):
    """Rendezvous of a launcher that runs alone (rank 0 of 1), with a store that listens on the loopback address."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        assert parameters.max_nodes == 1
        self._run_id, self._round = parameters.run_id, 0
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    use_agent_store = True  # the ranks' store is this one

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1  # each attempt has its own keys
        store = dist.PrefixStore(f"{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class JsonState:
    """Replacement for the module `pickle` in torch's rendezvous: stores the rendezvous state as JSON."""

    PickleError = ()  # torch catches none: its message would have less detail than that of `loads`

    @staticmethod
    def dumps(state: _RendezvousState) -> bytes:
        """Return a rendezvous state as JSON bytes. Equal states give equal bytes."""
        content = {
            "round": state.round,
            "complete": state.complete,
            "deadline": None if state.deadline is None else state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[_write(node), rank] for node, rank in state.participants.items()],
            "wait_list": sorted(map(_write, state.wait_list)),
            "redundancy_list": sorted(map(_write, state.redundancy_list)),
            "last_heartbeats": [[_write(node), beat.isoformat()] for node, beat in state.last_heartbeats.items()],
        }
        return json.dumps(content).encode()

    @staticmethod
    def loads(content: bytes) -> _RendezvousState:
        """Return the rendezvous state in `content`. Raises RendezvousStateError for bytes that are not such a state."""
        try:
            fields = json.loads(content)
            state = _RendezvousState()
            if fields.keys() != vars(state).keys():
                raise ValueError(f"it must have the fields {sorted(vars(state))}, not {sorted(fields)}")
            state.round = _typed(fields["round"], int)
            state.complete = _typed(fields["complete"], bool)
            state.deadline = None if fields["deadline"] is None else _time(fields["deadline"])
            state.closed = _typed(fields["closed"], bool)
            state.participants = {_node(node): _typed(rank, int) for node, rank in fields["participants"]}
            state.wait_list = {_node(node) for node in fields["wait_list"]}
            state.redundancy_list = {_node(node) for node in fields["redundancy_list"]}
            state.last_heartbeats = {_node(node): _time(beat) for node, beat in fields["last_heartbeats"]}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RendezvousStateError(
                f"the rendezvous state was not written by a node of this job ({error})"
            ) from None
        return state


def _write(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(fields: list[Any]) -> _NodeDesc:
    addr, pid, local_id = fields
    return _NodeDesc(_typed(addr, str), _typed(pid, int), _typed(local_id, int))


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"the time {text} must have a time zone")
    return time


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
