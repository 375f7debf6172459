"""Writing files: whole or not at all, and what is said where a disk is full, read-only or gone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from base import files
from base.files import GoneError, Log, SideLog, WriteError

pytestmark = pytest.mark.fast


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


def test_a_line_on_a_full_disk_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = Log(tmp_path / "lines"), os.write
    log.write("one")
    sizes = iter([2, 0])

    def half(descriptor: int, data: Any) -> int:
        size = next(sizes)
        if size == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:size])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(WriteError, match="lines cannot be written: No space left on device. Free some space"):
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


def lines_of(*steps: int) -> bytes:
    return b"".join(b'{"step": %d, "text": "%s"}\n' % (step, b"x" * (step % 7)) for step in steps)


@pytest.mark.parametrize("block", [7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "after", "kept", "said"),
    [
        (lines_of(1, 2, 3), 3, lines_of(1, 2, 3), None),
        (lines_of(1, 2, 2, 3, 3), 2, lines_of(1, 2, 2), None),
        (lines_of(1, 2, 3), 0, b"", None),
        (lines_of(1, 2) + lines_of(3)[:-1], 2, lines_of(1, 2), None),  # half a line of a step that comes again
        (lines_of(1, 2) + lines_of(3)[:-1], 3, lines_of(1, 2), "lacks step 3 ("),
        (lines_of(1)[:-4], 3, b"", "lacks steps 1 to 3 ("),
        (b"", 2, b"", "lacks steps 1 to 2 ("),
        (lines_of(1) + b"[]\n\xff\xfe\n\n" + b"[" * 9999 + b"\n", 1, lines_of(1), None),
        (lines_of(1) + b"a\xff\n" + lines_of(3), 3, lines_of(1) + b"a\xff\n" + lines_of(3), None),
    ],
)
def test_later_steps_and_half_lines_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, content: bytes, after: int, kept: bytes, said: Any
) -> None:
    monkeypatch.setattr(files, "_BLOCK", block)
    path = tmp_path / "lines"
    path.write_bytes(content)
    text = files.cut_steps(path, after)
    assert path.read_bytes() == kept
    assert text is None if said is None else text is not None and text.startswith(f"{path} {said}")
    assert files.cut_steps(tmp_path / "none", 5) is None and not (tmp_path / "none").exists()


def test_a_later_line_that_is_damaged_does_not_end_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(lines_of(*range(1, 118)) + lines_of(17) + lines_of(119, 120))
    assert files.cut_steps(path, 100) is None
    assert path.read_bytes() == lines_of(*range(1, 101))


def test_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK", 64)
    path, step_of = tmp_path / "lines", files._step_of
    read: list[int | None] = []

    def noted(line: bytes) -> int | None:
        read.append(step_of(line))
        return read[-1]

    path.write_bytes(lines_of(*range(1, 2000)))
    monkeypatch.setattr(files, "_step_of", noted)
    files.cut_steps(path, 1997)
    assert len(read) == 4 and path.read_bytes() == lines_of(*range(1, 1998))


def test_a_line_after_half_a_line_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"b"')
    log = Log(tmp_path / "lines")
    log.write('{"c": 3}')
    log.write('{"d": 4}')
    assert files.read_json_lines(tmp_path / "lines") == [{"a": 1}, {"c": 3}, {"d": 4}]


def test_what_a_run_can_do_without_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = SideLog(tmp_path / "lines")
    log.write("one")
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse(errno.ENOSPC))
        log.write("two")
    log.write("three")  # none is left out in between
    log.append(b"four")
    log.close()
    assert (tmp_path / "lines").read_text() == "one\n"
    with files.spared(tmp_path / "page"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    SideLog(tmp_path / "none" / "lines").write("one")
    again = SideLog(tmp_path / "lines")
    again.write("five")
    again.close()
    assert (tmp_path / "lines").read_text() == "one\nfive\n"
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" cannot be written: ")[0] for line in said] == [
        str(tmp_path / "lines"),
        str(tmp_path / "page"),
        str(tmp_path / "none" / "lines"),
    ]
    assert all("The run continues" in line for line in said)
