"""Who can reach a run over the network: what it listens on, and what becomes of what strangers write there."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.run import parse_args

from launch import rendezvous
from launch.rendezvous import JsonState
from tests.launch import sockets

ROOT = Path(__file__).resolve().parents[2]
TINY = ["experiment=gpt_tiny", "training.steps=3", "training.eval_interval=0", "sample.prompts=[]"]
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def on_a_network() -> list[str]:
    """A command that starts another on a host whose name is its address in the network, where it has one and this user may do so.

    Many hosts give their own name a loopback address, and gloo would listen there by itself.
    """
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET]
    outside = [address for address in addresses if not address.startswith("127.")]
    may = shutil.which("unshare") and subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0
    return ["unshare", "--uts", "sh", "-c", f'hostname {outside[0]} && exec "$@"', "sh"] if outside and may else []


def start(command: list[str], run_dir: Path, cache: Path) -> subprocess.Popen[str]:
    """A run in a fresh environment: nothing says where gloo and NCCL shall listen."""
    env = {key: value for key, value in os.environ.items() if key not in (*PLACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return subprocess.Popen(
        [*on_a_network(), *command, *TINY, f"run_dir={run_dir}", f"data.cache_dir={cache}"],
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_the_probe_sees_what_listens_everywhere() -> None:
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("::1", 0), family=socket.AF_INET6) as here:
        found = {port: address for address, port in sockets.listening(os.getpid())}
        assert not found[everywhere.getsockname()[1]].is_loopback
        assert found[here.getsockname()[1]].is_loopback


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


LAUNCHES = {
    "alone": ([sys.executable, "train.py", "logging.wandb=offline"], 1),
    "torchrun.sh": (["bash", "launch/torchrun.sh", "--ranks-per-node", "2", "--", "logging=quiet"], 3),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_run_on_one_node_listens_on_the_loopback_alone(launch: str, tmp_path: Path, cache: Path) -> None:
    """From its first line to its end; the first of them prepares the data."""
    command, fewest = LAUNCHES[launch]
    process = start(command, tmp_path / "run", cache)
    seen = sockets.listened_on(process, 100.0)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert len(seen) >= fewest, f"a store and a socket of gloo on each rank were expected: {seen}"
    assert {place: holders for place, holders in seen.items() if not place[0].is_loopback} == {}


def a_state() -> rendezvous._RendezvousState:
    state = rendezvous._RendezvousState()
    nodes = [rendezvous._NodeDesc(f"node-{i}", 100 + i, 0) for i in range(4)]
    now = datetime.now(UTC)
    state.round, state.complete, state.deadline = 3, True, now + timedelta(seconds=30)
    state.participants = {nodes[1]: 0, nodes[0]: 1}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[3]}
    state.last_heartbeats = dict.fromkeys(nodes, now)
    return state


@pytest.mark.parametrize("state", [rendezvous._RendezvousState(), a_state()])
def test_the_state_of_a_rendezvous_comes_back_from_json(state: rendezvous._RendezvousState) -> None:
    text = JsonState.dumps(state)
    again = JsonState.loads(text)
    assert vars(again) == vars(state)
    assert list(again.participants) == list(state.participants)  # torch numbers them in their order
    assert JsonState.dumps(again) == text


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def test_what_is_no_state_is_refused_and_not_run(tmp_path: Path) -> None:
    fine = json.loads(JsonState.dumps(a_state()))
    wrong = {
        "round": "3",
        "complete": 1,
        "deadline": "soon",
        "closed": None,
        "participants": [["a", 1]],
        "wait_list": 7,
        "redundancy_list": [["a", 1]],
        "last_heartbeats": [[["a", 1, 0], "2026-01-01T00:00:00"]],
    }
    assert wrong.keys() == fine.keys()
    texts = [json.dumps(fine | {key: value}).encode() for key, value in wrong.items()]
    texts += [json.dumps(fine | {"more": 1}).encode(), b"", b"[]", b"null", b"\xff\x00", b"[" * 100_000, b"NaN"]
    texts += [pickle.dumps(Payload(tmp_path / "mark")), pickle.dumps(a_state())]
    for text in texts:
        with pytest.raises(RendezvousStateError, match="none that a node of this job writes"):
            JsonState.loads(text)
    assert not list(tmp_path.iterdir())


def test_torch_reads_the_state_of_a_rendezvous_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own code, with a stranger's pickle in the store."""
    monkeypatch.setattr(dynamic_rendezvous, "pickle", pickle)  # undone at the end
    rendezvous.secure(parse_args(["--nnodes", "2", "--rdzv-backend", "c10d", "train.py"]))
    parameters = RendezvousParameters("c10d", str(tmp_path / "store"), "job", 1, 2, store_type="file")
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    assert handler.num_nodes_waiting() == 0
    store.set("torch.rendezvous.job", base64.b64encode(pickle.dumps(Payload(tmp_path / "mark"))))
    with pytest.raises(RendezvousStateError):
        handler.set_closed()
    assert not (tmp_path / "mark").exists()
