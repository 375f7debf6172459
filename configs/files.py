"""Files that are whole or not there, and one line for what keeps them from being written. Imports nothing of
Mixtrain."""

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
MOST_YAML_BYTES, MOST_NODES = 1 << 24, 100_000  # of a file of keys and of values in it
_BLOCK = 1 << 20  # bytes that are read at once


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


@contextlib.contextmanager
def spared(path: Path | str) -> Iterator[None]:
    """For a file that tells of a run, and that no start reads back: an error of its disk is said on stderr, and ends
    nothing."""
    try:
        with writing(path):
            yield
    except WriteError as error:
        print(f"{error} The run goes on without it", file=sys.stderr, flush=True)


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
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def cut_steps(path: Path, after: int) -> str | None:
    """Take the lines of later steps than `after` off the end of a file of JSON lines, in order of their `step`: they
    come again. So does what a kill has left of a step, of which all lines but the final one may say `last` false. Reads
    from the end to the first line that stays.

    Returns a line on the steps that are missing, if any are: the file was cut, or damaged. Raises WriteError.
    """
    last = end = 0  # what is kept: a later step's line may be damaged, and only seem to be of an early one
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
    """What is said of a file that ends with a step, where the run goes on after another; None where that is the
    same."""
    if last >= after:
        return None
    lost = f"step {after} is" if last + 1 == after else f"steps {last + 1} to {after} are"
    return f"{path}: {lost} not in it, as it was cut off, damaged or not written; it goes on with step {after + 1}"


def _from_the_end(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a file, the last one first, without the newline, and where each begins."""
    position, rest = stream.seek(0, os.SEEK_END), b""
    is_whole = False  # what follows the last newline is no line
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
    """The step that ends with a line; None where none does."""
    try:
        content = json.loads(line)
        step, is_last = content["step"], content.get("last", True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return step if type(step) is int and is_last else None


class Log:
    """A file that grows by whole lines, or other pieces. One that could not be written leaves no trace."""

    def __init__(self, path: Path):
        """Raises WriteError."""
        self.path = path
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: str) -> None:
        """Add a line, or several with newlines between. Raises WriteError, and GoneError where the file is not there
        any more: writing on would be for nobody."""
        self.append(between_lines(self._descriptor) + line.encode() + b"\n")

    def append(self, content: bytes) -> None:
        """Add bytes. Raises as `write`."""
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
        """Have all that was added through to the disk. Raises WriteError."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """No more is added; all of it was written when `write` returned."""
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


def between_lines(descriptor: int) -> bytes:
    """What must come before the next line of an open file: a newline where a kill has left half a line, else
    nothing."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n" else b""


class SideLog:
    """A log of what a run can do without: an error of its disk is said once on stderr, and ends the log, not the run.
    The next start goes on with it."""

    def __init__(self, path: Path, begin: Callable[[], None] = lambda: None):
        """`begin` brings the file to where it is gone on with; it may raise OSError."""
        self._log: Log | None = None
        self._path = path
        with self._watched():
            begin()
            self._log = Log(path)

    def write(self, line: str) -> None:
        """Add a line, or several with newlines between."""
        if self._log is not None:
            with self._watched():
                self._log.write(line)

    def append(self, content: bytes) -> None:
        """Add bytes."""
        if self._log is not None:
            with self._watched():
                self._log.append(content)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            with writing(self._path):
                yield
        except WriteError as error:
            print(f"{error} The run goes on, and writes no more there", file=sys.stderr, flush=True)
            self.close()

    def close(self) -> None:
        """No more is added."""
        if self._log is not None:
            self._log.close()
            self._log = None


def read_regular(path: Path) -> bytes:
    """The bytes of a file; a pipe, on which a reader would wait for ever, or a device is none. Raises OSError."""
    if path.exists() and not path.is_file():
        number = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(number, "it is no regular file", str(path))
    return path.read_bytes()


def read_yaml(path: Path) -> Any:
    """The content of a YAML file whose aliases do not make it larger than MOST_NODES. Raises OSError, YAMLError,
    ValueError."""
    return parse_yaml(read_regular(path))


def parse_yaml(content: bytes) -> Any:
    """`read_yaml` of the bytes of a file. Raises YAMLError, ValueError."""
    import yaml

    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        """How many nodes there are with each alias written out."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = MOST_NODES  # for one that holds itself
        parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    if len(content) > MOST_YAML_BYTES:
        raise ValueError(f"{len(content)} bytes are no file of keys, of at most {MOST_YAML_BYTES}")
    try:
        if b"*" in content and (node := yaml.compose(content, yaml.SafeLoader)) is not None and size(node) > MOST_NODES:
            raise ValueError(f"its aliases (*name) make it more than {MOST_NODES} values; write them out")
        return yaml.safe_load(content)
    except RecursionError as error:
        raise ValueError("its lists or mappings are too deep") from error
