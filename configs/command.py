"""How a tool's command line ends: one line and an exit status, the same for the same mistake in every tool."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from configs.exit_status import FAILED, INTERRUPTED, WRONG_CONFIG
from configs.schema import ConfigError

# What a wrong path does; the other errors of files, such as a full disk, are no mistake of the command line.
WRONG_PATHS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
}


def run(body: Callable[[], int | None]) -> int:
    """Run a tool's body; its exit status: what it returns (None: 0), 2 for what the user got wrong, 1 for files that
    fail.

    Every error of these is one line on standard error. Bugs keep their traceback.
    """
    try:
        status = body() or 0
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _end(str(error), WRONG_CONFIG)
    except BrokenPipeError:
        drop_output()
        return 0
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None and error.strerror else str(error)
        return _end(text, WRONG_CONFIG if error.errno in WRONG_PATHS else FAILED)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)


def drop_output() -> None:
    """Write nothing more to standard output, whose reader has seen enough, as in `... | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(text: str, status: int) -> int:
    sys.stdout.flush()
    print("error: " + " ".join(text.split()), file=sys.stderr, flush=True)
    return status
