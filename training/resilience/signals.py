"""Handle signals that ask a run to end, at once, even while the main thread is inside a call that does not return.
Imports nothing slow, because train.py installs the handlers first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from base import exit_handler
from base.exit_handler import STOPPED_EARLY
from base.ranks import launched
from training.resilience import launcher

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # Slurm warns with SIGUSR1 or SIGUSR2
GRACE_SECONDS = 10.0  # for `on_early`


class StopSignals:
    """Handles SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 for this process.

    After `end_at_once`, a signal ends the process with one line and the status of an early stop, because there is
    nothing to save before the first step. After `install`, signals are added to `received`; a second SIGINT, or SIGTERM
    after SIGINT, ends the process at once.

    Python runs signal handlers only between two instructions of the main thread. Therefore a thread reads the signals'
    numbers from a pipe (signal.set_wakeup_fd). Only the main thread may call these methods.

    `on_early` is called in a thread before a signal ends the process. It informs the other ranks, writes to the run's
    folder, and returns whether the process must end.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.on_early: Callable[[signal.Signals], bool] | None = None
        self._notes = False
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def end_at_once(self) -> None:
        """Until `install` is called, let a signal end the process."""
        self._notes = False
        self.received.clear()
        self._take()

    def install(self) -> None:
        """From now on, add signals to `received` instead of ending the process."""
        self._notes = True
        self._take()

    def _take(self) -> None:
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._read, args=(self._pipe[0],), daemon=True, name="signals")
            self._thread.start()
            for signum in ASKING:
                self._before[signum] = signal.signal(signum, lambda *_: None)

    def restore(self, *, ignore: bool) -> None:
        """Remove the handlers. `ignore`: whether to ignore later signals, because the process is about to end and a
        SIGTERM of torchrun must not change its exit status."""
        if self._pipe is None:
            return
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_IGN if ignore else (signal.SIG_DFL if handler is None else handler))
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe[1])  # the thread reads to the end
        self._thread.join(timeout=5)
        self._pipe = None

    def _read(self, descriptor: int) -> None:
        while numbers := os.read(descriptor, 16):
            for number in numbers:
                if number not in ASKING:
                    continue
                signum = signal.Signals(number)
                if not self._notes:
                    self._end_early(signum)
                    continue
                if signum in (signal.SIGINT, signal.SIGTERM) and signal.SIGINT in self.received:
                    text = f"ended at once by a second {signum.name}; nothing was saved after the last checkpoint"
                    print(text, file=sys.stderr, flush=True)
                    os._exit(128 + signum)
                if signum not in self.received and not launched().local_rank:
                    again = "; send it once more to end at once" if signum == signal.SIGINT else ""
                    text = f"{signum.name}: finishing the step, then saving and stopping{again}"
                    print(text, file=sys.stderr, flush=True)
                self.received.append(signum)
        os.close(descriptor)

    def _end_early(self, signum: signal.Signals) -> None:
        if exit_handler.is_logged():  # the process is about to end for another reason
            return
        shall_end = [True]

        def report() -> None:
            if signum != signal.SIGTERM:  # torchrun sends SIGTERM also to the ranks that remain after a failure
                launcher.note_stop()
            if self.on_early is not None:
                shall_end[0] = self.on_early(signum)
            if shall_end[0]:
                exit_handler.log(stopped_by(signum), STOPPED_EARLY)

        exit_handler.run_within(GRACE_SECONDS, report)
        if shall_end[0]:
            os._exit(STOPPED_EARLY)


def stopped_by(signum: signal.Signals) -> str:
    """Return the last line that a process prints when a signal ends the process before its first step."""
    return f"stopped by {signum.name} before the first step, with nothing to save. Start it again to continue"


of_this_process = StopSignals()
