"""Where the documents of a .txt file ended in an earlier version: after two empty lines, or after 64 KiB.

A run that was begun so goes on so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

RULE = "earlier"
DOCUMENT_BYTES = 1 << 16
BLANK_RUN = re.compile(rb"\n(?:[ \t\r]*\n){2,}")


def cut(content: Any, position: int) -> int:
    """Where a text may be cut near `position`: after a run of empty lines, else after a line, else after a space."""
    stop = position + DOCUMENT_BYTES
    run = BLANK_RUN.search(content, position, stop)
    if run:
        return run.end()
    for separator in (b"\n", b" "):
        found = content.find(separator, position, stop)
        if found >= 0:
            return found + 1
    found = content.find(b"\n", stop)
    return len(content) if found < 0 else found + 1


def documents(content: bytes) -> Iterator[tuple[int, int, int]]:
    """(where it is named after, first byte, end) of each document."""
    begin = 0
    for end in [*(run.end() for run in BLANK_RUN.finditer(content)), len(content)]:
        while begin < end:
            stop = end if end - begin <= 2 * DOCUMENT_BYTES else min(cut(content, begin + DOCUMENT_BYTES), end)
            raw = content[begin:stop]
            lead = len(raw) - len(raw.lstrip(b"\r\n"))
            yield begin, begin + lead, begin + lead + len(raw.strip(b"\r\n"))
            begin = stop
