"""Atomic writes, append-only logs and safe reads of files. A failed write raises WriteError, a message of one line.
Imports nothing of Mixtrain."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CLOSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_TEMPORARY = re.compile(r".+\.\d+\.tmp")
MOST_YAML_BYTES, MOST_NODES = 1 << 24, 100_000  # limits of a YAML file
_BLOCK = 1 << 20  # bytes per read


class WriteError(OSError):
    """A file cannot be written. The message names the file, the cause and a remedy."""

    def __init__(self, path: Path | str, error: OSError):
        super().__init__(error.errno, error.strerror or str(error))
        self.path = str(path)

    def __str__(self) -> str:
        advice = "Its folder no longer exists." if self.errno in _GONE else "Check the disk."
        if self.errno in FULL:
            advice = "Free some space, or choose a folder on another disk."
        elif self.errno in _CLOSED:
            advice = "Choose a folder that can be written to."
        return f"{self.path} cannot be written: {self.strerror}. {advice}"


class GoneError(WriteError):
    """A file or folder was removed while this process wrote to it."""

    def __init__(self, folder: Path, path: Path):
        super().__init__(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        gone = path if folder.is_dir() else folder
        self._text = f"{gone} was deleted, moved or replaced while the run wrote to it"

    def __str__(self) -> str:
        return f"{self._text}. Put it back and start the run again, or choose another run_dir."


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn an OSError of the `with` block into a WriteError that names the file. A full disk's error names no file."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from None


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """If the `with` block raises an OSError, delete the folder's partly written files (*.tmp*). If the disk is full or
    read-only and the error names no file, raise a WriteError that names the folder."""
    try:
        yield
    except OSError as error:
        for leftover in folder.rglob("*.tmp*"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        if isinstance(error, WriteError) or error.errno not in FULL | _CLOSED or error.filename is not None:
            raise
        raise WriteError(folder, error) from None


@contextlib.contextmanager
def spared(path: Path | str) -> Iterator[None]:
    """Print the error of a failed write in the `with` block on stderr instead of raising it."""
    try:
        with writing(path):
            yield
    except WriteError as error:
        print(f"{error} The run continues without this file.", file=sys.stderr, flush=True)


def temporary(path: Path) -> Path:
    """Return the temporary path at which this process writes the content of `path` before it is renamed."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def write_text(path: Path, text: str, *, in_place: bool = False) -> None:
    """Write a small text file atomically and sync it to the disk. Raises WriteError; an existing file then stays as it
    was.

    in_place: on a full disk, overwrite the existing file, which takes no additional space.
    """
    scratch, content = temporary(path), text.encode()
    try:
        with open(scratch, "wb") as stream:
            stream.write(content)
            stream.flush()
            # before the rename: otherwise a failing disk may store the name without the content
            os.fsync(stream.fileno())
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        if in_place and error.errno in FULL and _write_over(path, content):
            return
        raise WriteError(path, error) from None


def sync(path: Path) -> None:
    """Sync a file, or a folder and everything in it, to the disk. Raises WriteError."""
    for each in [path, *(path.rglob("*") if path.is_dir() else ())]:
        with writing(each):
            descriptor = os.open(each, os.O_RDONLY)
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
    """Delete the temporary files that killed processes left in a folder. No other run may use the folder."""
    for path in folder.glob("*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def read_json_lines(path: Path) -> list[Any]:
    """Return the values of a JSON-lines file, skipping lines that are not JSON; [] if the file is missing."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def cut_steps(path: Path, after: int) -> str | None:
    """Remove all lines after step `after` from a JSON-lines file ordered by `step`, because the resumed run writes
    those steps again. A step may have several lines; all but the last have `last` false. A step without its last line
    is removed too. Reads the file backwards, up to the first line that stays.

    Returns a message about missing steps if the file was cut off or damaged, else None. Raises WriteError.
    """
    last = end = 0  # step and end of the lines to keep; a damaged line may show a wrong, earlier step
    with writing(path):
        try:
            stream = open(path, "r+b")
        except FileNotFoundError:
            return None
        with stream:
            for start, line in _from_the_end(stream):
                step = _step_of(line)
                if step is None:
                    continue
                if end and step <= last:
                    break
                last, end = (step, start + len(line) + 1) if step <= after else (0, 0)
            if end < stream.seek(0, os.SEEK_END):
                stream.truncate(end)
    return missing(path, last, after)


def missing(path: Path, last: int, after: int) -> str | None:
    """Return a message about the steps that a log file lacks if it ends with step `last` and the run resumes after step
    `after`; None if the file lacks none."""
    if last >= after:
        return None
    lost = f"step {after}" if last + 1 == after else f"steps {last + 1} to {after}"
    return f"{path} lacks {lost} (it was cut off, damaged or not written). The run continues it with step {after + 1}."


def _from_the_end(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield byte offset and content (without newline) of each complete line of a file, from last to first."""
    position, rest = stream.seek(0, os.SEEK_END), b""
    is_whole = False  # text after the last newline is an incomplete line
    while position > 0:
        size = min(_BLOCK, position)
        position -= size
        stream.seek(position)
        block = stream.read(size) + rest
        rest, *lines = block.split(b"\n")
        start = position + len(block) + 1
        for line in reversed(lines):
            start -= len(line) + 1
            if is_whole:
                yield start, line
            is_whole = True
    if is_whole:
        yield 0, rest


def _step_of(line: bytes) -> int | None:
    """Return the step number of a JSON line if it is the last line of its step, else None."""
    try:
        content = json.loads(line)
        step, is_last = content["step"], content.get("last", True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return step if type(step) is int and is_last else None


class Log:
    """An append-only file of lines or blocks of bytes. If a block cannot be written in full, none of it stays in the
    file."""

    def __init__(self, path: Path):
        """Open the file, or create it. Raises WriteError."""
        self.path = path
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: str) -> None:
        """Append one line, or several lines separated by newlines. Raises WriteError, or GoneError if the file was
        removed from its folder."""
        self.append(line_separator(self._descriptor) + line.encode() + b"\n")

    def append(self, content: bytes) -> None:
        """Append bytes to the file. Raises WriteError, or GoneError if the file was removed from its folder."""
        with writing(self.path):
            mine = os.fstat(self._descriptor)
            try:
                there = os.stat(self.path)
            except (FileNotFoundError, NotADirectoryError):
                there = None
            if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
                raise GoneError(self.path.parent, self.path)
            rest = memoryview(content)
            try:
                while rest:  # a write to a disk that is almost full may be short
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, mine.st_size)
                raise

    def sync(self) -> None:
        """Sync the appended content to the disk. Raises WriteError."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. Nothing is buffered: `write` has already written everything."""
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


def line_separator(descriptor: int) -> bytes:
    """Return the bytes to write before the next line of an open file: a newline if a kill left an incomplete last line,
    else no bytes."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n" else b""


class SideLog:
    """A log file that the run can do without: the first failed write is printed on stderr and closes the log, while the
    run continues. The next start of the run appends to the log again."""

    def __init__(self, path: Path, begin: Callable[[], None] = lambda: None):
        """Call `begin`, which may prepare the file and raise OSError, and open the log."""
        self._log: Log | None = None
        self._path = path
        with self._watched():
            begin()
            self._log = Log(path)

    def write(self, line: str) -> None:
        """Append one line, or several lines separated by newlines. A failed write closes the log."""
        if self._log is not None:
            with self._watched():
                self._log.write(line)

    def append(self, content: bytes) -> None:
        """Append bytes to the log. A failed write closes the log."""
        if self._log is not None:
            with self._watched():
                self._log.append(content)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            with writing(self._path):
                yield
        except WriteError as error:
            print(f"{error} The run continues, but no longer writes to this file.", file=sys.stderr, flush=True)
            self.close()

    def close(self) -> None:
        """Close the log; further writes do nothing."""
        if self._log is not None:
            self._log.close()
            self._log = None


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError, also for a device or a pipe, whose reading could block."""
    if path.exists() and not path.is_file():
        number = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(number, "it is not a regular file", str(path))
    return path.read_bytes()


def read_yaml(path: Path) -> Any:
    """Return the content of a regular YAML file of limited size. Raises OSError, YAMLError, ValueError."""
    return parse_yaml(read_regular(path))


def parse_yaml(content: bytes) -> Any:
    """Return the content of a YAML text. Raises YAMLError; raises ValueError if the text has more than MOST_YAML_BYTES,
    or more than MOST_NODES values after its aliases are expanded."""
    import yaml

    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        """Return the number of values in a YAML node, with each alias expanded."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = MOST_NODES  # for a node that contains itself
        children = [child for pair in node.value for child in (pair if isinstance(pair, tuple) else (pair,))]
        sizes[id(node)] = 1 + sum(map(size, children))
        return sizes[id(node)]

    if len(content) > MOST_YAML_BYTES:
        raise ValueError(f"the file has {len(content)} bytes, and a configuration may have at most {MOST_YAML_BYTES}")
    try:
        if b"*" in content and (node := yaml.compose(content, yaml.SafeLoader)) is not None and size(node) > MOST_NODES:
            raise ValueError(f"its aliases (*name) expand to more than {MOST_NODES} values; write the values out")
        return yaml.safe_load(content)
    except RecursionError as error:
        raise ValueError("its lists or mappings are nested more deeply than Python can read") from error
