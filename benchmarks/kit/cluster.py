"""A cluster on one machine: its nodes are network namespaces, its links have a rate, its ranks serve many calls.

`python -m benchmarks.kit.cluster --nodes 2 --rate 200mbit -- COMMAND ...` starts COMMAND once per rank, as torchrun
would, for users who debug runs over several nodes. Benchmarks call functions on the ranks instead:

    with Cluster(nodes=2, rate="200mbit") as cluster:
        results = cluster.call(function, argument)  # function(argument) on every rank, results by rank

Each node has one network card, which sends and receives at `rate` at the same time; a cable joins two, a bridge more.
No resource has a name outside of its processes: a namespace ends, with its links, when the last process that is in it
or holds its descriptor ends. Ranks ask the kernel to be killed when their parent ends, and a guard process ends
what they have started and removes their control groups. So a cluster leaves nothing behind, however its parent ends,
and several clusters can run at once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import os
import pickle
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from base.exit_handler import end_with_caller

ROOT = Path(__file__).resolve().parents[2]
CGROUPS = Path("/sys/fs/cgroup/cpu")  # control groups, version 1
CGROUP_PERIOD = 10_000  # microseconds: a rank over its share waits for at most this long
SUBNET, INTERFACE, PORT = "10.77.0", "eth0", 29500  # private to a cluster, so the same in all of them
MARK = "MIXTRAIN_CLUSTER"  # variable in the environment of every process of a cluster
UNCAPPED = "uncapped"

SEGMENT_SECONDS = 1.4e-3  # a segment takes at most so long
# Sizes of segments; TCP over IPv4 has those beyond 64 KiB since Linux 6.3.
LINUX = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
SEGMENTS = tuple(size * 1024 for size in (128, 64, 32, 16) if size <= 64 or LINUX >= (6, 3))
# <linux/rtnetlink.h>, <linux/if_link.h>
RTM_NEWLINK, NLM_F_REQUEST_ACK, IFLA_GSO_MAX_SIZE, IFLA_GSO_IPV4_MAX_SIZE = (16, 5, 41, 63)

COMMAND_TIMEOUT = 120.0  # seconds for ip and tc
START_TIMEOUT = 120.0  # seconds for all ranks to import torch and to meet
CALL_TIMEOUT = 300.0  # seconds for one call, where the caller names none
GRACE = 5.0  # seconds that the other ranks have once one has failed
STACKS_TIMEOUT = 2.0  # seconds that stuck ranks have to write their stacks
SWEEP_TIMEOUT = 60.0  # seconds for processes that ended to be gone, and out of their control groups

CLONE_NEWNET = 0x40000000  # <linux/sched.h>
# Ranks compute on the host. torch would warn that addresses in the namespaces have no names, libraries of what is not
# installed.
WORKER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::UserWarning",
}
UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
WORKER = "from benchmarks.kit.cluster import _worker; _worker()"
COMMAND = "from benchmarks.kit.cluster import _become; _become()"
GUARD = "from benchmarks.kit.cluster import _guard; _guard()"


_Result = TypeVar("_Result")


class ClusterError(RuntimeError):
    """The cluster cannot be made, or one of its ranks ended, hung or raised; it has been taken down."""


class RankError(ClusterError):
    """A rank raised; `rank` is the first that did."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} raised:\n{text}")
        self.rank = rank


# ---------------------------------------------------------------------------------------------------------------------
# Links
# ---------------------------------------------------------------------------------------------------------------------


def parse_rate(rate: str) -> float | None:
    """Return the bits per second of a rate as tc writes it ("200mbit"); None for "uncapped". Raises ValueError."""
    if rate == UNCAPPED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"rate={rate!r}: a positive number and one of bit, kbit, mbit, gbit, or {UNCAPPED}, such as 200mbit"
        )
    return float(match[1]) * UNITS[match[2]]


def link_settings(bits_per_second: float) -> tuple[int, int]:
    """Largest segment that is handed to the link, and burst of its token bucket, both in bytes.

    Each segment costs the machine two interrupts and a thread's waking up, some 50 microseconds here, which a network
    card would save it: with one each 0.5 ms, computation beside the link was 16 to 28% slower, with one each 1 to 1.5
    ms, 4 to 9% (two ranks held to 0.7 of a core). The burst passes at once, so it must be small beside a message (a
    message of 1 MiB runs at up to 1.05 of the rate); but a bucket smaller than a segment makes the kernel cut segments
    up in software, which slows the computation twofold. The bucket must hold what flows in 0.4 ms, or fast links do not
    reach their rate.
    """
    segment = next(size for size in SEGMENTS if size <= bits_per_second / 8 * SEGMENT_SECONDS or size == SEGMENTS[-1])
    return segment, max(segment * 5 // 4, int(bits_per_second / 8 * 0.4e-3))


def _libc_call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _elsewhere(function: Callable[[], _Result]) -> _Result:
    """Return the result of `function` in a new thread, which may change its namespace: that belongs to a thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _new_namespace() -> int:
    """Return the descriptor of a new network namespace, which exists as long as it is open or a process is inside."""

    def make() -> int:
        _libc_call("unshare", CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    try:
        return _elsewhere(make)
    except OSError as error:
        raise ClusterError(
            f"network namespaces cannot be made here ({error}): run as root, or inside `unshare --user "
            "--map-root-user`, on Linux."
        ) from None


def _limit_segments(namespace: int, names: Sequence[str], size: int) -> None:
    """Limit the segments sent through these devices of a namespace to `size` bytes. (`ip` can do it from iproute2 6.3
    on.)"""

    def limit() -> None:
        _libc_call("setns", namespace, CLONE_NEWNET)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            for name in names:
                attributes = b"".join(
                    struct.pack("HHI", 8, kind, size) for kind in (IFLA_GSO_MAX_SIZE, IFLA_GSO_IPV4_MAX_SIZE)
                )
                message = struct.pack("BxHiII", 0, 0, socket.if_nametoindex(name), 0, 0) + attributes
                kernel.send(struct.pack("IHHII", 16 + len(message), RTM_NEWLINK, NLM_F_REQUEST_ACK, 1, 0) + message)
                (error,) = struct.unpack("i", kernel.recv(4096)[16:20])
                if error:
                    raise OSError(-error, os.strerror(-error))

    try:
        _elsewhere(limit)
    except OSError as error:
        raise ClusterError(f"segments of {names} cannot be limited to {size} bytes: {error}") from None


class _Network:
    """Namespaces of the nodes: two are joined by a cable, more by a bridge in a namespace of its own. The machine's own
    network is not changed."""

    def __init__(self, nodes: int, rate: str) -> None:
        limit = parse_rate(rate)
        self._bridge = -1
        self.namespaces: list[int] = []
        try:
            self._bridge = _new_namespace()
            self.namespaces = [_new_namespace() for _ in range(nodes)]
            ends = [f"{INTERFACE} netns /proc/self/fd/{namespace}" for namespace in self.namespaces]
            ports = [] if nodes == 2 else [f"port{i}" for i in range(nodes)]
            if ports:
                lines = ["link set lo up", "link add name bridge type bridge", "link set bridge up"]
                for port, end in zip(ports, ends, strict=True):
                    lines += [f"link add name {port} type veth peer name {end}", f"link set {port} master bridge up"]
            else:
                lines = [f"link add name {ends[0]} type veth peer name {ends[1]}"]
            self._batch(self._bridge, "ip", lines)
            for i, namespace in enumerate(self.namespaces):
                node = ["link set lo up", f"addr add {address(i)}/24 dev {INTERFACE}", f"link set {INTERFACE} up"]
                # BBR, some systems' default, shares a card badly among several senders: four nodes at 200 Mbit/s
                # exchanged 8 MiB each with 138 to 165 Mbit/s, and with 187 to 189 under cubic.
                node.append(f"route replace {SUBNET}.0/24 dev {INTERFACE} src {address(i)} congctl cubic")
                self._batch(namespace, "ip", node)
            if limit is not None:
                # A node's own end limits what it sends, the bridge's end (or the other end of the cable) what it
                # receives.
                segment, burst = link_settings(limit)
                for namespace, names in [
                    (self._bridge, ports),
                    *((namespace, [INTERFACE]) for namespace in self.namespaces),
                ]:
                    _limit_segments(namespace, names, segment)
                    bucket = f"root tbf rate {limit:.0f}bit burst {burst} latency 400ms"
                    self._batch(namespace, "tc", [f"qdisc add dev {name} {bucket}" for name in names])
        except BaseException:
            self.close()
            raise

    def _batch(self, namespace: int, tool: str, lines: list[str]) -> None:
        command = ["nsenter", f"--net=/proc/self/fd/{namespace}", tool, "-batch", "-"]
        try:
            done = subprocess.run(
                command,
                input="\n".join(lines) + "\n",
                text=True,
                capture_output=True,
                timeout=COMMAND_TIMEOUT,
                pass_fds=[self._bridge, *self.namespaces],
            )
        except FileNotFoundError as error:
            raise ClusterError(f"{error.filename} is missing: install iproute2 and util-linux.") from None
        if done.returncode != 0:
            raise ClusterError(f"{tool} refused one of {lines}: {done.stderr.strip()}")

    def close(self) -> None:
        for descriptor in (self._bridge, *self.namespaces):
            if descriptor >= 0:
                os.close(descriptor)
        self._bridge, self.namespaces = -1, []


def address(node: int) -> str:
    """Return the address of a node inside its cluster."""
    return f"{SUBNET}.{node + 1}"


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


class _Rank:
    """One rank's process in its node's namespace, and the thread that copies its output, with the rank before each
    line."""

    def __init__(
        self, rank: int, code: str, arguments: Sequence[str], environment: dict[str, str], pass_fds: list[int]
    ) -> None:
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.connection: Connection | None = None
        self.tail: deque[str] = deque(maxlen=100)
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.tail.append(line.rstrip("\n"))
            with contextlib.suppress(ValueError):  # the stream is closed already
                print(f"[rank {self.rank}] {line}", end="" if line.endswith("\n") else "\n", flush=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Reap the process and collect its last output; call it after `kill`."""
        self.process.wait(timeout=SWEEP_TIMEOUT)
        self._reader.join(timeout=STACKS_TIMEOUT)
        if self.connection is not None:
            self.connection.close()


class _Processes:
    """The network, the ranks' processes, their control groups, and the guard."""

    def __init__(self, nodes: int, rate: str, ranks_per_node: int, cpu_share: float | None) -> None:
        for name, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if nodes > 200:
            raise ValueError(f"nodes={nodes}: the cluster's subnet has room for 200")
        if cpu_share is not None and not 0.01 <= cpu_share <= 1:
            raise ValueError(f"cpu_share={cpu_share}: the part of one core that each rank gets, 0.01 to 1")
        if cpu_share is not None and not (CGROUPS / "cpu.cfs_quota_us").exists():
            raise ClusterError(
                f"cpu_share={cpu_share} needs control groups of version 1 with quotas under {CGROUPS}; leave it away."
            )
        sweep()
        self.ranks_per_node, self.world_size, self.cpu_share = ranks_per_node, nodes * ranks_per_node, cpu_share
        self.token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.ranks: list[_Rank] = []
        self._network = _Network(nodes, rate)
        self._guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, self.token],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(
        self, code: str, arguments: Sequence[str] = (), environment: dict[str, str] | None = None, descriptor: int = -1
    ) -> _Rank:
        """Start the next rank."""
        rank = len(self.ranks)
        node, local = divmod(rank, self.ranks_per_node)
        namespace = self._network.namespaces[node]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(node),
            MARK: self.token,
        }
        prelude = [str(os.getpid()), str(namespace), str(descriptor), *arguments]
        pass_fds = [namespace] if descriptor < 0 else [namespace, descriptor]
        started = _Rank(rank, code, prelude, variables, pass_fds)
        self.ranks.append(started)
        if self.cpu_share is not None:
            group = CGROUPS / f"{MARK.lower()}-{self.token}-{rank}"
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(CGROUP_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(CGROUP_PERIOD * self.cpu_share)))
            (group / "cgroup.procs").write_text(str(started.process.pid))
        return started

    def close(self) -> None:
        for rank in self.ranks:  # all at once: a rank must not be seen dying by the others
            rank.kill()
        for rank in self.ranks:
            rank.wait()
        self._network.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(timeout=2 * SWEEP_TIMEOUT)


def _enter_node() -> None:
    """Enter the node's namespace at the start of a rank's process, which ends with its parent."""
    parent, namespace = int(sys.argv[1]), int(sys.argv[2])
    end_with_caller()
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)
    _libc_call("setns", namespace, CLONE_NEWNET)
    os.close(namespace)


def _become() -> None:
    _enter_node()
    try:
        os.execvp(sys.argv[4], sys.argv[4:])
    except OSError as error:
        print(f"{sys.argv[4]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def _guard() -> None:
    """Wait in the guard process for the end of its parent, which holds the other end of stdin, and clean up."""
    sys.stdin.read()
    _sweep(sys.argv[1])


def sweep() -> None:
    """Remove the remains of clusters whose parent and guard have both ended; other clusters are kept."""
    tokens = {token for _, token in _marked()}
    with contextlib.suppress(OSError):
        tokens |= {path.name.split("-", 1)[1].rsplit("-", 1)[0] for path in CGROUPS.glob(f"{MARK.lower()}-*")}
    for token in tokens:
        if not Path("/proc", token.split("-")[0]).exists():
            _sweep(token)


def _marked() -> list[tuple[int, str]]:
    """Return (process id, token) of all processes of clusters."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            match = re.search(rb"(?:^|\0)%s=(\d+-[0-9a-f]+)" % MARK.encode(), path.read_bytes())
            if match is not None:
                found.append((int(path.parent.name), match[1].decode()))
    return found


def _sweep(token: str) -> None:
    deadline = time.monotonic() + SWEEP_TIMEOUT
    while time.monotonic() < deadline:
        left = [process for process, marked in _marked() if marked == token]
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        groups = list(CGROUPS.glob(f"{MARK.lower()}-{token}-*"))
        for group in groups:
            with contextlib.suppress(OSError):  # not empty yet
                group.rmdir()
        if not left and not groups:
            return
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------------------------


class Cluster:
    """Nodes with ranks that wait for calls; torch.distributed's default group (gloo, over the links) joins them.

    `rate` is each node's, in both directions ("200mbit", or "uncapped"); `cpu_share` limits each rank to a share of a
    core. Every rank computes with one thread. State that calls leave in modules' globals stays. Raises ValueError for
    impossible settings and ClusterError where the machine cannot do it.
    """

    def __init__(
        self, nodes: int, rate: str = UNCAPPED, ranks_per_node: int = 1, cpu_share: float | None = None
    ) -> None:
        self.nodes, self.rate, self.world_size = nodes, rate, nodes * ranks_per_node
        self._processes: _Processes | None = _Processes(nodes, rate, ranks_per_node, cpu_share)
        try:
            for _ in range(self.world_size):
                ours, theirs = socket.socketpair()
                with theirs:
                    rank = self._processes.start(WORKER, environment=WORKER_ENVIRONMENT, descriptor=theirs.fileno())
                rank.connection = Connection(ours.detach())
            self._collect("starting", START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down; may be called again."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    @property
    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        assert self._processes is not None
        return [rank.process.pid for rank in self._processes.ranks]

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT) -> list[Any]:
        """Call `function(*args)` on every rank; return the results by rank.

        `function` must be importable by name; arguments and results are pickled. Raises RankError, or ClusterError if a
        rank ended or did not answer within `timeout` seconds; the cluster is then closed.
        """
        if self._processes is None:
            raise ClusterError("the cluster is closed")
        if "<" in function.__qualname__ or function.__module__ == "__main__":
            raise ValueError(
                f"function={function.__module__}.{function.__qualname__}: another process must be able to import it"
            )
        message = pickle.dumps((function.__module__, function.__qualname__, args))
        try:
            for rank in self._processes.ranks:
                assert rank.connection is not None
                with contextlib.suppress(OSError):  # it ended: `_collect` says so
                    rank.connection.send_bytes(message)
            return self._collect(f"{function.__module__}.{function.__qualname__}", timeout)
        except BaseException:  # also Ctrl-C: ranks in the middle of a call are of no use
            self.close()
            raise

    def _collect(self, what: str, timeout: float) -> list[Any]:
        assert self._processes is not None
        deadline = time.monotonic() + timeout
        waiting = {rank.connection: rank for rank in self._processes.ranks}
        results: dict[int, Any] = {}
        error: ClusterError | None = None
        while waiting:
            ready = wait(
                [connection for connection in waiting if connection is not None], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    kind, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    kind, value = "ended", None
                if kind == "result":
                    results[rank.rank] = value
                    continue
                if error is None or (kind == "ended" and isinstance(error, RankError)):
                    # Others may have missed a rank that ended before its end was seen.
                    error = RankError(rank.rank, value) if kind == "error" else ClusterError(_obituary(rank, what))
                    deadline = min(deadline, time.monotonic() + GRACE)
        if error is not None:
            raise error
        if waiting:
            stuck = list(waiting.values())
            names = ", ".join(str(rank.rank) for rank in stuck)
            raise ClusterError(f"{what}: rank {names} did not answer within {timeout:g} s\n{_stacks(stuck)}")
        return [results[rank] for rank in range(self.world_size)]


def _obituary(rank: _Rank, what: str) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.process.wait(timeout=SWEEP_TIMEOUT)
    time.sleep(0.1)  # its last lines are on their way
    return f"{what}: rank {rank.rank} ended with status {rank.process.returncode}; its last output:\n" + "\n".join(
        rank.tail
    )


def _stacks(ranks: list[_Rank]) -> str:
    for rank in ranks:
        rank.tail.clear()
        with contextlib.suppress(ProcessLookupError):
            rank.process.send_signal(signal.SIGUSR1)
    time.sleep(STACKS_TIMEOUT)
    return "\n".join(f"[rank {rank.rank}] {line}" for rank in ranks for line in rank.tail)


def _worker() -> None:
    """Run a rank's process: join the group, then answer calls until the connection closes."""
    _enter_node()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(int(sys.argv[3]))
    answer: tuple[str, Any] = ("result", None)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # Longer than any call: what is stuck is then reported by the controller, with stacks.
        dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
    except Exception:
        answer = ("error", traceback.format_exc())
    while True:
        _release_threads()
        connection.send_bytes(pickle.dumps(answer))
        try:
            module, name, args = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            function: Any = importlib.import_module(module)
            for attribute in name.split("."):
                function = getattr(function, attribute)
            answer = ("result", function(*args))
            pickle.dumps(answer)
        except BaseException:
            answer = ("error", traceback.format_exc())


def _release_threads() -> None:
    """Exclude the work of libraries' threads (gloo's pass packets on) from the rank's share of a core."""
    held = f"/{MARK.lower()}-{os.environ[MARK]}-"
    if held not in Path("/proc/thread-self/cgroup").read_text():
        return
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended
                (CGROUPS / "tasks").write_text(thread)


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------


def launch(
    command: Sequence[str],
    nodes: int,
    rate: str,
    ranks_per_node: int = 1,
    cpu_share: float | None = None,
    timeout: float = 3600,
) -> int:
    """Run a command once per rank, its output with the rank before each line; return the status of the first rank that
    fails, else 0.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun does.
    After one rank has failed, the others are ended after GRACE seconds; all after `timeout` seconds (status 124).
    """
    processes = _Processes(nodes, rate, ranks_per_node, cpu_share)
    try:
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        for _ in range(processes.world_size):
            processes.start(COMMAND, command, environment)
        status, deadline = 0, time.monotonic() + timeout
        running = list(processes.ranks)
        while running:
            if time.monotonic() > deadline:
                names = ", ".join(str(rank.rank) for rank in running)
                print(f"cluster: rank {names} had to be ended", file=sys.stderr)
                return status or 124
            time.sleep(0.02)
            for rank in [rank for rank in running if rank.process.poll() is not None]:
                running.remove(rank)
                code = rank.process.returncode
                if code != 0 and status == 0:
                    status = code if code > 0 else 128 - code
                    print(f"cluster: rank {rank.rank} failed with status {status}", file=sys.stderr)
                    deadline = min(deadline, time.monotonic() + GRACE)
        return status
    finally:
        processes.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--rate", default="1gbit", help=f"of each node's link, each way, as tc writes it, or {UNCAPPED}"
    )
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--cpu-share", type=float, help="part of one core that each rank gets")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("a command is missing: -- python train.py ...")
    try:
        return launch(
            command, arguments.nodes, arguments.rate, arguments.ranks_per_node, arguments.cpu_share, arguments.timeout
        )
    except (ValueError, ClusterError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
