"""torchrun for this repository: signals reach the ranks, and the exit status distinguishes a stop on purpose from a
failure.

    python -m launch.agent TORCHRUN-OPTION... -- KEY=VALUE...

launch/torchrun.sh calls it. torchrun alone ends with 1 after any failure, restarts ranks that stopped on purpose, dies
of Slurm's warning signals, and kills its ranks 30 seconds after SIGTERM, however long a checkpoint takes. Here

* SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and, as a SIGTERM, SIGHUP are forwarded to every rank as soon as it has a handler,
  also to ranks that start later; they then finish their step, save and end (the sender of the signal sets the time
  limit);
* the status is 0 when all steps are done, 75 when the ranks stopped early on purpose, else that of the rank that failed
  first, and the last line is that rank's own (base/exit_handler.py), or reports how it died; a wrong config is
  not restarted;
* rank_00003.out and .err under --log-dir are links to the output of rank 3;
* with --min-ranks, a single node without restarts left continues with fewer ranks, as many as the layout allows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from base.errors import ConfigError
from base.exit_handler import STOPPED_EARLY, WRONG_CONFIG
from launch.job import compose_for
from launch.rank import FORWARDED

POLL = 0.2  # seconds between two searches for ranks that have not got a signal yet
OTHERS_READ = 5.0  # seconds within which every node reads a changed rendezvous state; torch reads it once a second


def main(arguments: Sequence[str]) -> int:
    """Run the ranks until they end, and return the exit status."""
    # Blocked before any thread or rank exists: only the thread below receives them, and a starting rank keeps them
    # pending instead of dying of them. Signals that the caller ignores, as nohup does, are not forwarded, except for
    # warnings: launch/torchrun.sh itself has ignored those until now.
    warnings = (signal.SIGUSR1, signal.SIGUSR2)
    forwarded = [
        signum
        for signum in (*FORWARDED, signal.SIGHUP)
        if signum in warnings or signal.getsignal(signum) != signal.SIG_IGN
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    threading.Thread(target=_forward_signals, args=(forwarded,), daemon=True).start()

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--min-ranks", type=int)
    parser.add_argument("--log-dir", type=Path)
    split = list(arguments).index("--")
    options, others = parser.parse_known_args(arguments[:split])
    overrides = list(arguments[split + 1 :])
    if options.log_dir is not None:
        others += ["--log-dir", str(options.log_dir), "--redirects", "3", "--tee", "0:3"]

    ranks = options.nproc_per_node
    _log(f"starting {ranks} {'rank' if ranks == 1 else 'ranks'} on this node")
    while True:
        status = _run([*others, "--nproc-per-node", str(ranks)], options.log_dir, overrides)
        if status in (0, STOPPED_EARLY) or options.min_ranks is None:
            return status
        for fewer in range(ranks - 1, options.min_ranks - 1, -1):  # the most that the configuration allows
            with contextlib.suppress(ConfigError):
                compose_for(overrides, fewer)
                break
        else:
            _log(f"no layout of this configuration has {options.min_ranks} to {ranks - 1} ranks. Start it with {ranks}")
            return status
        _log(f"continuing with {fewer} ranks instead of {ranks}")
        ranks = fewer


def _run(options: list[str], log_dir: Path | None, overrides: list[str]) -> int:
    """Run torchrun once, including its restarts, and return the exit status."""
    # These imports take seconds, in which signals are already handled.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousStateError
    from torch.distributed.run import parse_args, run

    from launch import rendezvous

    with tempfile.TemporaryDirectory(prefix="mixtrain-agent-") as folder:
        mark = Path(folder) / "stopped-early"
        rank = ["--module", "launch.rank", str(mark), str(log_dir or "")]
        causes: list[Cause] = []  # why the attempts ended
        _watch_attempts(causes, mark)
        try:
            run(rendezvous.secure(parse_args([*options, "--signals-to-handle", "SIGQUIT", *rank, *overrides])))
        except ChildFailedError as error:
            return _report(causes[-1] if causes else _cause(error.failures), log_dir)
        except RendezvousStateError as error:
            advice = "check whether another program uses --master-addr and --master-port (docs/guide/network.md)"
            return _report(Cause(f"launch: {error}; {advice}", 1), log_dir)
        except RendezvousError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if causes:  # the other nodes ended the job, since it had ended here
                line = f"{causes[-1].line} (and the nodes did not meet again: {reason})"
                return _report(Cause(line, causes[-1].status), log_dir)
            advice = "check --master-addr, --master-port and --num-nodes"
            return _report(Cause(f"launch: the nodes did not find each other: {reason}; {advice}", 1), log_dir)
        except SignalException as error:
            return _report(Cause(f"launch: ended by {error.sigval.name}", 128 + error.sigval), log_dir)
        except Exception as error:
            traceback.print_exc()
            return _report(Cause(f"launch: {type(error).__name__}: {' '.join(str(error).split())}", 1), log_dir)
        return STOPPED_EARLY if mark.exists() else 0


class Cause(NamedTuple):
    """The reason why the ranks of this node ended: the last line to print, and the exit status."""

    line: str
    status: int


def _cause(failures: Mapping[int, Any], ended: Collection[int] = ()) -> Cause:
    """Return the root cause of a failed attempt. `failures`: torch's records of the failed ranks, by rank; `ended`: the
    ranks that had ended before torch ended the rest."""

    def precedence(item: tuple[int, Any]) -> tuple[int, bool, int, float]:
        """Return the sort key of a failure. Order: a wrong config; killed ranks; ranks with a message, by time, because
        they may report a killed rank; other ranks; last, ranks that torch ended with SIGTERM after another failure."""
        rank, failure = item
        message, exit_code = _message(failure), failure.exitcode
        status = message.get("status", exit_code)
        is_ended = (exit_code == -signal.SIGTERM and not message) or message.get("status") == STOPPED_EARLY
        blame = 0 if status == WRONG_CONFIG else 2 if is_ended else 1
        kind = (1, float(message.get("time", 0))) if message else (0 if exit_code < 0 else 2, 0.0)
        return blame, rank not in ended, *kind

    rank, failure = min(failures.items(), key=precedence)
    message = _message(failure)
    # a rank that left a message may still be ended by the launcher's SIGTERM
    status = message.get("status", failure.exitcode)
    if message:
        return Cause(str(message["line"]), status if status > 0 else 128 - status)
    who = f"launch: rank {rank} on {socket.gethostname()}"
    if status < 0:
        # The ranks themselves kill one that hangs, and report that.
        for witness in map(_message, failures.values()):
            if re.search(rf"\brank {rank} on \S+ (?!is dead)", witness.get("line", "")):
                return Cause(witness["line"], witness.get("status", 1))
        hint = " (by another process, or because memory ran out)" if status == -signal.SIGKILL else ""
        is_known = any(-status == known for known in signal.Signals)
        name = failure.signal_name() if is_known else f"signal {-status}"
        return Cause(f"{who} was killed by {name}{hint}", 128 - status)
    return Cause(f"{who} failed first, with exit status {status}: see its output", status)


def _message(failure: Any) -> dict[str, Any]:
    """Return the message that a failed rank stored before it ended (base/exit_handler.py); {} if there is none."""
    if failure.error_file == "<N/A>":
        return {}
    message = failure.message if isinstance(failure.message, dict) else {"message": failure.message}
    line = " ".join(str(message.get("message", "")).split())
    return {**message.get("extraInfo", {}), "line": line} if line else {}


def _has_ended(pid: int) -> bool:
    """Return whether a child of this process has ended. Its exit status stays available to other callers."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another caller has got its status
        return True


def _watch_attempts(causes: list[Cause], mark: Path) -> None:
    """Make torch's launcher record in `causes` why each attempt ended, and prevent restarts after a stop on purpose or
    a wrong config. `mark`: the file that a rank creates when it stops early."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousStateError
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        def _invoke_run(self, role: str = "default") -> Any:
            try:
                return super()._invoke_run(role)
            except RendezvousStateError:
                # The store may be this node's: let the others read the state before the store ends with this agent.
                time.sleep(OTHERS_READ)
                raise

        def _monitor_workers(self, worker_group: Any) -> Any:
            ended = {worker.global_rank for worker in worker_group.workers if _has_ended(int(worker.id))}
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and result.failures:
                mark.unlink(missing_ok=True)  # made by ranks that were ended because of this failure
                causes.append(_cause(result.failures, ended))
                if causes[-1].status in (WRONG_CONFIG, STOPPED_EARLY):
                    self._remaining_restarts = 0
                elif self._remaining_restarts > 0:
                    print(causes[-1].line, file=sys.stderr)
                    _log(f"restarting the ranks; {self._remaining_restarts - 1} restarts are left after this one")
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc]


def _report(cause: Cause, log_dir: Path | None) -> int:
    """Print the cause's line, store it in the folder `log_dir` for scripts that start several nodes, and return the
    exit status."""
    print(cause.line, file=sys.stderr, flush=True)
    if log_dir is not None:
        with contextlib.suppress(OSError):
            (log_dir / f"end_{socket.gethostname()}").write_text(f"{time.time():.3f} {cause.line}\n")
    return cause.status


def _forward_signals(forwarded: list[signal.Signals]) -> None:
    """Forward each of these signals to the ranks when it arrives, until this process ends."""
    received: list[signal.Signals] = []
    started = False
    sent: set[tuple[signal.Signals, psutil.Process]] = set()
    while True:
        information = signal.sigtimedwait(forwarded, POLL)
        ranks = psutil.Process().children()
        started = started or bool(ranks)
        if information is not None:
            signum = signal.Signals(information.si_signo)
            if signum == signal.SIGHUP:  # the terminal is closed; ranks do not handle this signal
                signum = signal.SIGTERM
            asks_to_end = signum in (signal.SIGTERM, signal.SIGINT)
            if asks_to_end and not started:
                _log(f"stopped by {signum.name} before the ranks were started. Start it again to continue")
                os._exit(STOPPED_EARLY)
            if asks_to_end and (not ranks or (signum == signal.SIGINT and signum in received)):
                _log(f"ended by {signum.name}{' for the second time' if ranks else ' while no rank was running'}")
                for rank in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)  # torchrun makes each rank the leader of a session
                os._exit(128 + signum)
            if signum not in received:
                received.append(signum)
                again = "; send it again to end them at once" if signum == signal.SIGINT else ""
                _log(f"{signum.name}: the ranks finish their step, save and stop{again}")
        for signum in received:
            for rank in ranks:
                if (signum, rank) not in sent and _answers(rank.pid, signum):
                    sent.add((signum, rank))
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.send_signal(signum)


def _answers(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal. Without a handler, the signal would be ignored or end the
    process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signum - 1) & 1)


def _log(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
