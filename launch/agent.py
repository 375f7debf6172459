"""torchrun for this repository: its signals reach the ranks, and its exit status tells a stop on purpose from a failure.

    python -m launch.agent TORCHRUN-OPTION... -- KEY=VALUE...

launch/torchrun.sh calls it. torchrun alone ends with 1 whatever happened, starts ranks again that stopped on purpose, dies of the
signals that Slurm warns with, and kills its ranks 30 seconds after SIGTERM, however long a checkpoint takes. Here

* SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and, as a SIGTERM, SIGHUP are handed to every rank as soon as it can answer them, also to
  ranks that start later; they then finish their step, save and end (how long that may take is for whoever sent the signal);
* the status is 0 when all steps are done, 75 when the ranks stopped early on purpose, else that of the first rank that failed, and
  the last line says which one that was;
* a rank's output under --log-dir is also found by its number: rank_00003.out and .err are links to it;
* with --min-ranks, a single node that runs out of restarts goes on with fewer ranks, as many as the layout allows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from configs.exit_status import STOPPED_EARLY
from configs.schema import ConfigError
from launch.job import compose_for
from launch.rank import HANDED_ON

POLL = 0.2  # seconds between two looks for ranks that have not been told


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end; the exit status."""
    # Blocked before any thread or rank exists: only the thread below takes them, and a rank that is just starting keeps them
    # pending instead of dying of them.
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
        try:
            run(rendezvous.secure(parse_args([*options, "--signals-to-handle", "SIGQUIT", *rank, *overrides])))
        except ChildFailedError as error:
            number, failure = error.get_first_failure()
            message = failure.message if failure.error_file != "<N/A>" or failure.exitcode < 0 else "see its output"
            _say(f"rank {number} on {socket.gethostname()} failed first, with exit status {failure.exitcode}: {' '.join(message.split())}")
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except RendezvousStateError as error:
            _say(f"{error}; does anything else write to --master-addr and --master-port? See docs/guide/network.md")
            return 1
        except RendezvousError as error:
            _say(f"the nodes did not find each other: {' '.join(str(error).split())}; check --master-addr, --master-port and --num-nodes")
            return 1
        except SignalException as error:
            _say(f"ended by {error.sigval.name}")
            return 128 + error.sigval
        return STOPPED_EARLY if mark.exists() else 0


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
    """All but those that the caller wants ignored, as nohup does; launch/torchrun.sh itself ignores the warnings until now."""
    warnings = (signal.SIGUSR1, signal.SIGUSR2)
    return [signum for signum in (*HANDED_ON, signal.SIGHUP) if signum in warnings or signal.getsignal(signum) != signal.SIG_IGN]


def _hand_on_signals(taken: list[signal.Signals]) -> None:
    """Take each signal that arrives and give it to the ranks, from now to the end of this process."""
    received: list[signal.Signals] = []
    told: set[tuple[signal.Signals, psutil.Process]] = set()
    while True:
        information = signal.sigtimedwait(taken, POLL)
        ranks = psutil.Process().children()
        if information is not None:
            signum = signal.Signals(information.si_signo)
            if signum == signal.SIGHUP:  # the terminal is gone; ranks know no such signal
                signum = signal.SIGTERM
            asks_to_end = signum in (signal.SIGTERM, signal.SIGINT)
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
