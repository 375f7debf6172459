"""The exit status of a process and the line that it prints before it ends. The line goes to stderr and to the launcher:
torchrun and launch/agent.py print it again when all ranks have ended."""

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
STOPPED_EARLY = 75  # a run that stopped early and saved everything: start it again to resume (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C, as in shells

_is_logged = False


def log(message: str, status: int) -> None:
    """Print one line on stderr with the reason why this process ends, and store the line and the exit status for the
    launcher. A signal from the launcher may end the process before it exits with this status."""
    global _is_logged
    _is_logged = True
    # Every rank prints: the launcher ends all ranks as soon as one has failed, so no rank can rely on another.
    line = ranks.label() + " ".join(message.split())
    _write_error_file(line, status)
    with contextlib.suppress(OSError, ValueError):  # the reader is gone
        sys.stdout.flush()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def is_logged() -> bool:
    """Return whether this process has already printed the reason why it ends."""
    return _is_logged


def run_within(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in a thread and wait at most `seconds` for it, so that a full pipe or an unreachable disk cannot
    keep the process from ending."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def end_with_caller() -> None:
    """Make the kernel kill this process as soon as the thread that started it ends (PR_SET_PDEATHSIG; Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def log_exceptions() -> None:
    """Install an exception hook that prints an uncaught exception with its traceback, then logs it as one line."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        sys.stderr.flush()
        log(f"{kind.__name__}: {error}", 1)

    sys.excepthook = hook


def _write_error_file(line: str, status: int) -> None:
    """Write the line atomically to the JSON file that torch's launcher reads: torch fails on an incomplete file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    extra = {"py_callstack": line, "timestamp": str(int(now)), "time": now, "status": status}
    content = {"message": {"message": line, "extraInfo": extra}}
    with contextlib.suppress(OSError):  # the disk may be full; the line is on stderr in any case
        # The thread that handles signals may log at the same time.
        temporary = f"{path}.{threading.get_native_id()}.tmp"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(content, stream)
        os.replace(temporary, path)
