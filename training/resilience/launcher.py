"""Ends a rank whose launcher is gone: nobody would end it then, and it would hold its run's folder for as long as it
trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from configs import last_words

POLL = 0.5  # seconds
FAILED = 1  # exit status
ROOM = 3.0  # seconds for what `on_gone` writes


class Launcher:
    """torchrun's process, as one of its ranks sees it. Without torchrun there is none: a process of a shell may outlive
    that.

    on_gone: called with the words that say so, in a thread, before the process ends.
    """

    def __init__(self) -> None:
        self.on_gone: Callable[[str], None] | None = None

    def watch(self) -> None:
        """Watch it from now on."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        # torchrun makes what it starts the leader of a session: this process, or a script that started it.
        leader = os.getsid(0)
        pid = _parent(leader)
        if pid is not None:
            threading.Thread(target=self._watch, args=(leader, pid), daemon=True, name="launcher").start()

    def _watch(self, leader: int, pid: int) -> None:
        while _parent(leader) == pid:
            time.sleep(POLL)
        words = (
            f"the launcher (process {pid}) is gone, so this rank ends too. Start it again to go on from the newest "
            "checkpoint"
        )
        last_words.within(ROOM, lambda: self._say(words))
        os._exit(FAILED)

    def _say(self, words: str) -> None:
        if not last_words.said():
            if self.on_gone is not None:
                self.on_gone(words)
            last_words.say(words, FAILED)


def _parent(pid: int) -> int | None:
    """None where the process is gone, or the system does not tell."""
    try:
        # After the name, which may hold anything in its brackets: state, parent.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


of_this_process = Launcher()
