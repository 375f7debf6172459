"""Signals that ask a run to end: noted at once, even while the main thread is inside a collective that does not return."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # Slurm warns with SIGUSR1 or SIGUSR2


class StopSignals:
    """Notes the signals of ASKING from `install` to `restore`. A second SIGINT, or SIGTERM after SIGINT, ends the process at once.

    Python runs its handlers only between two instructions of the main thread; but the signal's number also goes into a pipe,
    which a thread reads. Only the main thread may install.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def install(self) -> None:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, args=(self._pipe[0],), daemon=True, name="signals")
        self._thread.start()
        for signum in ASKING:
            self._before[signum] = signal.signal(signum, _do_nothing)

    def restore(self, *, ignore: bool) -> None:
        """Take the handlers away; with `ignore` the process is about to end, and torchrun's SIGTERM must not change its exit status."""
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
                if signum in (signal.SIGINT, signal.SIGTERM) and signal.SIGINT in self.received:
                    sys.stderr.write(f"ended at once by a second {signum.name}; nothing was saved after the last checkpoint\n")
                    sys.stderr.flush()
                    os._exit(128 + signum)
                if signum not in self.received and os.environ.get("LOCAL_RANK", "0") == "0":
                    again = "; once more to end at once" if signum == signal.SIGINT else ""
                    sys.stderr.write(f"{signum.name}: finishing the step, then saving and stopping{again}\n")
                    sys.stderr.flush()
                self.received.append(signum)
        os.close(descriptor)


def _do_nothing(*_: Any) -> None:
    pass
