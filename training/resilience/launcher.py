"""End a rank whose launcher is gone, and share marks between the attempts of one launch.

Without its launcher nothing would end a rank, and it would lock the run's folder for as long as it trains.

torchrun creates a folder with a unique name for each launch and keeps it when it restarts the ranks; the marks are
files in this folder. TORCHELASTIC_RUN_ID does not identify a launch: it is "none", or a name that a requeued job uses
again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from base import exit_handler

STOPPED, STARTED = "stopped_early", "begun"  # files in the launch's folder
POLL = 0.5  # seconds
GRACE_SECONDS = 3.0  # for what `on_gone` writes


def note_stop() -> None:
    """Mark this launch as stopped on purpose, so that ranks which torchrun restarts end at once."""
    if (folder := _launch_folder()) is not None:
        with contextlib.suppress(OSError):
            (folder / STOPPED).touch()


def has_stopped() -> bool:
    """Return whether an earlier attempt of this launch stopped on purpose."""
    folder = _launch_folder()
    return folder is not None and (folder / STOPPED).exists()


def first_start(now: float) -> float:
    """Return the time (epoch seconds) at which the first attempt of this launch on this node started. The first call
    stores `now` as this time."""
    folder = _launch_folder()
    if folder is None:
        return now
    try:
        descriptor = os.open(folder / STARTED, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, repr(now).encode())
        os.close(descriptor)
        return now
    except OSError:
        try:
            return float((folder / STARTED).read_text())
        except (OSError, ValueError):  # another rank is just writing it, or the disk is full
            return now


def _launch_folder() -> Path | None:
    """Return torchrun's folder of this launch, which contains attempt_K/RANK/error.json; None without torchrun or its
    error files."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or "/")
    return path.parents[2] if len(path.parents) > 3 and path.parents[1].name.startswith("attempt_") else None


class Launcher:
    """Ends this rank when the torchrun process that started the rank is gone. Does nothing without torchrun, because a
    process may outlive its shell. `on_gone` is called in a thread before the process ends, with a line that gives the
    reason."""

    def __init__(self) -> None:
        self.on_gone: Callable[[str], None] | None = None

    def watch(self) -> None:
        """Start a thread that watches the launcher's process."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        # torchrun makes the process that it starts the leader of a session: this process, or a script that started it.
        leader = os.getsid(0)
        pid = _parent(leader)
        if pid is not None:
            threading.Thread(target=self._watch, args=(leader, pid), daemon=True, name="launcher").start()

    def _watch(self, leader: int, pid: int) -> None:
        while _parent(leader) == pid:
            time.sleep(POLL)
        gone = f"the launcher (process {pid}) is gone, so this rank ends too"
        line = f"{gone}. Start the run again to resume from the newest checkpoint"

        def report() -> None:
            if not exit_handler.is_logged():
                if self.on_gone is not None:
                    self.on_gone(line)
                exit_handler.log(line, exit_handler.FAILED)

        exit_handler.run_within(GRACE_SECONDS, report)
        os._exit(exit_handler.FAILED)


def _parent(pid: int) -> int | None:
    """Return the id of a process's parent, or None if the process is gone or the system does not report the id."""
    try:
        # After the name, which may hold anything in its brackets: state, parent.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


of_this_process = Launcher()
