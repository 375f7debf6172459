"""The documents of a span, by the format of its file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from configs.schema import ConfigError
from data.corpus.documents import BadLine, Document, Span
from data.corpus.encodings import Lines, refuse_other_encodings
from data.corpus.kinds import TEXT
from data.corpus.parquet import read_parquet
from data.corpus.rows import json_text, json_values
from data.corpus.text import BYTE_ORDER_MARK, REACH_BYTES, pieces


def read_span(span: Span, text_key: str) -> Iterator[Document | BadLine]:
    """The documents of a span, in order, and each line that could not be used."""
    if span.format == "parquet":
        yield from read_parquet(span, text_key)
        return
    try:
        with open(span.path, "rb") as file:
            file.seek(max(0, span.start - REACH_BYTES))
            before = file.read(min(span.start, REACH_BYTES))
            content = file.read(span.end - span.start)
            at_end = not file.read(1)
    except OSError as error:
        raise ConfigError(f"data.corpus: cannot read {span.path}: {error.strerror}") from error
    if span.format not in ("stdlib", "topics"):
        refuse_other_encodings(span, content)
    if span.format == TEXT:
        yield from _read_text(span, content, before, at_end)
        return
    if span.start == 0:
        content = content.removeprefix(BYTE_ORDER_MARK)
    if span.format == "jsonl":
        yield from _read_jsonl(span, content, text_key)
    elif span.format == "values":
        yield from _read_values(span, content, text_key)
    elif span.format == "topics":
        yield from _read_topics(span, content)
    elif span.format == "stdlib":
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return  # fixtures of the codec tests; not part of this corpus by definition
        if text.strip():
            yield Document(span.name, text)
    else:
        yield from _decode(span, span.name, content, 0, content, Lines(span))


def _decode(
    span: Span,
    name: str,
    raw: bytes,
    offset: int,
    content: bytes,
    lines: Lines,
    begins: bool = True,
    ends: bool = True,
) -> Iterator[Document | BadLine]:
    """The document, or the piece of one, in `raw`, which begins at `offset` of `content`; a line that is no UTF-8 is
    reported and left out."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        kept = []
        first = content.count(b"\n", 0, offset)
        for i, line in enumerate(raw.split(b"\n")):
            try:
                kept.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield BadLine(
                    span.shown, lines.at(first + i), f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
                )
        text = "\n".join(kept)
    if text.strip() or not (begins and ends):
        yield Document(name, text, begins, ends)


def _read_text(span: Span, content: bytes, before: bytes, at_end: bool) -> Iterator[Document | BadLine]:
    lines = Lines(span)
    for begin, end, begins, ends in pieces(content, before, span.start, at_end, span.rule):
        name = span.name if span.rule == "file" else f"{span.name}@{span.start + begin}"
        yield from _decode(span, name, content[begin:end], begin, content, lines, begins, ends)


def _read_jsonl(span: Span, content: bytes, text_key: str) -> Iterator[Document | BadLine]:
    offset, lines = span.start, Lines(span)
    for i, line in enumerate(content.split(b"\n")):
        if line.strip():
            text, reason = json_text(line, text_key)
            if reason:
                yield BadLine(span.shown, lines.at(i), reason)
            else:
                yield Document(f"{span.name}@{offset}", text)
        offset += len(line) + 1


def _read_values(span: Span, content: bytes, text_key: str) -> Iterator[Document | BadLine]:
    """The objects of a file that is one JSON value, or several, over any lines: an array's, or the value itself."""
    for number, line, text, reason in json_values(content, text_key):
        yield BadLine(span.shown, line + 1, reason) if reason else Document(f"{span.name}@{number}", text)


def _read_topics(span: Span, content: bytes) -> Iterator[Document]:
    """pydoc's topics: prose about the language, in a dictionary literal."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Dict):
            for topic, text in ast.literal_eval(node).items():
                yield Document(f"{span.name}@{topic}", text)
