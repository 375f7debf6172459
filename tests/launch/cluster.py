"""A Slurm of two nodes on this machine, with files, keys, ports and daemons of its own; nothing of an installed one is
touched."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from tests.waits import LONG

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo", "setpriv")
NODES = ("n1", "n2")

# Both nodes are this machine under two names and ports, so their processes are told apart by parentage and not by
# cgroups, and their sizes are taken from here. A requeued job waits for its credential to expire (5 s at least); low
# intervals make the rest quick.
CONFIG = """
ClusterName=mixtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def find(program: str) -> str | None:
    """The daemons often lie where only root looks for commands."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin:/sbin")


def lacking() -> list[str]:
    """The programs that a cluster needs and this machine does not have."""
    return [program for program in PROGRAMS if find(program) is None]


class Cluster:
    """A running cluster: its environment, its commands and what its jobs do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(root / "slurm.conf"),
            "OMP_NUM_THREADS": "1",  # each node thinks that all cores are its own
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle. Raises RuntimeError with what they wrote if they do not
        get there."""
        for name in ("munge", "state", *NODES):
            (self.root / name).mkdir(mode=0o755)
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        (self.root / "slurm.conf").write_text(
            CONFIG.format(root=self.root, host=host, user=getpass.getuser(), ports=_free_ports(3))
        )
        munge = self.root / "munge"
        files = {
            "key-file": key,
            "socket": munge / "socket",
            "pid-file": munge / "pid",
            "log-file": munge / "log",
            "seed-file": munge / "seed",
        }
        self._start("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        self._wait(lambda: (munge / "socket").exists(), "munged")
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self._wait(
            lambda: self.output("sinfo", "--noheader", "--format=%T %D", check=False) == "idle 2", "two idle nodes"
        )

    def stop(self) -> None:
        """End all jobs, then the daemons, then whatever is left that knows this cluster's configuration."""
        if len(self._daemons) > 1 and all(daemon.poll() is None for daemon in self._daemons):
            self.output("scancel", "--quiet", "--user", getpass.getuser(), check=False)
            with contextlib.suppress(RuntimeError):
                self._wait(lambda: self.output("squeue", "--noheader", check=False) == "", "no jobs", LONG)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        end = time.monotonic() + LONG
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(max(0.1, end - time.monotonic()))
            daemon.kill()
            daemon.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """All processes that belong to this cluster: daemons, steps and what jobs started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    found.append(process)
        return found

    def output(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Run a command and return its output. Raises RuntimeError with that output if the command fails."""
        result = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=LONG)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stdout}{result.stderr}")
        return result.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode and so on."""
        words = self.output("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for(self, number: str, states: Sequence[str]) -> dict[str, str]:
        """Wait until a job is in one of the states. Raises RuntimeError if it gets into another final one, or never
        there."""
        end = time.monotonic() + LONG
        while (job := self.job(number))["JobState"] not in states:
            if (
                job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
                or time.monotonic() > end
            ):
                raise RuntimeError(f"job {number} is {job['JobState']} in place of {' or '.join(states)}: {job}")
            time.sleep(0.2)
        return job

    def _start(self, program: str, *arguments: str) -> None:
        path = find(program)
        assert path is not None
        number = len(self._daemons)
        with open(self.root / f"{number}_{program}.log", "wb") as log:
            # They die with the tests, whatever ends those.
            command = ["setpriv", "--pdeathsig=KILL", path, *arguments]
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _wait(self, condition: Callable[[], bool], what: str, timeout: float = LONG) -> None:
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self._daemons):
                logs = [
                    f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted(self.root.glob("*.log"))
                ]
                raise RuntimeError(f"waited in vain for {what}\n" + "\n".join(logs))
            time.sleep(0.1)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster for the length of a `with`; nothing of it is left afterwards."""
    root = Path(tempfile.mkdtemp(prefix="mixtrain-slurm-"))  # short: a socket's path may have 107 characters
    it = Cluster(root)
    try:
        it.start()
        yield it
    finally:
        it.stop()
        shutil.rmtree(root, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
