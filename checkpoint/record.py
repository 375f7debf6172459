"""`run_dir/run.json`: which run a folder holds, how it was asked to start, and who is at work on it. Reads and writes
small files only.

A run keeps its id for life; its checkpoints carry it, so that nobody takes another run's for its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from configs import checksums
from configs.schema import Config, ConfigError

RECORD = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TAIL_BYTES = 1 << 20  # of metrics.jsonl, in which its last whole line lies
HEARTBEAT = 10.0  # seconds between two signs of life
SILENCE = 6 * HEARTBEAT  # without one, a process on another host is taken for dead
SAME_START = 2.0  # seconds by which two readings of one process's start may differ: clocks are set


@dataclass(frozen=True)
class Record:
    """What run.json says."""

    id: str  # 8 hexadecimal digits
    resume: str  # checkpoint.resume of the run's first start: auto, never, or an absolute path
    weights: str | None = None  # checkpoint.weights of that start, absolute
    checkpoint: str | None = None  # of another run, that this one began from; absolute
    created: float = 0.0
    saved: int = 0  # step of the newest checkpoint that was announced; 0: none was
    host: str = ""
    pid: int = 0
    process_started: float = 0.0  # seconds since 1970, as the kernel has it
    heartbeat: float = 0.0

    @property
    def began(self) -> str:
        """How the run began, in words."""
        if self.checkpoint is not None:
            return f"started from {self.checkpoint}"
        return "started fresh" if self.weights is None else f"started from the weights {self.weights}"


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "resume", "host"), str),
    **dict.fromkeys(("weights", "checkpoint"), (str, type(None))),
    **dict.fromkeys(("saved", "pid"), int),
    **dict.fromkeys(("created", "process_started", "heartbeat"), (int, float)),
}


def way(config: Config) -> tuple[str, str | None]:
    """How a command asks a run to start: `checkpoint.resume` and `checkpoint.weights`, with paths made absolute."""
    resume, weights = config.checkpoint.resume, config.checkpoint.weights
    return (
        resume if resume in ("auto", "never") else str(Path(resume).resolve()),
        None if weights is None else str(Path(weights).resolve()),
    )


def new(config: Config, checkpoint: Path | None) -> Record:
    """The record of a run that begins now, from a checkpoint of another run or from none."""
    resume, weights = way(config)
    start = None if checkpoint is None else str(checkpoint.resolve())
    return Record(secrets.token_hex(4), resume, weights if start is None else None, start, created=time.time())


def read(run_dir: Path) -> Record | None:
    """The record of a folder's run; None where there is none. Raises ConfigError for one that cannot be read."""
    path = run_dir / RECORD
    try:
        content = checksums.read_summed(path)
        known = {field.name for field in dataclasses.fields(Record)}
        found = Record(**{key: value for key, value in content.items() if key in known})
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(found, name), kinds):
                raise ValueError(f"{name} ({getattr(found, name)}) is of another kind")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({' '.join(str(error).split())}): it says which run the folder holds. "
            "Put it back; or take it away, and the run's checkpoints and events say it; or choose another run_dir."
        ) from error


def write(run_dir: Path, record: Record) -> None:
    """Put a record in place, whole or not at all. Raises OSError."""
    checksums.write_summed(run_dir / RECORD, asdict(record))


def this_process() -> dict[str, Any]:
    """Host, pid and start of the process that asks, as `is_alive` compares them."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time()}


def is_alive(record: Record) -> bool:
    """Whether the process that the record names is still at work: on this host by its pid and start, elsewhere by its
    heartbeat."""
    if record.host != socket.gethostname():
        return time.time() - record.heartbeat < SILENCE
    try:
        return abs(psutil.Process(record.pid).create_time() - record.process_started) < SAME_START
    except psutil.Error:
        return False


class Keeper:
    """Keeps the record of the run that this process works on, with a sign of life every HEARTBEAT seconds."""

    def __init__(self, run_dir: Path, record: Record):
        """Raises OSError where the record cannot be written."""
        self._run_dir, self._lock, self._ended = run_dir, threading.Lock(), threading.Event()
        self.record = dataclasses.replace(record, **this_process())
        self.note()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def note(self, **facts: Any) -> None:
        """Write fields of the record, and that the run is alive. Raises OSError."""
        with self._lock:
            self.record = dataclasses.replace(self.record, **facts, heartbeat=time.time())
            write(self._run_dir, self.record)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with contextlib.suppress(OSError):  # a full disk is told by who has something to lose
                self.note()

    def close(self) -> None:
        """No more signs of life."""
        self._ended.set()
        self._thread.join(HEARTBEAT)


def last_step(run_dir: Path) -> int:
    """The last step that metrics.jsonl holds; 0 where it holds none."""
    try:
        with open(run_dir / METRICS, "rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # the end of a line that a kill cut off
    return 0
