"""`run_dir/events.jsonl`: what happened to a run beside its steps, one JSON object per line, from any rank."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from checkpoint.record import EVENTS
from configs import files
from configs.ranks import launched

__all__ = ["EVENTS", "INCOMPLETE", "read", "record", "say"]

INCOMPLETE = "record_incomplete"  # the kind of event that tells what a file of the run lacks


def record(run_dir: Path, kind: str, text: str, **fields: Any) -> None:
    """Append an event: `kind` is a word that programs look for (checkpoint_saved, resumed, ...), `text` a line for
    people.

    Kept whole whatever other ranks write at the same time: a line is one write to the end of the file. One that cannot
    be written is said on stderr in its place: an event tells of a run, and does not stop it.
    """
    line = json.dumps({"time": time.time(), "rank": launched().rank, "kind": kind, "text": text, **fields})
    path = run_dir / EVENTS
    try:
        with files.writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                content = files.between_lines(descriptor) + line.encode() + b"\n"
                if os.write(descriptor, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
    except files.WriteError as error:
        print(f"{error} The event was {kind}: {text}", file=sys.stderr, flush=True)


def say(run_dir: Path, kind: str, text: str, **fields: Any) -> None:
    """Print a line, and record it as an event."""
    print(text, flush=True)
    record(run_dir, kind, text, **fields)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All events of a run, oldest first; none where the file is missing. A line that a kill cut off is left out."""
    return files.read_json_lines(run_dir / EVENTS)
