"""Bytes of a file from any offset, past the kernel's cache or through it; a file that was cut, or is gone."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memory.read_only_file import BounceBuffers, ReadOnlyFile, UnreadableFile

pytestmark = pytest.mark.fast

SIZE = 50_001  # no multiple of a block


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(random.Random(0).randbytes(SIZE))
    return tmp_path / "file"


def _open(path: Path, direct: bool) -> ReadOnlyFile:
    return ReadOnlyFile(path, BounceBuffers(8192) if direct else None)  # many chunks


def _read(file: ReadOnlyFile, start: int, size: int) -> bytes:
    found = bytearray(size)
    file.read(start, memoryview(found))
    return bytes(found)


@pytest.mark.parametrize("direct", [True, False])
def test_any_bytes_are_those_of_the_file(path: Path, direct: bool) -> None:
    file, content, choose = _open(path, direct), path.read_bytes(), random.Random(1)
    ranges = [(0, SIZE), (SIZE, 0), (4096, 8192), (4095, 2), (SIZE - 1, 1), (0, 1)]
    ranges += [(start, choose.randint(0, SIZE - start)) for start in choose.sample(range(SIZE), 40)]
    for start, size in ranges:
        assert _read(file, start, size) == content[start : start + size], (start, size)
    with ThreadPoolExecutor(3) as pool:  # each has chunks of its own
        assert list(pool.map(lambda span: _read(file, *span), ranges)) == [content[a : a + n] for a, n in ranges]
    assert not direct or file.is_direct  # else this file system has not shown it


@pytest.mark.parametrize("direct", [True, False])
def test_a_deleted_file_still_reads(path: Path, direct: bool) -> None:
    file, content = _open(path, direct), path.read_bytes()
    path.unlink()
    assert _read(file, 777, 30_000) == content[777:30_777]


@pytest.mark.parametrize("direct", [True, False])
def test_a_cut_file_is_said_in_one_line(path: Path, direct: bool) -> None:
    file = _open(path, direct)
    refusal = rf"^{path} cannot be read: "
    with pytest.raises(
        UnreadableFile, match=rf"{refusal}it ends at byte {SIZE}, but bytes up to {SIZE + 9} are needed$"
    ):
        _read(file, SIZE - 1, 10)
    os.truncate(path, 20_000)
    with pytest.raises(UnreadableFile, match=rf"{refusal}it was cut from {SIZE} to 20000 bytes while it was read$"):
        _read(file, 100, 30_000)
    assert len(_read(file, 100, 10_000)) == 10_000  # what is there reads on


def test_what_cannot_be_opened_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=f"^{tmp_path / 'none'} cannot be read: No such file"):
        ReadOnlyFile(tmp_path / "none", BounceBuffers())
    with pytest.raises(UnreadableFile, match=f"^{tmp_path} cannot be read: Is a directory"):
        _read(ReadOnlyFile(tmp_path), 0, 1)


def test_more_files_than_the_soft_limit_are_opened(path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 5, before[1]))
        assert len({_read(file, 0, 9) for file in [ReadOnlyFile(path) for _ in range(20)]}) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
