"""Text that is no UTF-8, with the command that converts it, and the line numbers that messages give."""

from __future__ import annotations

import shlex

from configs.schema import ConfigError
from data.corpus.documents import Span

BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
UNPACKERS = ((".gz", "gzip"), (".zst", "zstd"), (".xz", "xz"), (".bz2", "bzip2"))
NUL_FOR_TR = r"'\000'"


def refuse_other_encodings(span: Span, content: bytes) -> None:
    """Raise ConfigError for UTF-16 and UTF-32, and for a NUL byte, with the command that mends it."""
    nul = content.find(b"\0")
    if nul < 0 and span.start:
        return
    with open(span.path, "rb") as file:
        head = file.read(4096)
    encoding = next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), None)
    said = "begins with the byte order mark of"
    if encoding is None and nul >= 0:
        place = f"data.corpus: {span.shown}:{Lines(span).number(content, nul)} holds a NUL byte, which no text has"
        zeros = [head[i::2].count(0) / (len(head) / 2) for i in range(2)]
        if max(zeros) < 0.3 or min(zeros) > 0.1:
            raise ConfigError(
                f"{place}. Take it out, for example with: {_through(span.shown, ['tr', '-d', NUL_FOR_TR])}"
            )
        encoding, said = "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE", "looks like"
    if encoding is not None:
        command = _through(span.shown, ["iconv", "-f", encoding, "-t", "UTF-8"])
        raise ConfigError(
            f"data.corpus: {span.shown} {said} {encoding}, but text must be UTF-8. Convert it with: {command}"
        )


def _through(path: str, command: list[str]) -> str:
    """A shell's line that sends a file's text through a command."""
    unpacker = next((tool for suffix, tool in UNPACKERS if path.lower().endswith(suffix)), None)
    words, name = " ".join(command), shlex.quote(path)
    return f"{unpacker} -dc {name} | {words} > NEW" if unpacker else f"{words} < {name} > NEW"


class Lines:
    """Line numbers in a span's file; what comes before the span is counted once, when the first is asked for."""

    def __init__(self, span: Span):
        self._span = span
        self._before: int | None = None

    def number(self, content: bytes, offset: int) -> int:
        """The number, from 1, of the line with byte `offset` of the span's content."""
        return self.at(content.count(b"\n", 0, offset))

    def at(self, index: int) -> int:
        """The number in the file of the span's line `index`, counted from 0."""
        if self._before is None:
            self._before = _lines_before(self._span)
        return self._before + index + 1


def _lines_before(span: Span) -> int:
    """Line ends of the file before the span; asked for only when a line is bad."""
    count, position = 0, 0
    with open(span.path, "rb") as file:
        while position < span.start:
            block = file.read(min(1 << 24, span.start - position))
            count += block.count(b"\n")
            position += len(block)
    return count
