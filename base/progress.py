"""Progress messages of long operations, on stderr. Imports nothing of Mixtrain."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_EVERY_SECONDS = 30.0


def begin(text: str) -> None:
    """Print one line that announces a long operation. If there are several ranks, only the first one calls this."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def bar(total: int, what: str, done: int = 0, shown: bool = True) -> tqdm[Any]:
    """Return a tqdm progress bar over `total` bytes, labelled `what`. `done`: bytes that are already finished; `shown`:
    whether to draw the bar. If stderr is not a terminal, the bar prints a line at the start, every LOG_EVERY_SECONDS,
    and at the end."""
    from tqdm import tqdm

    look: dict[str, Any] = {"dynamic_ncols": True, "mininterval": 0.5}
    if not sys.stderr.isatty():
        look = {
            "file": _Lines(sys.stderr),
            "mininterval": LOG_EVERY_SECONDS,
            "bar_format": "{desc}: {n_fmt}B of {total_fmt}B, {rate_fmt}",
        }
    return tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=what, disable=not shown, **look)


class _Lines:
    """File object for tqdm that writes each refresh of the progress bar as a line of a log."""

    def __init__(self, log: TextIO):
        self._log = log

    def write(self, text: str) -> None:
        if text.strip():
            self._log.write(text.strip() + "\n")

    def flush(self) -> None:
        self._log.flush()
