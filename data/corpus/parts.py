"""Cut a source's files into parts of work, each a list of spans."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

from data.corpus.documents import Span
from data.corpus.kinds import TEXT
from data.corpus.parquet import open_parquet
from data.corpus.rows import is_one_value
from data.corpus.sentences import has_a_sentence_a_line, head_of
from data.corpus.signatures import refuse_another_kind, refuse_pointer
from data.corpus.sources import File
from data.corpus.text import PIECE_BYTES, next_border

MIN_PART_BYTES, MAX_PART_BYTES, TARGET_PARTS = 1 << 20, 1 << 25, 64


def plan_parts(files: Iterable[File], unpacked: dict[str, str], rule: str = "file") -> list[list[Span]]:
    """Cut files into parts of work, each a list of spans, in corpus order; `unpacked`: path -> its decompressed copy;
    `rule`: data.documents_in_text.

    The cut depends on the files alone, so that a later run continues an earlier one with any number of workers.
    """
    files = list(files)
    sizes = [os.path.getsize(unpacked.get(file.path, file.path)) for file in files]
    part_bytes = min(max(sum(sizes) // TARGET_PARTS, MIN_PART_BYTES), MAX_PART_BYTES)
    parts: list[list[Span]] = [[]]
    filled = 0
    for file, size in zip(files, sizes, strict=True):
        for span in _cut_file(file, unpacked.get(file.path, file.path), size, part_bytes, rule):
            if filled and filled + span.size > part_bytes:
                parts.append([])
                filled = 0
            parts[-1].append(span)
            filled += span.size
    return [part for part in parts if part]


def _cut_file(file: File, path: str, size: int, part_bytes: int, rule: str) -> Iterator[Span]:
    if file.format not in ("stdlib", "topics"):
        refuse_pointer(path)
        if file.format != "parquet":
            refuse_another_kind(path, file.path)
    is_text = file.format == TEXT
    by_line = is_text and rule != "line" and has_a_sentence_a_line(head_of(path))
    kind = file.format
    if kind == "json":  # by its name it may be lines, as C4's and Dolma's are, or one value
        kind = "values" if is_one_value(path) else "jsonl"

    def span(start: int, end: int, num_bytes: int) -> Span:
        return Span(path, file.path, file.name, kind, start, end, num_bytes, rule if is_text else "", by_line)

    if kind == "parquet":
        groups = open_parquet(file.path).metadata
        for i in range(groups.num_row_groups):
            yield span(i, i + 1, size // groups.num_row_groups)
    elif kind not in (TEXT, "jsonl") or size <= part_bytes:
        yield span(0, size, size)
    else:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 0
            while start < size:
                end = _part_end(content, start, part_bytes, rule if is_text else None)
                yield span(start, end, end - start)
                start = end


def _part_end(content: Any, start: int, part_bytes: int, rule: str | None) -> int:
    """Where the part that begins at `start` ends. rule: of a text; None: lines."""
    position = start + part_bytes
    if rule is not None:
        position = max(position // PIECE_BYTES, start // PIECE_BYTES + 1) * PIECE_BYTES
    if position >= len(content):
        return len(content)
    return line_end(content, position) if rule is None else next_border(content, position, rule)


def line_end(content: Any, position: int, stop: int | None = None) -> int:
    """The first position at or after `position` that begins a line; `stop` or the end when there is none."""
    stop = len(content) if stop is None else min(stop, len(content))
    found = content.find(b"\n", position - 1, stop)
    return stop if found < 0 else found + 1
