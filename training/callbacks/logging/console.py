"""What a person sees of a run that is going: lines with a time stamp, and on a terminal a progress bar below them."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from tqdm import tqdm

MAX_COLUMNS = 100  # of the bar's line, however wide the terminal is
BAR_COLUMNS = 10  # of the bar itself
REDRAW_SECONDS = 0.1


def stamp() -> str:
    """Now, as lines about steps begin."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


class Bar:
    """A progress bar on the last line of the terminal of standard error, until `close`.

    Meanwhile sys.stdout and sys.stderr are replaced: whatever this process prints, from any thread, logger or library,
    comes out in whole lines above the bar.
    """

    def __init__(self, total: int, done: int):
        self._stderr, self._shown = sys.stderr, 0.0
        form = f"{{percentage:3.0f}}%|{{bar:{BAR_COLUMNS}}}| {{desc}}"
        self._bar: Any = tqdm(
            total=total, initial=done, file=self._stderr, bar_format=form, ncols=self._columns(), desc="starting"
        )
        self._streams = [_Above(sys.stdout, self._bar), _Above(sys.stderr, self._bar)]
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._streams  # type: ignore[assignment]

    def show(self, done: int, parts: Sequence[str], *, now: bool = False) -> None:
        """Draw the bar at `done` with as many of the parts, the important ones first, as the line holds; `now`: even if
        just drawn."""
        if not now and time.monotonic() - self._shown < REDRAW_SECONDS:
            return
        self._shown = time.monotonic()
        self._bar.n, self._bar.ncols = done, self._columns()
        self._bar.set_description_str(fitting(parts, self._bar.ncols - BAR_COLUMNS - len("100%|| ")))  # which draws

    def close(self) -> None:
        """Leave the bar as it is and give the streams back."""
        for name, stream, before in zip(("stdout", "stderr"), self._streams, self._before):
            stream.finish()
            if getattr(sys, name) is stream:  # else someone replaced it meanwhile, and takes ours away
                setattr(sys, name, before)
        self._bar.close()

    def _columns(self) -> int:
        """One less than the terminal has: a full line makes some of them wrap."""
        try:
            columns = os.get_terminal_size(self._stderr.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return min(MAX_COLUMNS, columns or 80) - 1


def fitting(parts: Sequence[str], columns: int) -> str:
    """The first parts, as many as `columns` hold with bars between."""
    line = parts[0] if parts else ""
    for part in parts[1:]:
        if len(line) + len(" | ") + len(part) > columns:
            break
        line += f" | {part}"
    return line[:columns]


class _Above(io.TextIOBase):
    """A stream whose lines come out above a bar. What does not end in a newline waits for it."""

    def __init__(self, stream: TextIO, bar: Any):
        self._stream, self._bar, self._rest = stream, bar, ""

    def write(self, text: str) -> int:
        with self._bar.get_lock():
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            if newline:
                self._bar.clear(nolock=True)
                self._stream.write(lines + newline)
                self._stream.flush()
                self._bar.refresh(nolock=True)
        return len(text)

    def finish(self) -> None:
        """Write what still waits."""
        if self._rest:
            self.write("\n")

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def __getattr__(self, name: str) -> Any:  # buffer, mode and what else a text stream has
        return getattr(self._stream, name)
