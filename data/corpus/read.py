"""Readers that yield the documents of a span in each file format. Text that is not UTF-8 is an error, with a command
that converts it."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator

from base.errors import ConfigError
from data.corpus.documents import BadLine, Document, Span
from data.corpus.file_kinds import PACKED, TEXT
from data.corpus.text import BYTE_ORDER_MARK, REACH_BYTES, TextSegment, text_segments
from data.corpus.text_fields import json_text, json_values, read_parquet
from data.read_errors import unreadable

BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
NUL_FOR_TR = r"'\000'"


def read_span(span: Span, text_key: str) -> Iterator[Document | BadLine]:
    """Yield the documents in a byte range of a file in order, and a BadLine for each line without usable text."""
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
        raise unreadable(span.path, error) from error
    if span.format not in ("stdlib", "topics"):
        _refuse_other_encodings(span, content)
    if span.format == TEXT:
        lines = LineNumbers(span)
        for segment in text_segments(content, before, span.start, at_end, span.rule):
            name = span.name if span.rule == "file" else f"{span.name}@{span.start + segment.begin}"
            yield from _decode(span, name, content, segment, lines)
        return
    if span.start == 0:
        content = content.removeprefix(BYTE_ORDER_MARK)
    if span.format == "jsonl":
        offset, lines = span.start, LineNumbers(span)
        for i, row in enumerate(content.split(b"\n")):
            if row.strip():
                text, reason = json_text(row, text_key)
                yield BadLine(span.shown, lines.at(i), reason) if reason else Document(f"{span.name}@{offset}", text)
            offset += len(row) + 1
    elif span.format == "values":
        for number, line, text, reason in json_values(content, text_key):
            yield BadLine(span.shown, line + 1, reason) if reason else Document(f"{span.name}@{number}", text)
    elif span.format == "topics":
        for node in ast.walk(ast.parse(content)):  # a dict literal with texts about Python, by topic
            if isinstance(node, ast.Dict):
                for topic, text in ast.literal_eval(node).items():
                    yield Document(f"{span.name}@{topic}", text)
    elif span.format == "stdlib":
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return  # files of the codec tests, which this corpus leaves out
        if text.strip():
            yield Document(span.name, text)
    else:
        yield from _decode(span, span.name, content, TextSegment(0, len(content), True, True), LineNumbers(span))


def _decode(
    span: Span, name: str, content: bytes, segment: TextSegment, lines: LineNumbers
) -> Iterator[Document | BadLine]:
    """Yield the document, or the segment of a large document, that `segment` delimits in `content`, as text. Lines that
    are not UTF-8 are left out of the text; a BadLine is yielded for each."""
    raw = content[segment.begin : segment.end]
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        kept = []
        first = content.count(b"\n", 0, segment.begin)
        for i, line in enumerate(raw.split(b"\n")):
            try:
                kept.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                reason = f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
                yield BadLine(span.shown, lines.at(first + i), reason)
        text = "\n".join(kept)
    if text.strip() or not (segment.begins and segment.ends):
        yield Document(name, text, segment.begins, segment.ends)


def _refuse_other_encodings(span: Span, content: bytes) -> None:
    """Raise ConfigError, with a command that converts the file, if the text is UTF-16, UTF-32 or contains NUL bytes."""
    nul = content.find(b"\0")
    if nul < 0 and span.start:
        return
    with open(span.path, "rb") as file:
        head = file.read(4096)
    encoding = next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), None)
    evidence = "begins with the byte order mark of"
    if encoding is None and nul >= 0:
        line = LineNumbers(span).at(content.count(b"\n", 0, nul))
        zeros = [head[i::2].count(0) / (len(head) / 2) for i in range(2)]
        if max(zeros) < 0.3 or min(zeros) > 0.1:
            raise ConfigError(
                f"data.corpus: {span.shown}:{line} contains a NUL byte, which is not allowed in text. Remove it, for "
                f"example with: {_shell_line(span.shown, ['tr', '-d', NUL_FOR_TR])}"
            )
        encoding, evidence = "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE", "looks like"
    if encoding is not None:
        command = _shell_line(span.shown, ["iconv", "-f", encoding, "-t", "UTF-8"])
        raise ConfigError(
            f"data.corpus: {span.shown} {evidence} {encoding}, but text must be UTF-8. Convert it with: {command}"
        )


def _shell_line(path: str, command: list[str]) -> str:
    """Return a shell command that pipes the text of a file, decompressed if necessary, through another command."""
    unpacker = next((tool for _, tool, suffix in PACKED if path.lower().endswith(suffix)), None)
    words, name = " ".join(command), shlex.quote(path)
    return f"{unpacker} -dc {name} | {words} > NEW" if unpacker else f"{words} < {name} > NEW"


class LineNumbers:
    """Converter from line numbers within a span (byte range) to line numbers in its file. The first conversion counts
    the lines before the span."""

    def __init__(self, span: Span):
        self._span = span
        self._before: int | None = None

    def at(self, index: int) -> int:
        """Return the line number in the file, counted from 1, of the span's line number `index`, counted from 0."""
        if self._before is None:
            self._before, position = 0, 0
            with open(self._span.path, "rb") as file:
                while position < self._span.start:
                    block = file.read(min(1 << 24, self._span.start - position))
                    self._before += block.count(b"\n")
                    position += len(block)
        return self._before + index + 1
