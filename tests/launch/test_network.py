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
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.run import parse_args

from benchmarks.kit.cluster import UNCAPPED, _Network, address
from launch import rendezvous
from launch.rendezvous import JsonState
from parallel.liveness import rendezvous as job_rendezvous
from tests.launch import sockets
from tests.launch.stranger import Payload
from tests.waits import LONG, until

ROOT = Path(__file__).resolve().parents[2]
TINY = ["experiment=gpt_tiny", "training.eval_interval=0", "sample.prompts=[]"]
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def network_address() -> str | None:
    """This machine's address in a network, None where it has none or its processes may not be told a host name of their
    own."""
    addresses = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    outside = [address for address in addresses if not address.startswith("127.")]
    may = shutil.which("unshare") and subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0
    return outside[0] if outside and may else None


def start(
    command: list[str], run_dir: Path, data: list[str], host: str | None, namespace: int | None = None
) -> subprocess.Popen[str]:
    """A run in a fresh environment: nothing says where gloo and NCCL shall listen.

    Many machines give their own name a loopback address, so that gloo listens there by itself. `host` is the host's
    name instead.
    """
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in (*RANK_VARIABLES, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }
    return subprocess.Popen(
        [*node_command(host, namespace), *command, *TINY, *data, f"run_dir={run_dir}"],
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        pass_fds=[] if namespace is None else [namespace],
    )


def node_command(host: str | None, namespace: int | None) -> list[str]:
    """The beginning of a command that runs on a host of that name, in a network namespace."""
    named = [] if host is None else ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"]
    return ([] if namespace is None else ["nsenter", f"--net=/proc/self/fd/{namespace}"]) + named


def test_the_probe_sees_what_listens_everywhere() -> None:
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("::1", 0), family=socket.AF_INET6) as here:
        found = {port: address for address, port in sockets.listening(os.getpid())}
        assert not found[everywhere.getsockname()[1]].is_loopback
        assert found[here.getsockname()[1]].is_loopback


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on a few files with a small tokenizer; prepared by the first run."""
    corpus, cache = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("cache")
    for module in ("argparse", "ast", "datetime", "inspect"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{module}.py", corpus)
    return [f"data.corpus={corpus}", f"data.cache_dir={cache}", "data.vocab_size=384", "data.validation_fraction=0.2"]


LAUNCHES = {
    "alone": ([sys.executable, "train.py", "training.steps=3", "logging.wandb=offline"], 1),
    "torchrun.sh": (
        ["bash", "launch/torchrun.sh", "--ranks-per-node", "2", "--", "training.steps=3", "logging=quiet"],
        3,
    ),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_run_on_one_node_listens_on_the_loopback_alone(launch: str, tmp_path: Path, data: list[str]) -> None:
    """From its first line to its end; the first of them prepares the data."""
    command, fewest = LAUNCHES[launch]
    process = start(command, tmp_path / "run", data, network_address())
    seen = sockets.listened_on(process, LONG)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert len(seen) >= fewest, f"a store and a socket of gloo on each rank were expected: {seen}"
    assert {listener: holders for listener, holders in seen.items() if not listener[0].is_loopback} == {}


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
    texts += [pickle.dumps(Payload(str(tmp_path / "mark"))), pickle.dumps(a_state())]
    for text in texts:
        with pytest.raises(RendezvousStateError, match="was not written by a node of this job"):
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
    store.set("torch.rendezvous.job", base64.b64encode(pickle.dumps(Payload(str(tmp_path / "mark")))))
    with pytest.raises(RendezvousStateError):
        handler.set_closed()
    assert not (tmp_path / "mark").exists()


@pytest.mark.netns
def test_what_a_stranger_writes_to_a_run_on_two_nodes_is_not_run(tmp_path: Path, data: list[str]) -> None:
    """Nonsense leaves the run alone; a state of the rendezvous that is none ends it, on each node with one line."""
    network, mark, metrics = _Network(3, UNCAPPED), tmp_path / "mark", tmp_path / "run" / "metrics.jsonl"
    processes: list[subprocess.Popen[str]] = []
    try:
        for node in (0, 1):
            options = [
                "--num-nodes",
                "2",
                "--node-rank",
                str(node),
                "--master-addr",
                address(0),
                "--ranks-per-node",
                "1",
                "--",
            ]
            command = ["bash", "launch/torchrun.sh", *options, "training.steps=100000", "logging=quiet"]
            processes.append(start(command, tmp_path / "run", data, address(node), network.namespaces[node]))
        wait_for_steps(metrics, 1)
        held = [sockets.listening(process.pid) for process in processes]
        stores = [f"{address(0)}:{port}" for (_, port), holders in held[0].items() if "launch.agent" in holders[0]]
        first, (ranks_store,) = f"{address(0)}:29500", [store for store in stores if not store.endswith(":29500")]
        addresses = [f"{address(node)}:{port}" for node in (0, 1) for _, port in held[node]]
        assert {*stores, first} < {*addresses}
        stranger = subprocess.Popen(
            [
                *node_command(None, network.namespaces[2]),
                sys.executable,
                "-m",
                "tests.launch.stranger",
                str(mark),
                first,
                ranks_store,
                *addresses,
            ],
            cwd=ROOT,
            pass_fds=[network.namespaces[2]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(stranger)
        assert stranger.stdout is not None and stranger.stdout.readline() == "written\n"
        wait_for_steps(metrics, 20)
        assert [process.poll() for process in processes] == [None] * 3
        assert stranger.communicate("\n", timeout=LONG)[0] == "written\n"
        for process in processes[:2]:
            output = process.communicate(timeout=LONG)[0]
            assert process.returncode == 1, output
            last = output.splitlines()[-1]
            assert last.startswith("launch: the rendezvous state was not written by a node of this job"), output
    finally:
        for process in processes:
            sockets.kill_family(process)
        network.close()
    assert not mark.exists()


def wait_for_steps(metrics: Path, count: int) -> None:
    """Wait until so many more steps are in the file."""

    def steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    before = steps()
    until(lambda: steps() >= before + count, f"{count} steps", poll=0.1)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_rank_0_holds_the_store_on_the_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no launcher does, and the ranks look for it there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(job_rendezvous.loopback_store, rank, 2, timedelta(seconds=LONG)) for rank in (0, 1)]
        first, second = (future.result() for future in waiting)
    assert first is not None and second is not None
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert [found.is_loopback for found, number in sockets.listening(os.getpid()) if number == port] == [True]
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    assert job_rendezvous.loopback_store(0, 2, timedelta(seconds=5)) is None


@pytest.mark.parametrize(
    ("world_size", "variables", "enough"),
    [
        (1, {}, True),
        (1, {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node-a"}, True),  # elastic: the others stand by
        (2, {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "node-a"}, True),
        (2, {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, False),
        (2, {"MASTER_ADDR": "127.0.1.1"}, True),
        (2, {"MASTER_ADDR": "node-a"}, False),
        (2, {"MASTER_ADDR": "10.0.0.1"}, False),
        (2, {}, False),
    ],
)
def test_the_loopback_is_enough_on_one_node(
    world_size: int, variables: dict[str, str], enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job_rendezvous.is_loopback_enough(world_size) is enough


def test_an_interface_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    job_rendezvous.use_loopback()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=lo")
