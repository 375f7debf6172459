"""torchrun for this repository: its signals reach the ranks, and its exit status tells a stop on purpose from a
failure.

    python -m launch.agent TORCHRUN-OPTION... -- KEY=VALUE...

launch/torchrun.sh calls it. torchrun alone ends with 1 whatever happened, starts ranks again that stopped on purpose,
dies of the signals that Slurm warns with, and kills its ranks 30 seconds after SIGTERM, however long a checkpoint
takes. Here

* SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and, as a SIGTERM, SIGHUP are handed to every rank as soon as it can answer them,
  also to ranks that start later; they then finish their step, save and end (how long that may take is for whoever sent
  the signal);
* the status is 0 when all steps are done, 75 when the ranks stopped early on purpose, else that of the rank that failed
  first, and the last line is that rank's own (configs/last_words.py), or says how it died; a wrong config is not
  started again;
* a rank's output under --log-dir is also found by its number: rank_00003.out and .err are links to it;
* with --min-ranks, a single node that runs out of restarts goes on with fewer ranks, as many as the layout allows.
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

from configs.exit_status import STOPPED_EARLY, WRONG_CONFIG
from configs.schema import ConfigError
from launch.job import compose_for
from launch.rank import HANDED_ON

POLL = 0.2  # seconds between two looks for ranks that have not been told
OTHERS_READ = 5.0  # seconds in which every node reads a changed state of the rendezvous; torch does so once a second


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end; the exit status."""
    # Blocked before any thread or rank exists: only the thread below takes them, and a rank that is just starting keeps
    # them pending instead of dying of them.
    taken = _signals_to_take()
    signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    threading.Thread(target=_hand_on_signals, args=(taken,), daemon=True).start()

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
    _say(f"starting {ranks} {'rank' if ranks == 1 else 'ranks'} on this node")
    while True:
        status = _run([*others, "--nproc-per-node", str(ranks)], options.log_dir, overrides)
        if status in (0, STOPPED_EARLY) or options.min_ranks is None:
            return status
        fewer = _fewer_ranks(overrides, ranks, options.min_ranks)
        if fewer is None:
            _say(f"no layout of fewer than {ranks} and at least {options.min_ranks} ranks goes with this configuration")
            return status
        _say(f"going on with {fewer} ranks in place of {ranks}")
        ranks = fewer


def _run(options: list[str], log_dir: Path | None, overrides: list[str]) -> int:
    """One torchrun with its restarts; the exit status."""
    # Seconds, in which signals are already heard.
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
            return _last(causes[-1] if causes else _cause(error.failures), log_dir)
        except RendezvousStateError as error:
            advice = "does anything else write to --master-addr and --master-port? See docs/guide/network.md"
            return _last(Cause(f"launch: {error}; {advice}", 1), log_dir)
        except RendezvousError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if causes:  # the others ended the job, since it had ended here
                return _last(
                    Cause(f"{causes[-1].line} (and the nodes did not meet again: {reason})", causes[-1].status), log_dir
                )
            advice = "check --master-addr, --master-port and --num-nodes"
            return _last(Cause(f"launch: the nodes did not find each other: {reason}; {advice}", 1), log_dir)
        except SignalException as error:
            return _last(Cause(f"launch: ended by {error.sigval.name}", 128 + error.sigval), log_dir)
        except Exception as error:
            traceback.print_exc()
            return _last(Cause(f"launch: {type(error).__name__}: {' '.join(str(error).split())}", 1), log_dir)
        return STOPPED_EARLY if mark.exists() else 0


class Cause(NamedTuple):
    """Why the ranks of this node ended: the line to end with, and the exit status."""

    line: str
    status: int


def _cause(failures: Mapping[int, Any], ended: Collection[int] = ()) -> Cause:
    """Which of the failures (by rank) the others follow from. ended: the ranks that had ended before torch ended the
    rest."""
    rank, failure = min(failures.items(), key=lambda item: (_blame(item[1]), item[0] not in ended, *_kind(item[1])))
    words = _words(failure)
    # the launcher's SIGTERM may come before a rank that has spoken has ended
    status = words.get("status", failure.exitcode)
    if words:
        return Cause(str(words["line"]), status if status > 0 else 128 - status)
    who = f"launch: rank {rank} on {socket.gethostname()}"
    if status < 0:
        # The ranks themselves kill one that hangs, and say so.
        for witness in map(_words, failures.values()):
            if re.search(rf"\brank {rank} on \S+ (?!is dead)", witness.get("line", "")):
                return Cause(witness["line"], witness.get("status", 1))
        hint = " (from outside, or for want of memory)" if status == -signal.SIGKILL else ""
        return Cause(
            f"{who} was killed by {failure.signal_name() if _known(-status) else f'signal {-status}'}{hint}",
            128 - status,
        )
    return Cause(f"{who} failed first, with exit status {status}: see its output", status)


def _blame(failure: Any) -> int:
    """0 for a wrong config, 2 for what torch asked to end, with SIGTERM, since another had failed."""
    words = _words(failure)
    if words.get("status", failure.exitcode) == WRONG_CONFIG:
        return 0
    return 2 if (failure.exitcode == -signal.SIGTERM and not words) or words.get("status") == STOPPED_EARLY else 1


def _kind(failure: Any) -> tuple[int, float]:
    """Who is killed has no words, and who misses it speaks a moment later; else the first words count."""
    words = _words(failure)
    return (1, float(words.get("time", 0))) if words else (0 if failure.exitcode < 0 else 2, 0.0)


def _words(failure: Any) -> dict[str, Any]:
    """What the rank said before it ended (configs/last_words.py); nothing if it did not."""
    if failure.error_file == "<N/A>":
        return {}
    message = failure.message if isinstance(failure.message, dict) else {"message": failure.message}
    line = " ".join(str(message.get("message", "")).split())
    return {**message.get("extraInfo", {}), "line": line} if line else {}


def _has_ended(pid: int) -> bool:
    """Whether a child of this process has ended; its exit status stays for others to take."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # taken already
        return True


def _known(signum: int) -> bool:
    return any(signum == known for known in signal.Signals)


def _watch_attempts(causes: list[Cause], mark: Path) -> None:
    """Note why each attempt ends, and start no ranks again that stopped on purpose or whose config is wrong."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousStateError
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        def _invoke_run(self, role: str = "default") -> Any:
            try:
                return super()._invoke_run(role)
            except RendezvousStateError:
                # The store may be this node's, and the ranks' end would have the others wait for this agent.
                time.sleep(OTHERS_READ)
                raise

        def _monitor_workers(self, worker_group: Any) -> Any:
            ended = {worker.global_rank for worker in worker_group.workers if _has_ended(int(worker.id))}
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and result.failures:
                mark.unlink(missing_ok=True)  # of ranks that were asked to end for this
                causes.append(_cause(result.failures, ended))
                if causes[-1].status in (WRONG_CONFIG, STOPPED_EARLY):
                    self._remaining_restarts = 0
                elif self._remaining_restarts > 0:
                    print(causes[-1].line, file=sys.stderr)
                    _say(f"starting the ranks again; {self._remaining_restarts - 1} restarts are left then")
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc]


def _last(cause: Cause, log_dir: Path | None) -> int:
    """Say the line, leave it in LOG_DIR for whoever started this on several nodes, and give the status."""
    print(cause.line, file=sys.stderr, flush=True)
    if log_dir is not None:
        with contextlib.suppress(OSError):
            (log_dir / f"end_{socket.gethostname()}").write_text(f"{time.time():.3f} {cause.line}\n")
    return cause.status


def _fewer_ranks(overrides: list[str], ranks: int, least: int) -> int | None:
    """The largest number of ranks below `ranks` that the configuration allows."""
    for count in range(ranks - 1, least - 1, -1):
        try:
            compose_for(overrides, count)
        except ConfigError:
            continue
        return count
    return None


def _signals_to_take() -> list[signal.Signals]:
    """All but those that the caller wants ignored, as nohup does; launch/torchrun.sh itself ignores the warnings until
    now."""
    warnings = (signal.SIGUSR1, signal.SIGUSR2)
    return [
        signum
        for signum in (*HANDED_ON, signal.SIGHUP)
        if signum in warnings or signal.getsignal(signum) != signal.SIG_IGN
    ]


def _hand_on_signals(taken: list[signal.Signals]) -> None:
    """Take each signal that arrives and give it to the ranks, from now to the end of this process."""
    received: list[signal.Signals] = []
    started = False
    told: set[tuple[signal.Signals, psutil.Process]] = set()
    while True:
        information = signal.sigtimedwait(taken, POLL)
        ranks = psutil.Process().children()
        started = started or bool(ranks)
        if information is not None:
            signum = signal.Signals(information.si_signo)
            if signum == signal.SIGHUP:  # the terminal is gone; ranks know no such signal
                signum = signal.SIGTERM
            asks_to_end = signum in (signal.SIGTERM, signal.SIGINT)
            if asks_to_end and not started:
                _say(f"stopped by {signum.name} before the ranks were started. Start it again to go on")
                os._exit(STOPPED_EARLY)
            if asks_to_end and (not ranks or (signum == signal.SIGINT and signum in received)):
                _say(f"ended by {signum.name}{' for the second time' if ranks else ' while no rank was running'}")
                for rank in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)  # torchrun makes each rank the leader of a session
                os._exit(128 + signum)
            if signum not in received:
                received.append(signum)
                again = "; again to end them at once" if signum == signal.SIGINT else ""
                _say(f"{signum.name}: the ranks finish their step, save and stop{again}")
        for signum in received:
            for rank in ranks:
                if (signum, rank) not in told and _answers(rank.pid, signum):
                    told.add((signum, rank))
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.send_signal(signum)


def _answers(pid: int, signum: signal.Signals) -> bool:
    """Whether the process has a handler for the signal: without one it would ignore it, or die."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signum - 1) & 1)


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
