"""Calls on a thread of their own, in order: loggers that would hold up the step talk to their services there."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST = 64  # calls that may wait; then the caller waits, so that a slow service costs time and not memory
SECONDS = 120.0  # that a call may take


class Background:
    """A log beside the run's own record does not end a run: what one of its calls raises is said once, and no more are
    made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._calls: deque[Future[Any]] = deque()
        self.failed = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it soon, unless an earlier call failed or is stuck."""
        with self.watched():
            while self._calls and (self._calls[0].done() or len(self._calls) >= MOST):
                self._calls.popleft().result(timeout=SECONDS)
            if not self.failed:
                self._calls.append(self._thread.submit(function, *args))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """For what this thread itself does to the log: an error is taken as a call's."""
        try:
            yield
        except Exception as error:  # of whatever kind: it is some service's, or the disk's
            if not self.failed:
                text = " ".join(str(error).split())
                print(
                    f"{self._name}: nothing more is logged there, because of {type(error).__name__}: {text}",
                    file=sys.stderr,
                    flush=True,
                )
            self.failed = True
            self._calls.clear()

    def close(self) -> None:
        """Wait for all calls."""
        with self.watched():
            while self._calls:
                self._calls.popleft().result(timeout=SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)
