"""`run_dir/events.jsonl`: what happened to a run beside its steps, one JSON object per line, from any rank."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def record(run_dir: Path, kind: str, text: str, **fields: Any) -> None:
    """Append an event: `kind` is a word that programs look for (checkpoint_saved, resumed, ...), `text` a line for people.

    Kept whole whatever other ranks write at the same time: a line is one write to the end of the file.
    """
    line = json.dumps({"time": time.time(), "rank": int(os.environ.get("RANK", "0")), "kind": kind, "text": text, **fields})
    path = run_dir / EVENTS
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        with writing(path):
            os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Adds the file's name to what a write to an open file raises: a full disk's error names none. Raises OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All events of a run, oldest first; none where the file is missing. A line that a kill cut off is left out."""
    events = []
    path = run_dir / EVENTS
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
