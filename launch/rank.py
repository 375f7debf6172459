"""The program that launch/agent.py starts as each rank: it runs train.py and reports an early stop on purpose as
success, so that torchrun does not treat the stop as a failure."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from base import exit_handler
from base.exit_handler import STOPPED_EARLY
from base.ranks import launched

TRAIN = Path(__file__).parent.parent / "train.py"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # signals that the agent forwards to ranks


def main(mark: str, log_dir: str) -> None:
    """Run train.py on this rank with the rest of the command line; after an early stop, create the file `mark` and exit
    with 0. `log_dir`: the folder for links to this rank's output; "" for none."""
    exit_handler.log_exceptions()
    # Slurm signals every process of a job. A rank without handlers ignores signals: the agent sends them again once it
    # has handlers. So signals that are pending since the agent blocked them are discarded here, and later ones ignored
    # until train.py handles them. The exception is a SIGTERM of the parent: torch sends it once, to end the rank after
    # another one has failed.
    is_to_end = False
    while (pending := signal.sigtimedwait(FORWARDED, 0)) is not None:
        is_to_end |= pending.si_signo == signal.SIGTERM and pending.si_pid == os.getppid()
    for signum in FORWARDED:
        signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if is_to_end:
        signal.raise_signal(signal.SIGTERM)
    if log_dir:
        for stream, suffix in ((1, "out"), (2, "err")):
            path = Path(log_dir) / f"rank_{launched().rank:05}.{suffix}"
            new = path.with_name(f".{path.name}")
            new.unlink(missing_ok=True)
            new.symlink_to(os.path.relpath(os.readlink(f"/proc/self/fd/{stream}"), path.parent))
            new.replace(path)  # also a link of an earlier attempt
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as end:
        if end.code != STOPPED_EARLY:
            raise
        Path(mark).touch()


if __name__ == "__main__":
    _, mark, log_dir, *overrides = sys.argv
    sys.argv = ["train.py", *overrides]
    main(mark, log_dir)
