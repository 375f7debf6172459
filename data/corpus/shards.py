"""Shards of work: lists of spans into which the files of a source are cut."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

from data.corpus.documents import Span
from data.corpus.file_kinds import TEXT, refuse_another_kind, refuse_pointer
from data.corpus.sentences import has_a_sentence_a_line, head_of
from data.corpus.sources import File
from data.corpus.text import CELL_BYTES, next_border
from data.corpus.text_fields import is_one_value, open_parquet

MIN_SHARD_BYTES, MAX_SHARD_BYTES, TARGET_SHARDS = 1 << 20, 1 << 25, 64


def plan_shards(files: Iterable[File], unpacked: dict[str, str], rule: str = "file") -> list[list[Span]]:
    """Divide files into shards of work, each a list of spans (byte ranges), in the order of the corpus.

    unpacked: path of a file's decompressed copy, by the file's path. rule: data.documents_in_text. The shards depend
    only on the files, so a later run with any number of workers can use finished shards of an earlier run.
    """
    files = list(files)
    sizes = [os.path.getsize(unpacked.get(file.path, file.path)) for file in files]
    shard_bytes = min(max(sum(sizes) // TARGET_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    shards: list[list[Span]] = [[]]
    filled = 0
    for file, size in zip(files, sizes, strict=True):
        for span in _cut_file(file, unpacked.get(file.path, file.path), size, shard_bytes, rule):
            if filled and filled + span.size > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(span)
            filled += span.size
    return [shard for shard in shards if shard]


def _cut_file(file: File, path: str, size: int, shard_bytes: int, rule: str) -> Iterator[Span]:
    if file.format not in ("stdlib", "topics"):
        refuse_pointer(path)
        if file.format != "parquet":
            refuse_another_kind(path, file.path)
    is_text = file.format == TEXT
    by_line = is_text and rule != "line" and has_a_sentence_a_line(head_of(path))
    kind = file.format
    if kind == "json":  # JSON lines, as in C4 and Dolma, or a single value: the name does not say
        kind = "values" if is_one_value(path) else "jsonl"

    def span(start: int, end: int, num_bytes: int) -> Span:
        return Span(path, file.path, file.name, kind, start, end, num_bytes, rule if is_text else "", by_line)

    if kind == "parquet":
        groups = open_parquet(file.path).metadata
        for i in range(groups.num_row_groups):
            yield span(i, i + 1, size // groups.num_row_groups)
    elif kind not in (TEXT, "jsonl") or size <= shard_bytes:
        yield span(0, size, size)
    else:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 0
            while start < size:
                end = _shard_end(content, start, shard_bytes, rule if is_text else None)
                yield span(start, end, end - start)
                start = end


def _shard_end(content: Any, start: int, shard_bytes: int, rule: str | None) -> int:
    """Return the byte offset at which the shard that begins at byte `start` ends. rule: data.documents_in_text, or None
    for JSON lines."""
    position = start + shard_bytes
    if rule is not None:
        position = max(position // CELL_BYTES, start // CELL_BYTES + 1) * CELL_BYTES
    if position >= len(content):
        return len(content)
    if rule is not None:
        return next_border(content, position, rule)
    found = int(content.find(b"\n", position - 1))
    return len(content) if found < 0 else found + 1
