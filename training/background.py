"""Calls on a thread of their own, in order: loggers that would hold up the step talk to their services there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST = 64  # calls that may wait; then the caller waits, so that a slow service costs time and not memory
SECONDS = 120.0  # that a call may take


class Background:
    """An error of a call is raised by a later call, or by `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._calls: deque[Future[Any]] = deque()

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it soon. Raises what an earlier call raised, and TimeoutError if that is stuck."""
        while self._calls and (self._calls[0].done() or len(self._calls) >= MOST):
            self._calls.popleft().result(timeout=SECONDS)
        self._calls.append(self._thread.submit(function, *args))

    def close(self) -> None:
        """Wait for all calls. Raises as a call does."""
        try:
            while self._calls:
                self._calls.popleft().result(timeout=SECONDS)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
