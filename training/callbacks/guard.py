"""Ends the job soon and with the culprit's name when a rank dies, hangs or raises; see
parallel/liveness/watchdog.py."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

from checkpoint.saver import SaveError
from configs import last_words
from configs.exit_status import STOPPED_EARLY, WRONG_CONFIG
from configs.files import WriteError
from configs.ranks import launched
from configs.schema import Config, ConfigError
from parallel.liveness import collective_log
from parallel.liveness.watchdog import Verdict, Watchdog
from parallel.topology import Topology
from training.resilience import events, status
from training.resilience.health import RefusedRun, UnhealthyRun
from training.resilience.signals import stopped_by
from training.run import Callback, Metrics, Run

FAILED = 1  # exit status
GRACE = 5.0  # seconds that a rank has to close its files once the job is lost
REFUSED = f"raised {ConfigError.__name__}:"  # how a reason begins that is the user's to mend
LOOK_AROUND = 4.0  # seconds beyond the watchdog's silence in which a verdict on another rank comes, if there is one
LAUNCHER_ASKS = 3.0  # seconds in which a verdict comes on the rank for whose loss the launcher ends the others


class Guard(Callback):
    """Watches the other ranks from when they have met to the end. Only for a process that is the run's own: it may be
    ended hard."""

    def __init__(self, config: Config):
        self._run_dir = Path(config.run_dir)
        self._timeout = config.parallel.timeout_seconds
        self._rank = launched().rank
        self._step = 0
        self._watchdog: Watchdog | None = None
        self.last_words: str | None = None
        self._failed = self._started = False
        self._claimed = False  # whether run_dir is this job's to write
        self._status = FAILED

    def on_join(self, topology: Topology) -> None:
        self._rank = topology.rank
        if topology.world_size > 1:
            self._watchdog = Watchdog(self._timeout, topology.device, self._end)

    def on_claim(self, step: int) -> None:
        self._claimed = True
        self._note(step)

    def on_start(self, run: Run) -> None:
        self._started = True
        self._note(run.progress.step)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        self._note(run.progress.step)

    def _note(self, step: int) -> None:
        self._step = step
        if self._watchdog is not None:
            self._watchdog.note_step(step)

    def on_error(self, error: BaseException) -> None:
        """This rank raised: by itself, or because another one is lost."""
        self._failed = True
        if self._watchdog is None and not self._started and isinstance(error, ConfigError):
            return  # a start that was refused: the run in the folder, if any, is as it was
        alone = self._watchdog is None and isinstance(error, WriteError)
        if alone or isinstance(error, (UnhealthyRun, SaveError, RefusedRun)):  # on all ranks, and by agreement
            if isinstance(error, RefusedRun):  # it has a line and a status of its own
                self._step, self._status = error.step, WRONG_CONFIG
            else:
                self.last_words = str(error)
            if self._rank == 0 and self._claimed:
                with contextlib.suppress(OSError):  # a full disk may be why; the words are said all the same
                    status.write(self._run_dir, "failed", self._step, str(error), exit_status=self._status)
            if self._watchdog is not None:
                self._watchdog.close()
            return
        if isinstance(error, ConfigError):  # it has a line and a status of its own
            self._status = WRONG_CONFIG
        kind = "stopped" if isinstance(error, WriteError) else f"raised {type(error).__name__}"
        reason = f"{kind}: {' '.join(str(error).split())[:600]}"
        verdict = None
        if self._watchdog is not None:
            if collective_log.raised(error):
                verdict = self._watchdog.verdict_within(self._watchdog.silence + LOOK_AROUND)
            if verdict is None:
                self._watchdog.accuse_myself(reason)  # calls _end
        else:
            self._end(self._about_myself(reason), written=True)
        if isinstance(error, ConfigError):
            self.last_words = None

    def asked_to_end(self, signum: signal.Signals) -> bool:
        """A signal came before the first step: all ranks end. Whether this one is to end of it. In a thread of its
        own."""
        reason = f"was stopped by {signum.name}"
        if self._watchdog is None:
            if self._claimed:
                self._record(self._about_myself(reason, stop=True), stopped_by(signum))
            return True
        if signum == signal.SIGTERM and self._watchdog.verdict_within(LAUNCHER_ASKS) is not None:
            return False  # the launcher ends those that a lost rank leaves
        return self._watchdog.accuse_myself(reason, stop=True).stop

    def launcher_is_gone(self, words: str) -> None:
        """Say of the run that it ends for this. In a thread of its own."""
        if self._claimed and self._rank == 0:
            self._record(self._about_myself(words), words)

    def _about_myself(self, reason: str, stop: bool = False) -> Verdict:
        return Verdict(self._rank, socket.gethostname(), self._step, reason, "none", self._rank, stop)

    def is_victim(self) -> bool:
        """Whether this rank raised only because another one was lost: its own traceback leads nowhere."""
        verdict = self._watchdog.verdict_within(0) if self._watchdog is not None else None
        return verdict is not None and verdict.rank != self._rank

    def close(self) -> None:
        self._claimed = False
        if self._watchdog is not None and not self._failed:
            self._watchdog.close()

    def _end(self, verdict: Verdict, written: bool) -> None:
        """Say who it was, and see to it that this process ends. In the watchdog's thread, or in the main one."""
        words = f"the job ends: {verdict}" if self._watchdog is not None else str(verdict)
        if verdict.stop:
            words += ". There was nothing to save: start it again to go on"
            self._status = STOPPED_EARLY
        self.last_words = words
        if not verdict.stop:
            threading.Thread(target=self._end_hard, daemon=True, name="end").start()
        refused = not self._started and verdict.reason.startswith(REFUSED)
        if written and self._claimed and not refused:
            self._record(verdict, words)
        if verdict.stop:
            self._end_now()

    def _record(self, verdict: Verdict, words: str) -> None:
        fields = {
            "step": verdict.step,
            "lost_rank": verdict.rank,
            "host": verdict.host,
            "collective": verdict.collective,
        }
        kind, state = ("stopped_early", "stopped_early") if verdict.stop else ("rank_lost", "failed")
        with contextlib.suppress(OSError):  # a full disk may be why; the words are said all the same
            events.record(self._run_dir, kind, words, **fields)
            status.write(
                self._run_dir, state, verdict.step, words, exit_status=STOPPED_EARLY if verdict.stop else self._status
            )

    def _end_hard(self) -> None:
        time.sleep(GRACE)
        self._end_now()  # the main thread may be inside a collective for good

    def _end_now(self) -> None:
        self.say_last_words()
        os._exit(self._status)

    def say_last_words(self) -> None:
        """The last line of this rank, which its launcher repeats."""
        words, self.last_words = self.last_words, None
        if words is None:
            return
        last_words.say(words, self._status)
