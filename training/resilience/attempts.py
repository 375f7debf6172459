"""What the attempts of one launch tell each other, where torchrun starts the ranks of a node again.

torchrun makes a folder for each launch, under a name that no other launch has, and keeps it over the restarts. Its ids
do not tell launches apart: TORCHELASTIC_RUN_ID is "none", or a name that a job which was queued again has once more.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

STOPPED, BEGUN = "stopped_early", "begun"


def note_stop() -> None:
    """The launch has stopped on purpose: ranks that torchrun starts again, as after a failure, shall end at once."""
    folder = _folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / STOPPED).touch()


def stopped() -> bool:
    """Whether an attempt of this launch has stopped on purpose."""
    folder = _folder()
    return folder is not None and (folder / STOPPED).exists()


def begun(now: float) -> float:
    """When the first attempt of this launch on this node asked this, in seconds since the epoch; `now` is the first's
    answer."""
    folder = _folder()
    if folder is None:
        return now
    try:
        descriptor = os.open(folder / BEGUN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, repr(now).encode())
        os.close(descriptor)
        return now
    except OSError:
        try:
            return float((folder / BEGUN).read_text())
        except (OSError, ValueError):  # another rank is just writing it, or the disk is full
            return now


def _folder() -> Path | None:
    """LAUNCH of torchrun's LAUNCH/attempt_K/RANK/error.json; None without torchrun, or where it keeps no such files."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or "/")
    return path.parents[2] if len(path.parents) > 3 and path.parents[1].name.startswith("attempt_") else None
