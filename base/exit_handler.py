"""Exit status and last line of a process. The line is written to stderr and for the launcher: torchrun and
launch/agent.py print it again when all ranks have ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from base import ranks

FAILED = 1  # any error without a status of its own
WRONG_CONFIG = 2  # a wrong configuration or argument, in every program
STOPPED_EARLY = 75  # a run that stopped on purpose with everything saved: start it again to go on (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C, as in shells

_is_logged = False


def log(message: str, status: int) -> None:
    """Print in one line why this process ends, and leave the line for the launcher. `status` is the exit status, stored
    with the line because a signal of the launcher may end the process first."""
    global _is_logged
    _is_logged = True
    # Every rank prints: its launcher ends the others as soon as one has failed, so no single rank is sure to be heard.
    line = ranks.label() + " ".join(message.split())
    _write_error_file(line, status)
    with contextlib.suppress(OSError, ValueError):  # the reader is gone
        sys.stdout.flush()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def is_logged() -> bool:
    """Whether this process has printed why it ends."""
    return _is_logged


def run_within(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in a thread and wait at most `seconds` for it, so that a full pipe or a lost disk cannot keep the
    process from ending."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def end_with_caller() -> None:
    """Have the kernel kill this process when the thread that started it ends, in any way (Linux's PR_SET_PDEATHSIG).
    Without effect on other systems."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def log_exceptions() -> None:
    """Make an exception that ends this process log a line too, after its traceback."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        sys.stderr.flush()
        log(f"{kind.__name__}: {error}", 1)

    sys.excepthook = hook


def _write_error_file(line: str, status: int) -> None:
    """Write the line in the form that torch's launcher reads; whole or not at all, since torch fails on half a file."""
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
    with contextlib.suppress(OSError):  # a full disk may be why the process ends; stderr has the line all the same
        # the thread that handles signals may log at the same moment
        temporary = f"{path}.{threading.get_native_id()}.tmp"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(content, stream)
        os.replace(temporary, path)
