"""Run a command in a control group of its own: memory limited, disk reads throttled, the peak measured.

    with MemoryCgroup(2**30) as memory, DiskCgroup(100e6, folder, inside=memory) as disk:
        outcome = run_in(["dd", f"if={folder}/file", "of=/dev/null"], memory, disk, timeout=60)

Control groups of version 1 (a tree per controller) and 2 (one tree) are supported; they need root. A group is made
below the group of this process, or else at the top of the tree, and is removed with all its processes.

In both versions the pages of a file count as memory of the group that read them first, until they are dropped: call
`drop_page_cache` before a run, or the group reads for free what another one has in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTS, OWN_GROUPS = Path("/proc/self/mounts"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Controller:
    """The folder in which groups of a controller are made: `memory`, or `blkio`, which version 2 calls `io`."""

    version: int
    parent: Path


def find_controller(name: str, mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> Controller | str:
    """Return the controller `memory` or `blkio`; a line with the reason if there is none."""
    modern = {"blkio": "io"}.get(name, name)
    groups = dict(_own_groups(own))
    reason = f"no control groups have a {name} controller here"
    for line in mounts.read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        root = Path(where)
        if kind == "cgroup" and name in options.split(","):
            return Controller(1, _own_or_top(root, groups.get(name, "/")))
        if kind == "cgroup2" and modern in _words(root / "cgroup.controllers"):
            # Only a group whose children have the controller can hold ours; processes inside it would forbid that.
            group = _own_or_top(root, groups.get("", "/"))
            for parent in (group, *group.parents):
                if modern in _words(parent / "cgroup.subtree_control"):
                    return Controller(2, parent)
                if parent == root:
                    break
            reason = f"no control group above this process gives its {modern} controller to groups below it"
    return reason


def can_limit_memory() -> str | None:
    """Return None, or a line with the reason why a MemoryCgroup cannot be made here."""
    return _why_not("memory")


def can_limit_disk(path: Path) -> str | None:
    """Return None, or a line with the reason why a DiskCgroup cannot throttle reads of files under `path`."""
    reason = _why_not("blkio")
    if reason is None:
        try:
            disk_of(path)
        except ValueError as error:
            return str(error)
    return reason


def disk_of(path: Path) -> str:
    """Return `major:minor` of the whole disk of a path: a partition cannot be throttled. Raises ValueError for a path
    that is on no disk (tmpfs, overlayfs, a network)."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise ValueError(f"{path} is on no disk of this machine, so its reads cannot be throttled")
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    return (device / "dev").read_text().strip()


def _why_not(name: str) -> str | None:
    found = find_controller(name)
    if isinstance(found, str):
        return found
    if os.geteuid() != 0 or not os.access(found.parent, os.W_OK):
        return f"control groups under {found.parent} can only be made by root"
    return None


def _own_groups(file: Path) -> Iterator[tuple[str, str]]:
    """Return this process' (controller, group) in each tree; the controller of version 2 is ''."""
    for line in file.read_text().splitlines():
        _, names, group = line.split(":", 2)
        for name in names.split(","):
            yield name, group


def _own_or_top(root: Path, group: str) -> Path:
    """Return this process' group, or the top of the tree: in a container the group may be named as on the host, where
    it does not exist."""
    own = root / group.lstrip("/")
    return own if own.is_dir() else root


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []


SAMPLE_SECONDS = 0.02
GONE_SECONDS = 10.0  # a killed process may yet be in a read of a throttled disk
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
# A shell that enters the groups and then becomes the command: nothing of this process is copied into them.
ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'


@dataclass(frozen=True)
class CgroupOutcome:
    """The result of a command. `status` is negative for a signal, as in subprocess.

    Bytes are None if no group measured them: `peak_bytes` with pages of files, `peak_held_bytes` without those
    (sampled), `disk_bytes` read.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    peak_bytes: int | None
    peak_held_bytes: int | None
    disk_bytes: int | None
    out_of_memory: bool  # the kernel killed a process of the group because it was at its limit
    timed_out: bool

    def verdict(self) -> str:
        """Return in a few words how the command ended."""
        if self.out_of_memory:
            return "killed: out of memory"
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s"
        return "ran" if self.status == 0 else f"failed with status {self.status}"


class _Cgroup:
    """A group of one controller, from `__enter__` to `__exit__`."""

    controller_name = ""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.version = 0

    def make(self) -> None:
        found = find_controller(self.controller_name)
        if isinstance(found, str):
            raise RuntimeError(found)
        self.version = found.version
        self.folder = found.parent / f"mixtrain-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()

    def write(self, name: str, value: str) -> None:
        assert self.folder is not None
        (self.folder / name).write_text(value)

    def read(self, name: str) -> str:
        assert self.folder is not None
        return (self.folder / name).read_text()

    @property
    def entrance(self) -> Path:
        """The file to which a process writes its id to enter the group."""
        assert self.folder is not None, "the group is made by a with statement"
        return self.folder / "cgroup.procs"

    def kill(self) -> None:
        """End all processes of the group and wait until they are gone. Raises RuntimeError if one remains."""
        deadline = time.monotonic() + GONE_SECONDS
        while pids := self.entrance.read_text().split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {' '.join(pids)} of {self.folder} do not end")
            time.sleep(0.01)

    def remove(self) -> None:
        if self.folder is None:
            return
        try:
            self.kill()
        finally:
            deadline = time.monotonic() + 1  # the kernel lets go of the last process a little later
            while True:
                try:
                    self.folder.rmdir()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            self.folder = None

    def __exit__(self, *error: object) -> None:
        self.remove()


class MemoryCgroup(_Cgroup):
    """A group that may hold `limit_bytes` of memory with its pages of files, and no swap; None: only measured."""

    controller_name = "memory"

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes

    def __enter__(self) -> MemoryCgroup:
        self.make()
        try:
            self._limit()
        except BaseException:
            self.remove()
            raise
        return self

    def _limit(self) -> None:
        if self.limit_bytes is None:
            return
        if self.version == 2:
            self.write("memory.max", str(self.limit_bytes))
            if self._has("memory.swap.max"):
                self.write("memory.swap.max", "0")
            return
        self.write("memory.limit_in_bytes", str(self.limit_bytes))
        if self._has("memory.memsw.limit_in_bytes"):
            self.write("memory.memsw.limit_in_bytes", str(self.limit_bytes))  # memory and swap: so no swap
        elif len(Path("/proc/swaps").read_text().splitlines()) > 1:
            raise RuntimeError("swap is on and this kernel cannot forbid it to a group: swapoff -a")

    def _has(self, name: str) -> bool:
        assert self.folder is not None
        return (self.folder / name).exists()

    def peak_bytes(self) -> int | None:
        """Return the peak memory of the group, with pages of files; None before Linux 5.19 with version 2."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int(self.read(name)) if self._has(name) else None

    def held_bytes(self) -> int:
        """Return the bytes that the group holds and the kernel cannot drop: anonymous and shared memory, and the
        kernel's own for the group (page tables, sockets, but also some inodes that could be dropped)."""
        stat = dict(_numbers(self.read("memory.stat")))
        if self.version == 2:
            return stat["anon"] + stat["shmem"] + stat.get("kernel", 0)
        kernel = int(self.read("memory.kmem.usage_in_bytes")) if self._has("memory.kmem.usage_in_bytes") else 0
        return stat["total_rss"] + stat["total_shmem"] + kernel

    def kills(self) -> int:
        """Return the number of processes that the kernel ended because the group was at its limit."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return dict(_numbers(self.read(name))).get("oom_kill", 0)


class DiskCgroup(_Cgroup):
    """A group that reads at most `read_bytes_per_second` from the disk of `path`; None: only measured. In version 2 a
    process is in one group, so give its MemoryCgroup as `inside`."""

    controller_name = "blkio"

    def __init__(self, read_bytes_per_second: float | None, path: Path, inside: MemoryCgroup | None = None) -> None:
        super().__init__()
        self.rate, self.path, self.inside = read_bytes_per_second, path, inside
        self.device = disk_of(path)

    def __enter__(self) -> DiskCgroup:
        if self.inside is not None and self.inside.version == 2:
            self.folder, self.version = self.inside.folder, 2
        else:
            self.make()
        try:
            if self.rate is not None:
                self.throttle(self.rate)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.inside is not None and self.inside.version == 2:
            self.folder = None  # the other one's
        else:
            self.remove()

    def throttle(self, read: float, written: float | None = None) -> None:
        """Limit the group's reads, and if given its writes past the kernel's cache, to these bytes per second from now
        on."""
        if self.version == 1:
            self.write("blkio.throttle.read_bps_device", f"{self.device} {int(read)}")
            if written is not None:
                self.write("blkio.throttle.write_bps_device", f"{self.device} {int(written)}")
        else:
            writes = "" if written is None else f" wbps={int(written)}"
            self.write("io.max", f"{self.device} rbps={int(read)}{writes}")

    def bytes_read(self) -> int:
        """Return the bytes read from the disk so far."""
        if self.version == 1:
            found = re.search(
                rf"^{self.device} Read (\d+)$", self.read("blkio.throttle.io_service_bytes"), re.MULTILINE
            )
        else:
            found = re.search(rf"^{self.device} .*\brbytes=(\d+)", self.read("io.stat"), re.MULTILINE)
        return int(found[1]) if found else 0


def prefix_of(*groups: MemoryCgroup | DiskCgroup | None) -> list[str]:
    """Return the words before a command that run it in open groups."""
    entrances = dict.fromkeys(str(group.entrance) for group in groups if group is not None)
    return ["sh", "-c", ENTER, "sh", *entrances, "--"]


def run_in(
    command: Sequence[str],
    memory: MemoryCgroup | None = None,
    disk: DiskCgroup | None = None,
    *,
    timeout: float,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> CgroupOutcome:
    """Run a command in open groups, at most one per controller, and wait; after `timeout` seconds, kill it with all
    processes that it started."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:  # a pipe might fill up
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*prefix_of(memory, disk), *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        timed_out = False
        with _sampling(memory) as peak:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                seconds = time.perf_counter() - begin
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                for group in (memory, disk):
                    if group is not None:
                        group.kill()
                process.wait()
        stdout.seek(0)
        stderr.seek(0)
        return CgroupOutcome(
            process.returncode,
            stdout.read().decode(errors="replace"),
            stderr.read().decode(errors="replace"),
            seconds,
            None if memory is None else memory.peak_bytes(),
            None if memory is None else peak[0],
            None if disk is None else disk.bytes_read(),
            memory is not None and memory.kills() > 0,
            timed_out,
        )


def run_limited(
    command: Sequence[str],
    *,
    memory_bytes: int | None = None,
    read_bytes_per_second: float | None = None,
    path: Path | None = None,
    timeout: float,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> CgroupOutcome:
    """Run a command in new groups with limits of memory, and of bytes per second from the disk of `path` (None: its
    reads are neither limited nor counted)."""
    assert path is not None or read_bytes_per_second is None
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(MemoryCgroup(memory_bytes))
        disk = None if path is None else stack.enter_context(DiskCgroup(read_bytes_per_second, path, memory))
        return run_in(command, memory, disk, timeout=timeout, cwd=cwd, env=env)


def drop_page_cache(*files: Path) -> bool:
    """Write back and drop the kernel's cached pages of files: of all files with root, else of `files` and of the files
    in these folders, unless a process maps them. Return whether it was all."""
    os.sync()
    try:
        DROP_CACHES.write_text("3\n")
        return True
    except OSError:
        for path in files:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file():
                    _forget(file)
        return False


def _forget(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _sampling(memory: MemoryCgroup | None) -> Iterator[list[int]]:
    """Sample in a thread; the one number in the list is the most memory that the group was seen to hold."""
    peak, done = [0], threading.Event()

    def sample() -> None:
        assert memory is not None
        while True:
            peak[0] = max(peak[0], memory.held_bytes())
            if done.wait(SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=sample, daemon=True) if memory is not None else None
    if thread is not None:
        thread.start()
    try:
        yield peak
    finally:
        done.set()
        if thread is not None:
            thread.join()


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            yield name, int(value)
