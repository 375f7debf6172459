"""Error handling that all command-line tools share: an expected error becomes one line on stderr and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from base.errors import ConfigError
from base.exit_handler import FAILED, INTERRUPTED, WRONG_CONFIG

# Errors that a wrong path causes. Other file errors, such as a full disk, are no mistake in the command line.
WRONG_PATHS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
}


def run(body: Callable[[], int | None]) -> int:
    """Run the body of a command-line tool and return the exit status: the status that the body returns (0 for None),
    2 for a mistake of the user, 1 if a file cannot be read or written, or 130 for Ctrl-C.

    Each of these errors prints one line on stderr. Any other exception is a bug and keeps its traceback.
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
    """Discard all further standard output because its reader has closed the pipe, as in `... | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(text: str, status: int) -> int:
    sys.stdout.flush()
    print("error: " + " ".join(text.split()), file=sys.stderr, flush=True)
    return status
