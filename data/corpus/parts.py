"""Cut a source's files into parts of work, each a list of spans."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from data.corpus.documents import Span
from data.corpus.parquet import open_parquet
from data.corpus.sources import File

MIN_PART_BYTES, MAX_PART_BYTES, TARGET_PARTS = 1 << 20, 1 << 25, 64
DOCUMENT_BYTES = 1 << 16  # a .txt document is cut after this many
BLANK_RUN = re.compile(rb"\n(?:[ \t\r]*\n){2,}")


def plan_parts(files: Iterable[File], unpacked: dict[str, str]) -> list[list[Span]]:
    """Cut files into parts of work, each a list of spans, in corpus order; `unpacked`: path -> its decompressed copy.

    The cut depends on the files alone, so that a later run continues an earlier one with any number of workers.
    """
    files = list(files)
    sizes = [os.path.getsize(unpacked.get(file.path, file.path)) for file in files]
    part_bytes = min(max(sum(sizes) // TARGET_PARTS, MIN_PART_BYTES), MAX_PART_BYTES)
    parts: list[list[Span]] = [[]]
    filled = 0
    for file, size in zip(files, sizes, strict=True):
        for span in _cut_file(file, unpacked.get(file.path, file.path), size, part_bytes):
            if filled and filled + span.size > part_bytes:
                parts.append([])
                filled = 0
            parts[-1].append(span)
            filled += span.size
    return [part for part in parts if part]


def _cut_file(file: File, path: str, size: int, part_bytes: int) -> Iterator[Span]:
    def span(start: int, end: int, num_bytes: int) -> Span:
        return Span(path, file.path, file.name, file.format, start, end, num_bytes)

    if file.format == "parquet":
        groups = open_parquet(file.path).metadata
        for i in range(groups.num_row_groups):
            yield span(i, i + 1, size // groups.num_row_groups)
    elif file.format not in ("text", "jsonl") or size <= part_bytes:
        yield span(0, size, size)
    else:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 0
            while start < size:
                end = size
                if start + part_bytes < size:
                    end = (
                        text_cut(content, start + part_bytes)
                        if file.format == "text"
                        else line_end(content, start + part_bytes)
                    )
                yield span(start, end, end - start)
                start = end


def line_end(content: Any, position: int, stop: int | None = None) -> int:
    """The first position at or after `position` that begins a line; `stop` or the end when there is none."""
    stop = len(content) if stop is None else min(stop, len(content))
    found = content.find(b"\n", position - 1, stop)
    return stop if found < 0 else found + 1


def text_cut(content: Any, position: int) -> int:
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
