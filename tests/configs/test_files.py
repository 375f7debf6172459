"""Writing files: whole or not at all, and what is said where a disk is full, read-only or gone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs import files
from configs.files import GoneError, Log, WriteError


def refuse(number: int) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str) -> None:
    path = tmp_path / "a.json"
    files.write_text(path, "old")
    monkeypatch.setattr(os, call, refuse(number))
    with pytest.raises(WriteError, match=f"{path} cannot be written: {os.strerror(number)}. [A-Z]"):
        files.write_text(path, "new and longer")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_still_takes_what_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    monkeypatch.setattr(os, "replace", refuse(errno.ENOSPC))
    with pytest.raises(WriteError):
        files.write_text(path, "first", in_place=True)
    path.write_text("a longer text")
    files.write_text(path, "short", in_place=True)
    assert path.read_text() == "short" and [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_line_without_room_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = Log(tmp_path / "lines"), os.write
    log.write("one")
    parts = iter([2, 0])

    def half(descriptor: int, data: Any) -> int:
        size = next(parts)
        if size == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:size])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(WriteError, match="lines cannot be written: No space left on device. Make room"):
        log.write("two")
    monkeypatch.setattr(os, "write", write)
    log.write("two")
    log.close()
    assert (tmp_path / "lines").read_text() == "one\ntwo\n"


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replace(path: Path) -> None:
    move(path)
    path.mkdir()
    (path / "lines").write_text("another run's\n")


@pytest.mark.parametrize("take_away", [shutil.rmtree, move, replace])
def test_a_folder_that_goes_is_noticed(tmp_path: Path, take_away: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = Log(folder / "lines")
    log.write("one")
    take_away(folder)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(
        GoneError, match="was deleted, moved or replaced while the run wrote to it. Put it back"
    ) as caught:
        log.write("two")
    assert str(folder) in str(caught.value) and sorted(path.name for path in tmp_path.rglob("*")) == before
    assert not (folder / "lines").exists() or (folder / "lines").read_text() == "another run's\n"


def test_all_of_a_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    files.sync(tmp_path)
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    for name in ("status.json.123.tmp", "notes.tmp", "x.tmp.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "tokenizer.99.tmp").mkdir()
    (tmp_path / "tokenizer.99.tmp" / "a").write_text("")
    files.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.tmp", "x.tmp.txt"]
