"""End the job when a rank dies, hangs or raises, and name that rank; parallel/liveness/watchdog.py detects it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

from base import exit_handler
from base.errors import ConfigError
from base.exit_handler import STOPPED_EARLY, WRONG_CONFIG
from base.files import WriteError
from base.ranks import launched
from checkpoint.saver import SaveError
from configs.schema import Config
from parallel.liveness import collective_log
from parallel.liveness.watchdog import Verdict, Watchdog
from parallel.topology import Topology
from training import status
from training.resilience import events
from training.resilience.health import RejectedRun, UnhealthyRun
from training.resilience.signals import stopped_by
from training.run import Callback, Metrics, Run

GRACE = 5.0  # seconds for a rank to close its files after the job is lost
WRONG_CONFIG_REASON = f"raised {ConfigError.__name__}:"  # the start of a reason that the user can fix
VERDICT_SECONDS = 4.0  # to wait for a verdict on a different rank, after the watchdog's silence
LAUNCHER_SECONDS = 3.0  # to wait for a verdict on a lost rank, because of which the launcher ends the other ranks


class Guard(Callback):
    """Watches the other ranks from the time they connect until training ends. May end this process, so use it only in a
    process that runs nothing else."""

    def __init__(self, config: Config):
        self._run_dir = Path(config.run_dir)
        self._timeout = config.parallel.timeout_seconds
        self._rank = launched().rank
        self._step = 0
        self._watchdog: Watchdog | None = None
        self.exit_message: str | None = None
        self._failed = self._started = False
        self._claimed = False  # whether this job may write to run_dir
        self._status = exit_handler.FAILED

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
        """Record the error that ends this rank and, unless all ranks raise it together, end the job. An error that a
        lost rank causes is recorded as the loss of that rank."""
        self._failed = True
        if self._watchdog is None and not self._started and isinstance(error, ConfigError):
            return  # a rejected start: a run in the folder is unchanged
        alone = self._watchdog is None and isinstance(error, WriteError)
        if alone or isinstance(error, (UnhealthyRun, SaveError, RejectedRun)):  # on all ranks together
            if isinstance(error, RejectedRun):  # it has its own message and status
                self._step, self._status = error.step, WRONG_CONFIG
            else:
                self.exit_message = str(error)
            if self._rank == 0 and self._claimed:
                with contextlib.suppress(OSError):  # a full disk may be the cause; the message is written all the same
                    status.write(self._run_dir, "failed", self._step, str(error), exit_status=self._status)
            if self._watchdog is not None:
                self._watchdog.close()
            return
        if isinstance(error, ConfigError):  # it has its own message and status
            self._status = WRONG_CONFIG
        kind = "stopped" if isinstance(error, WriteError) else f"raised {type(error).__name__}"
        reason = f"{kind}: {' '.join(str(error).split())[:600]}"
        verdict = None
        if self._watchdog is not None:
            if collective_log.raised(error):
                verdict = self._watchdog.verdict_within(self._watchdog.silence + VERDICT_SECONDS)
            if verdict is None:
                self._watchdog.accuse_myself(reason)  # calls _end
        else:
            self._end(self._own_verdict(reason), written=True)
        if isinstance(error, ConfigError):
            self.exit_message = None

    def asked_to_end(self, signum: signal.Signals) -> bool:
        """End the job because a signal arrived before the first step. Returns False if a lost rank ends the job
        already, so that the signal does not decide how this rank ends. Called in a separate thread."""
        reason = f"was stopped by {signum.name}"
        if self._watchdog is None:
            if self._claimed:
                self._record(self._own_verdict(reason, stop=True), stopped_by(signum))
            return True
        if signum == signal.SIGTERM and self._watchdog.verdict_within(LAUNCHER_SECONDS) is not None:
            return False  # the launcher ends the ranks that a lost rank leaves
        return self._watchdog.accuse_myself(reason, stop=True).stop

    def launcher_is_gone(self, message: str) -> None:
        """Record that the run ends because its launcher is gone. Called in a separate thread."""
        if self._claimed and self._rank == 0:
            self._record(self._own_verdict(message), message)

    def _own_verdict(self, reason: str, stop: bool = False) -> Verdict:
        return Verdict(self._rank, socket.gethostname(), self._step, reason, "none", self._rank, stop)

    def is_victim(self) -> bool:
        """Return whether this rank raised only because a different rank was lost, so that no traceback is printed."""
        verdict = self._watchdog.verdict_within(0) if self._watchdog is not None else None
        return verdict is not None and verdict.rank != self._rank

    def close(self) -> None:
        self._claimed = False
        if self._watchdog is not None and not self._failed:
            self._watchdog.close()

    def _end(self, verdict: Verdict, written: bool) -> None:
        """Record the verdict (which rank ended the job, and why), and end this process. Called in the watchdog's thread
        or the main thread."""
        message = f"the job ends: {verdict}" if self._watchdog is not None else str(verdict)
        if verdict.stop:
            message += ". There was nothing to save: start it again to continue"
            self._status = STOPPED_EARLY
        self.exit_message = message
        if not verdict.stop:
            threading.Thread(target=self._end_hard, daemon=True, name="end").start()
        is_rejected = not self._started and verdict.reason.startswith(WRONG_CONFIG_REASON)
        if written and self._claimed and not is_rejected:
            self._record(verdict, message)
        if verdict.stop:
            self._end_now()

    def _record(self, verdict: Verdict, message: str) -> None:
        kind, state = ("stopped_early", "stopped_early") if verdict.stop else ("rank_lost", "failed")
        exit_status = STOPPED_EARLY if verdict.stop else self._status
        with contextlib.suppress(OSError):  # a full disk may be the cause; the message is written all the same
            where = {"lost_rank": verdict.rank, "host": verdict.host, "collective": verdict.collective}
            events.record(self._run_dir, kind, message, step=verdict.step, **where)
            status.write(self._run_dir, state, verdict.step, message, exit_status=exit_status)

    def _end_hard(self) -> None:
        time.sleep(GRACE)
        self._end_now()  # the main thread may be blocked in a collective

    def _end_now(self) -> None:
        self.write_exit_message()
        os._exit(self._status)

    def write_exit_message(self) -> None:
        """Print the message with which this rank ends, if any, and store it for the launcher, which prints it again."""
        message, self.exit_message = self.exit_message, None
        if message is not None:
            exit_handler.log(message, self._status)
