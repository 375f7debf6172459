"""A scratch file: its bytes are exact, it leaves nothing, and what a folder cannot do is said in one line."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import ConfigError
from memory import disk as disk_module
from memory.disk import Disk, aligned, offsets
from memory.host_memory import BLOCK

pytestmark = pytest.mark.fast

BLOCKS = 16


def numbers(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = aligned(num_bytes, pinned=False)
    return tensor.copy_(torch.randint(256, tensor.shape, dtype=torch.uint8, generator=generator))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(str(tmp_path), BLOCKS * BLOCK)
    yield made
    made.close()


def test_bytes_come_back_as_they_were(disk: Disk) -> None:
    first, second = numbers(5 * BLOCK, 1), numbers(3 * BLOCK, 2)
    disk.write_from(0, first)
    disk.write_from(5 * BLOCK, second)
    both = aligned(8 * BLOCK, pinned=False)
    disk.read_into(0, both)
    assert torch.equal(both, torch.cat([first, second]))
    assert (disk.num_written, disk.num_read) == (8 * BLOCK, 8 * BLOCK)


def test_aligned_memory_is_whole_blocks() -> None:
    for num_bytes in (1, BLOCK, BLOCK + 1, 10**6):
        memory = aligned(num_bytes, pinned=False)
        assert memory.data_ptr() % BLOCK == 0 and memory.is_contiguous()
        assert num_bytes <= memory.numel() < num_bytes + BLOCK and memory.numel() % BLOCK == 0
    assert offsets([1, 0, BLOCK, BLOCK + 1]) == [0, BLOCK, BLOCK, 2 * BLOCK, 4 * BLOCK]


def test_the_file_has_no_name_and_all_its_blocks(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path), BLOCKS * BLOCK)
    there = os.fstat(disk._file.fileno())
    assert list(tmp_path.iterdir()) == [] and there.st_nlink == 0
    assert there.st_size == BLOCKS * BLOCK <= there.st_blocks * 512
    content = numbers(BLOCK, 3)
    tmp_path.rmdir()  # a folder that goes away changes nothing
    disk.write_from(0, content)
    read = aligned(BLOCK, pinned=False)
    disk.read_into(0, read)
    assert torch.equal(read, content)
    disk.close()


def test_short_reads_and_writes_go_on(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from the midst of a block, from where direct I/O cannot go on."""
    calls = []

    def short(function: Any) -> Any:
        def call(fd: int, data: Any, offset: int) -> int:
            view = data[0] if isinstance(data, list) else data
            half = view[: max(len(view) // 2 // BLOCK, 1) * BLOCK]
            calls.append(offset)
            count: int = function(fd, [half] if isinstance(data, list) else half, offset)
            return count - 100 if count > BLOCK else count

        return call

    monkeypatch.setattr(os, "preadv", short(os.preadv))
    monkeypatch.setattr(os, "pwrite", short(os.pwrite))
    content, read = numbers(9 * BLOCK, 4), aligned(9 * BLOCK, pinned=False)
    disk.write_from(BLOCK, content)
    disk.read_into(BLOCK, read)
    assert torch.equal(read, content)
    assert len(calls) > 8 and all(offset % BLOCK == 0 for offset in calls)


def test_several_threads_read_and_write(disk: Disk) -> None:
    contents = [numbers(2 * BLOCK, seed) for seed in range(8)]
    found: dict[int, bool] = {}

    def work(index: int) -> None:
        read = aligned(2 * BLOCK, pinned=False)
        for _ in range(20):
            disk.write_from(2 * index * BLOCK, contents[index])
            disk.read_into(2 * index * BLOCK, read)
            found[index] = found.get(index, True) and torch.equal(read, contents[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(8), True)
    assert disk.num_written == disk.num_read == 8 * 20 * 2 * BLOCK


@pytest.mark.parametrize("refused_by", ["the flag", "the first write"])
def test_where_direct_io_is_refused_it_is_said(
    tmp_path: Path, refused_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags, write = fcntl.fcntl, os.pwrite

    def fcntl_(fd: int, command: int, *flags: int) -> int:
        if refused_by == "the flag" and command == fcntl.F_SETFL and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(fd, command, *flags)

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if refused_by == "the first write" and set_flags(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data, offset)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    disk = Disk(str(tmp_path), BLOCKS * BLOCK)
    assert not disk.is_direct
    content, read = numbers(BLOCK, 5), aligned(BLOCK, pinned=False)
    disk.write_from(0, content)
    disk.read_into(0, read)
    assert torch.equal(read, content)
    disk.close()


@pytest.mark.parametrize(("function", "says"), [("pwrite", "cannot be written"), ("preadv", "cannot be read")])
def test_an_error_of_the_disk_names_its_folder(
    disk: Disk, function: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, function, fail)
    call = disk.write_from if function == "pwrite" else disk.read_into
    with pytest.raises(OSError) as caught:
        call(0, numbers(BLOCK, 6))
    assert caught.value.errno == errno.EIO
    advice = "Check the disk, or use a folder on another disk"
    assert str(caught.value) == f"memory.disk_dir ({disk.folder}) {says}: Input/output error. {advice}"


def test_a_file_that_ends_early_is_an_error(disk: Disk) -> None:
    os.ftruncate(disk._file.fileno(), BLOCK)
    with pytest.raises(OSError, match=r"memory.disk_dir \(.*\) cannot be read: only 0 of 4096 bytes were transferred"):
        disk.read_into(0, aligned(2 * BLOCK, pinned=False))


def refusal(folder: Path | str, num_bytes: int = BLOCK) -> str:
    with pytest.raises(ConfigError) as caught:
        Disk(str(folder), num_bytes)
    message = str(caught.value)
    assert message.startswith(f"memory.disk_dir ({folder}) must ") and "\n" not in message
    return message


def test_a_folder_that_cannot_hold_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"Try mkdir -p {tmp_path / 'missing'}" in refusal(tmp_path / "missing")
    (tmp_path / "file").touch()
    assert f"Try memory.disk_dir={tmp_path}" in refusal(tmp_path / "file")
    assert f"Try memory.disk_dir={tmp_path}" in refusal(tmp_path / "file" / "below")
    (tmp_path / "file").unlink()
    assert f"Try mkdir -p '{tmp_path}/two words/below'" in refusal(tmp_path / "two words" / "below")
    assert refusal("/proc/missing").endswith("Try another folder")
    assert "must be a writable folder" in refusal("/proc/self")
    assert "1.07e+09 GiB free" in refusal(tmp_path, 2**60)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "Free some space, or use a folder on another disk" in refusal(tmp_path, 2**30)
    monkeypatch.undo()
    monkeypatch.setattr(disk_module, "_file_system", lambda folder: 0x858458F6)
    assert "ramfs stores files in host memory. Try optimizer.state_device=host" in refusal(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this machine has no /dev/shm")
def test_tmpfs_is_refused() -> None:
    assert "tmpfs stores files in host memory" in refusal("/dev/shm")
