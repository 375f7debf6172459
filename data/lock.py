"""A lock for processes that share a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold(path: Path, timeout: float) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` in a `with` block, after at most `timeout` seconds of waiting. The
    system releases the lock if the process dies. Raises TimeoutError, OSError."""
    with open(path, "a+") as file:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise TimeoutError(
                        f"another process ({file.read().strip() or 'unknown'}) did not finish preparing the data "
                        f"within {timeout} s (data.timeout_seconds). Raise data.timeout_seconds, or run `python -m "
                        f"data.prepare` first. The process holds the lock {path}"
                    ) from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


@contextlib.contextmanager
def hold_in_cache(path: Path, timeout: float) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` in a cache, after at most `timeout` seconds of waiting. Holds no lock
    if the cache cannot be written; then every process does the work. Raises TimeoutError."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold(path, timeout))
        except TimeoutError:
            raise
        except OSError:
            pass
        yield
