"""Files that are whole or not there, and one line for what keeps them from being written. Imports nothing of
Mixtrain."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CLOSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_TEMPORARY = re.compile(r".+\.\d+\.tmp")


class WriteError(OSError):
    """A file that cannot be written. The message names it, the cause, and what can be done."""

    def __init__(self, path: Path | str, error: OSError):
        super().__init__(error.errno, error.strerror or str(error))
        self.path = str(path)

    def __str__(self) -> str:
        return f"{self.path} cannot be written: {self.strerror}. {_advice(self.errno)}"


class GoneError(WriteError):
    """A file or folder that somebody took away while it was written to."""

    def __init__(self, folder: Path, path: Path):
        super().__init__(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        self._text = f"{folder} was deleted, moved or replaced while the run wrote to it"
        if folder.is_dir():
            self._text = f"{path} was deleted, moved or replaced while the run wrote to it"

    def __str__(self) -> str:
        return f"{self._text}. Put it back to go on, or choose another run_dir."


def _advice(number: int | None) -> str:
    if number in FULL:
        return "Make room, or give a folder on another disk."
    if number in _CLOSED:
        return "Give a folder that can be written."
    return "Its folder is gone." if number in _GONE else "Look at the disk."


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Names the file in what a write to it raises: a full disk's own error names none. Raises WriteError."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from None


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Names the folder in an error of a full or read-only disk that names no file. Raises WriteError; other errors
    pass."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        if error.errno not in FULL | _CLOSED or error.filename is not None:
            raise
        raise WriteError(folder, error) from None


def temporary(path: Path) -> Path:
    """The name under which this process writes what will become `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def write_text(path: Path, text: str, *, in_place: bool = False) -> None:
    """Write a small file through to the disk, whole or not at all. Raises WriteError; what is there then stays as it
    was.

    in_place: where the disk is full, write over the file that is there; while it is small that takes no more room.
    """
    between, content = temporary(path), text.encode()
    try:
        with open(between, "wb") as stream:
            stream.write(content)
            stream.flush()
            # before the name: else a disk that fails may keep the name and lose what is in it
            os.fsync(stream.fileno())
        os.replace(between, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            between.unlink()
        if in_place and error.errno in FULL and _write_over(path, content):
            return
        raise WriteError(path, error) from None


def sync(path: Path) -> None:
    """Have a file, or all that is in a folder, through to the disk. Raises WriteError."""
    for part in [path, *(path.rglob("*") if path.is_dir() else ())]:
        with writing(part):
            descriptor = os.open(part, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _write_over(path: Path, content: bytes) -> bool:
    try:
        with open(path, "r+b", buffering=0) as stream:
            written = stream.write(content)
            stream.truncate()
            return written == len(content)
    except OSError:
        return False


def tidy(folder: Path) -> None:
    """Delete what killed processes were writing in a folder that is ours alone."""
    for path in folder.glob("*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def read_json_lines(path: Path) -> list[Any]:
    """The JSON values of a file with one a line; none where the file is missing. A line that a kill cut off is left
    out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Log:
    """A file that grows by whole lines. A line that could not be written leaves no trace."""

    def __init__(self, path: Path):
        """Raises WriteError."""
        self.path = path
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: str) -> None:
        """Add a line. Raises WriteError, and GoneError where the file is not there any more: writing on would be for
        nobody."""
        with writing(self.path):
            mine = os.fstat(self._descriptor)
            try:
                there = os.stat(self.path)
            except (FileNotFoundError, NotADirectoryError):
                there = None
            if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
                raise GoneError(self.path.parent, self.path)
            rest = memoryview(line.encode() + b"\n")
            try:
                while rest:  # a write to a disk that is almost full may be short
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, mine.st_size)
                raise

    def sync(self) -> None:
        """Have all lines through to the disk. Raises WriteError."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """No more lines; every one was written when `write` returned."""
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)
