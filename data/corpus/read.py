"""The documents of a span, by the format of its file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from configs.schema import ConfigError
from data.corpus.documents import BadLine, Document, Span
from data.corpus.encodings import Lines, refuse_other_encodings
from data.corpus.parquet import read_parquet
from data.corpus.parts import BLANK_RUN, DOCUMENT_BYTES, text_cut
from data.corpus.rows import json_text


def read_span(span: Span, text_key: str) -> Iterator[Document | BadLine]:
    """The documents of a span, in order, and each line that could not be used."""
    if span.format == "parquet":
        yield from read_parquet(span, text_key)
        return
    try:
        with open(span.path, "rb") as file:
            file.seek(span.start)
            content = file.read(span.end - span.start)
    except OSError as error:
        raise ConfigError(f"data.corpus: cannot read {span.path}: {error.strerror}") from error
    if span.format not in ("stdlib", "topics"):
        refuse_other_encodings(span, content)
    if span.start == 0:
        content = content.removeprefix(b"\xef\xbb\xbf")
    if span.format == "jsonl":
        yield from _read_jsonl(span, content, text_key)
    elif span.format == "text":
        yield from _read_text(span, content)
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
    span: Span, name: str, raw: bytes, offset: int, content: bytes, lines: Lines
) -> Iterator[Document | BadLine]:
    """The document in `raw`, which begins at `offset` of `content`; a line that is no UTF-8 is reported and left
    out."""
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
    if text.strip():
        yield Document(name, text)


def _read_text(span: Span, content: bytes) -> Iterator[Document | BadLine]:
    begin, lines = 0, Lines(span)
    for end in [*(run.end() for run in BLANK_RUN.finditer(content)), len(content)]:
        while begin < end:
            cut = end if end - begin <= 2 * DOCUMENT_BYTES else min(text_cut(content, begin + DOCUMENT_BYTES), end)
            raw = content[begin:cut]
            stripped = raw.strip(b"\r\n")
            lead = len(raw) - len(raw.lstrip(b"\r\n"))
            yield from _decode(span, f"{span.name}@{span.start + begin}", stripped, begin + lead, content, lines)
            begin = cut


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


def _read_topics(span: Span, content: bytes) -> Iterator[Document]:
    """pydoc's topics: prose about the language, in a dictionary literal."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Dict):
            for topic, text in ast.literal_eval(node).items():
                yield Document(f"{span.name}@{topic}", text)
