"""What launch/agent.py starts as each rank: train.py, whose early stop on purpose torchrun must not take for a
failure."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from configs import last_words
from configs.exit_status import STOPPED_EARLY
from configs.ranks import launched

TRAIN = Path(__file__).parent.parent / "train.py"
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # signals that the agent gives to its ranks


def main(mark: str, log_dir: str) -> None:
    """Run train.py with the rest of the command line; on an early stop touch `mark` and end with 0."""
    last_words.of_exceptions()
    # Slurm signals every process of a job. A rank that cannot answer yet lets it pass: the agent tells it again when it
    # can. So what is pending since the agent blocked it is forgotten here, and the others stay ignored until train.py
    # takes them. But for a SIGTERM of the parent: so torch ends the rank where another has failed, and it asks once.
    is_to_end = False
    while (pending := signal.sigtimedwait(HANDED_ON, 0)) is not None:
        is_to_end |= pending.si_signo == signal.SIGTERM and pending.si_pid == os.getppid()
    for signum in HANDED_ON:
        signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if is_to_end:
        signal.raise_signal(signal.SIGTERM)
    if log_dir:
        for stream, suffix in ((1, "out"), (2, "err")):
            _link(Path(log_dir) / f"rank_{launched().rank:05}.{suffix}", os.readlink(f"/proc/self/fd/{stream}"))
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as end:
        if end.code != STOPPED_EARLY:
            raise
        Path(mark).touch()


def _link(path: Path, target: str) -> None:
    """Make `path` lead to `target`, also where it led to an earlier attempt's."""
    new = path.with_name(f".{path.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(target, path.parent))
    new.replace(path)


if __name__ == "__main__":
    _, mark, log_dir, *overrides = sys.argv
    sys.argv = ["train.py", *overrides]
    main(mark, log_dir)
