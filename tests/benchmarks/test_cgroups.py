"""Control groups: what the kernel did to a command, and which files of version 2 would be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.kit import cgroups
from benchmarks.kit.cgroups import (
    Controller,
    DiskCgroup,
    MemoryCgroup,
    can_limit_disk,
    can_limit_memory,
    disk_of,
    drop_page_cache,
    find_controller,
    prefix_of,
    run_in,
    run_limited,
)
from tests.waits import LONG

MIB = 2**20
needs_memory = pytest.mark.skipif(can_limit_memory() is not None, reason=can_limit_memory() or "")


@needs_memory
def test_outcome() -> None:
    outcome = run_limited([sys.executable, "-c", f"x = b'1' * {40 * MIB}; print(len(x)); exit(3)"], timeout=LONG)
    assert (outcome.status, outcome.stdout, outcome.verdict()) == (3, f"{40 * MIB}\n", "failed with status 3")
    assert outcome.peak_bytes is not None and outcome.peak_bytes > 40 * MIB
    assert outcome.disk_bytes is None and not outcome.out_of_memory and not outcome.timed_out


@needs_memory
def test_killed_for_memory() -> None:
    with MemoryCgroup(24 * MIB) as memory:
        outcome = run_in([sys.executable, "-c", f"bytearray({200 * MIB})"], memory, timeout=LONG)
        folder = memory.folder
    assert (outcome.status, outcome.out_of_memory, outcome.verdict()) == (-9, True, "killed: out of memory")
    assert outcome.peak_bytes is not None and outcome.peak_bytes <= 24 * MIB
    assert folder is not None and not folder.exists()


@needs_memory
def test_peak_without_pages_of_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(48 * MIB))
    drop_page_cache(tmp_path)
    code = f"x = b'1' * {16 * MIB}; open({str(tmp_path / 'file')!r}, 'rb').read({MIB}); import time; time.sleep(0.3)"
    outcome = run_limited(
        ["sh", "-c", f'cat {tmp_path}/file > /dev/null; exec "$@"', "sh", sys.executable, "-c", code], timeout=LONG
    )
    assert outcome.peak_bytes is not None and outcome.peak_held_bytes is not None
    assert 16 * MIB < outcome.peak_held_bytes < 48 * MIB < outcome.peak_bytes


@needs_memory
def test_timeout_ends_what_was_started() -> None:
    with MemoryCgroup() as memory:
        outcome = run_in(["sh", "-c", "setsid sleep 600 & sleep 600"], memory, timeout=0.5)
        assert outcome.timed_out and outcome.status == -9 and not memory.entrance.read_text()


@needs_memory
@pytest.mark.skipif(can_limit_disk(Path.cwd()) is not None, reason=can_limit_disk(Path.cwd()) or "")
def test_disk_bytes(tmp_path: Path) -> None:
    if (reason := can_limit_disk(tmp_path)) is not None:
        pytest.skip(reason)
    (tmp_path / "file").write_bytes(bytes(8 * MIB))
    drop_page_cache(tmp_path)
    read = ["dd", f"if={tmp_path}/file", "of=/dev/null", "bs=1M", "iflag=direct"]
    outcome = run_limited(read, memory_bytes=64 * MIB, read_bytes_per_second=64 * MIB, path=tmp_path, timeout=LONG)
    assert outcome.status == 0 and outcome.disk_bytes is not None and outcome.disk_bytes >= 8 * MIB


def test_tmpfs_is_on_no_disk(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    with pytest.raises(ValueError, match="/dev/shm is on no disk"):
        disk_of(Path("/dev/shm"))
    assert can_limit_disk(Path("/dev/shm")) is not None


class FakeSecondVersion:
    """A tree of version 2 in which this process is in /a/b, and /a hands both controllers on."""

    def __init__(self, root: Path) -> None:
        self.mounts, self.own, self.tree = root / "mounts", root / "own", root / "tree"
        (self.tree / "a/b").mkdir(parents=True)
        self.mounts.write_text(f"cgroup2 {self.tree} cgroup2 rw 0 0\n")
        self.own.write_text("0::/a/b\n")
        (self.tree / "cgroup.controllers").write_text("cpu io memory\n")
        (self.tree / "a/cgroup.subtree_control").write_text("io memory\n")
        (self.tree / "a/b/cgroup.subtree_control").write_text("\n")

    def find(self, name: str) -> Controller | str:
        return find_controller(name, self.mounts, self.own)


@pytest.mark.fast
def test_second_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSecondVersion(tmp_path)
    assert fake.find("memory") == fake.find("blkio") == Controller(2, fake.tree / "a")
    monkeypatch.setattr(cgroups, "find_controller", fake.find)
    monkeypatch.setattr(cgroups, "disk_of", lambda path: "8:0")
    memory = MemoryCgroup(100)
    memory.make()
    assert memory.folder is not None and memory.folder.parent == fake.tree / "a"
    (memory.folder / "memory.swap.max").touch()
    memory._limit()
    assert (memory.folder / "memory.max").read_text() == "100"
    assert (memory.folder / "memory.swap.max").read_text() == "0"
    with DiskCgroup(5e6, tmp_path, memory) as disk:
        assert prefix_of(memory, disk)[4:] == [str(memory.folder / "cgroup.procs"), "--"]
        assert (memory.folder / "io.max").read_text() == "8:0 rbps=5000000"
        (memory.folder / "io.stat").write_text("8:0 rbytes=77 wbytes=5 rios=1\n")
        assert disk.bytes_read() == 77
    (memory.folder / "memory.stat").write_text("anon 5\nfile 70\nshmem 2\nkernel 1\n")
    (memory.folder / "memory.peak").write_text("90\n")
    (memory.folder / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert (memory.peak_bytes(), memory.held_bytes(), memory.kills()) == (90, 8, 1)


@pytest.mark.fast
def test_second_version_that_is_not_handed_on(tmp_path: Path) -> None:
    fake = FakeSecondVersion(tmp_path)
    (fake.tree / "a/cgroup.subtree_control").write_text("cpu\n")
    found = fake.find("blkio")
    assert found == "no control group above this process gives its io controller to groups below it"
    fake.mounts.write_text("tmpfs /tmp tmpfs rw 0 0\n")
    assert fake.find("memory") == "no control groups have a memory controller here"
