"""The line that a process ends with, on stderr and for its launcher: torchrun and launch/agent.py repeat it when all
ranks have ended."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from configs import ranks

_said = False


def say(words: str, status: int) -> None:
    """Say in one line why this process ends. status: what it ends with, since its launcher's own signal may end it
    first."""
    global _said
    _said = True
    # Every rank speaks: its launcher ends the others as soon as one has failed, so no single rank is sure to be heard.
    line = ranks.label() + " ".join(words.split())
    _leave(line, status)
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def said() -> bool:
    """Whether this process has said why it ends."""
    return _said


def within(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in a thread and wait for it, but no longer: a full pipe or a lost disk must not keep a process
    from ending."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def of_exceptions() -> None:
    """From now on an exception that ends this process leaves a line too, after its traceback."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        sys.stderr.flush()
        say(f"{kind.__name__}: {error}", 1)

    sys.excepthook = hook


def _leave(line: str, status: int) -> None:
    """The line in the form that torch's launcher reads; whole or not at all, since torch fails of half a file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    content = {
        "message": {
            "message": line,
            "extraInfo": {"py_callstack": line, "timestamp": str(int(now)), "time": now, "status": status},
        }
    }
    with contextlib.suppress(OSError):  # a full disk may be why the process ends; the line is said all the same
        # the thread that answers signals may speak at the same moment
        between = f"{path}.{threading.get_native_id()}.tmp"
        with open(between, "w", encoding="utf-8") as stream:
            json.dump(content, stream)
        os.replace(between, path)
