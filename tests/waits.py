"""How long tests wait for what must come.

A test goes on as soon as it has come, so the limit is generous: a machine may be slow, and busy with other tests. It is
below pytest's own (pyproject.toml), whose message says less. Only what must *not* come has a short time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

LONG = 300.0  # seconds: what has not come by then never will
POLL = 0.01


def until(condition: Callable[[], object], what: str, poll: float = POLL) -> None:
    """Wait until the condition holds. Raises AssertionError that says for what it waited in vain."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, f"waited {LONG:g} s in vain for {what}"
        time.sleep(poll)


def until_gone(processes: Iterable[psutil.Process]) -> None:
    """Wait until all have ended. In a container nobody may collect what an orphan leaves."""
    processes = list(processes)
    until(lambda: all(map(_is_gone, processes)), f"the end of {processes}")


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
