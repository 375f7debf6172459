"""`run_dir/run.json`: the id of the folder's run, how the run was started, and the process that works on it. A run
keeps its id for life; its checkpoints contain it, so that checkpoints of different runs are not confused."""

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

from base import checksums
from base.errors import ConfigError
from configs.keys import TYPE_NAMES
from configs.schema import Config

RECORD = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TAIL_BYTES = 1 << 20  # at the end of metrics.jsonl, which contain its last whole line
HEARTBEAT = 10.0  # seconds between two heartbeats
SILENCE = 6 * HEARTBEAT  # seconds without a heartbeat after which a process on another host counts as dead
SAME_START = 2.0  # seconds by which two readings of a process's start may differ, because clocks are adjusted


@dataclass(frozen=True)
class Record:
    """A run's record, stored in run.json: how it started, its newest checkpoint, and the process that works on it."""

    id: str  # 8 hexadecimal digits
    resume: str  # checkpoint.resume of the run's first start: auto, never, or an absolute path
    weights: str | None = None  # checkpoint.weights of that start, absolute
    checkpoint: str | None = None  # of another run, from which this one started; absolute
    created: float = 0.0
    saved: int = 0  # step of the newest checkpoint that was announced; 0: none
    host: str = ""
    pid: int = 0
    process_started: float = 0.0  # seconds since 1970, from the kernel
    heartbeat: float = 0.0

    @property
    def origin_text(self) -> str:
        """A predicate that describes how the run started, such as "started fresh"."""
        if self.checkpoint is not None:
            return f"started from {self.checkpoint}"
        return "started fresh" if self.weights is None else f"started from the weights {self.weights}"


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "resume", "host"), str),
    **dict.fromkeys(("weights", "checkpoint"), (str, type(None))),
    **dict.fromkeys(("saved", "pid"), int),
    **dict.fromkeys(("created", "process_started", "heartbeat"), (int, float)),
}


def _kind_text(kinds: type | tuple[type, ...]) -> str:
    return " or ".join(TYPE_NAMES[kind] for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def requested_start(config: Config) -> tuple[str, str | None]:
    """Return the config's checkpoint.resume and checkpoint.weights, with absolute paths."""
    resume, weights = config.checkpoint.resume, config.checkpoint.weights
    resume = resume if resume in ("auto", "never") else str(Path(resume).resolve())
    return resume, None if weights is None else str(Path(weights).resolve())


def new(config: Config, checkpoint: Path | None) -> Record:
    """Return the record of a run that starts now, from a checkpoint of another run if `checkpoint` is given."""
    resume, weights = requested_start(config)
    start = None if checkpoint is None else str(checkpoint.resolve())
    return Record(secrets.token_hex(4), resume, weights if start is None else None, start, created=time.time())


def read(run_dir: Path) -> Record | None:
    """Return the record (run.json) in a run's folder, or None if it has none. Raises ConfigError."""
    path = run_dir / RECORD
    try:
        content = checksums.read_summed(path)
        known = {field.name for field in dataclasses.fields(Record)}
        if missing := [name for name in ("id", "resume") if name not in content]:
            raise ValueError(f"it lacks {missing[0]!r}")
        found = Record(**{key: value for key, value in content.items() if key in known})
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(found, name), kinds):
                raise ValueError(f"its {name} ({getattr(found, name)}) must be {_kind_text(kinds)}")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}, which says which run the folder belongs to, cannot be read ({' '.join(str(error).split())}). "
            "Restore it, or delete it (checkpoints and events then identify the run), or choose another run_dir."
        ) from error


def write(run_dir: Path, record: Record) -> None:
    """Write a record atomically. Raises OSError."""
    checksums.write_summed(run_dir / RECORD, asdict(record))


def this_process() -> dict[str, Any]:
    """Return host, pid and start time of this process, which `is_alive` compares."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time()}


def is_alive(record: Record) -> bool:
    """Return whether the process of a record still runs, by pid and start time on this host, else by its heartbeat."""
    if record.host != socket.gethostname():
        return time.time() - record.heartbeat < SILENCE
    try:
        return abs(psutil.Process(record.pid).create_time() - record.process_started) < SAME_START
    except psutil.Error:
        return False


class Keeper:
    """Updates run.json while this process works on the run, with a heartbeat every HEARTBEAT seconds."""

    def __init__(self, run_dir: Path, record: Record):
        """Write the record and start the heartbeats. Raises OSError if the record cannot be written."""
        self._run_dir, self._lock, self._ended = run_dir, threading.Lock(), threading.Event()
        self.record = dataclasses.replace(record, **this_process())
        self.note()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def note(self, **facts: Any) -> None:
        """Write changed fields and the time of a heartbeat to the record. Raises OSError."""
        with self._lock:
            self.record = dataclasses.replace(self.record, **facts, heartbeat=time.time())
            write(self._run_dir, self.record)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with contextlib.suppress(OSError):  # the writers of data report a full disk
                self.note()

    def close(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()
        self._thread.join(HEARTBEAT)


def last_step(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl; 0 if there is none."""
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
            continue  # a line that a kill cut off
    return 0
