"""`run_dir/events.jsonl`: the events of a run other than its steps, one JSON object per line, from any rank."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from base import files
from base.ranks import launched
from checkpoint.record import EVENTS

__all__ = ["EVENTS", "INCOMPLETE", "log", "read", "record"]

INCOMPLETE = "record_incomplete"  # the kind of event that names what a file of the run lacks


def record(run_dir: Path, kind: str, text: str, **fields: Any) -> None:
    """Append an event to events.jsonl: `kind` is a word that programs search for (checkpoint_saved, resumed, ...),
    `text` a line for people. Each line is appended in one write, so that lines of several ranks do not mix. An event
    that cannot be written is printed to stderr, and the run continues."""
    line = json.dumps({"time": time.time(), "rank": launched().rank, "kind": kind, "text": text, **fields})
    path = run_dir / EVENTS
    try:
        with files.writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                content = files.line_separator(descriptor) + line.encode() + b"\n"
                if os.write(descriptor, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
    except files.WriteError as error:
        print(f"{error} The event was {kind}: {text}", file=sys.stderr, flush=True)


def log(run_dir: Path, kind: str, text: str, **fields: Any) -> None:
    """Print a line, and record it as an event."""
    print(text, flush=True)
    record(run_dir, kind, text, **fields)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return all events of a run, oldest first, without truncated lines; [] if the file is missing."""
    return files.read_json_lines(run_dir / EVENTS)
