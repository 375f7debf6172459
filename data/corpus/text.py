"""The bounds of documents in text files (data.documents_in_text), and of the segments in which large documents are
read.

* file: the file is one document.
* blank_line: a document is the text between lines that are empty or contain only white space.
* line: a line is a document; lines of white space are skipped.

A line ends with LF or CR LF. CR alone, form feeds, U+2028 and the like are characters of a line.

A file is read in cells of about CELL_BYTES, whose borders depend only on the file's bytes. So documents and tokens are
the same however the file is divided into shards of work, and memory is bounded: a document that crosses a border is
tokenized in segments. Borders are at positions where a tokenizer would cut, too: after an empty line, else after a
line, else before a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

CELL_BYTES = 1 << 20
REACH_BYTES = 1 << 16  # largest distance of a border from a multiple of CELL_BYTES; also the context before a position
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

AFTER_BLANK = re.compile(rb"\n[ \t\r\f\v]*\n(?=\S)")
AFTER_LINE = re.compile(rb"\n(?=\S)")
LINE_END = re.compile(rb"\n")
BEFORE_SPACE = re.compile(rb"(?= \S)")
BORDERS = {
    "file": (AFTER_BLANK, AFTER_LINE, LINE_END, BEFORE_SPACE),
    "blank_line": (AFTER_BLANK, AFTER_LINE, LINE_END, BEFORE_SPACE),
    "line": (LINE_END, BEFORE_SPACE),
}
RULES = tuple(BORDERS)
BLANK_LINES = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")
LEADING_BLANK_LINES = re.compile(rb"(?:[ \t\r\f\v]*\n)+")
ENDS_WITH_BLANK_LINE = re.compile(rb"(?:\A|\n)[ \t\r\f\v]*\n\Z")


class TextSegment(NamedTuple):
    """A document, or a segment of a large document, in a text: bytes [begin, end). `begins`, `ends`: whether a document
    begins at `begin` and ends at `end`."""

    begin: int
    end: int
    begins: bool
    ends: bool


def next_border(content: Any, position: int, rule: str) -> int:
    """Return the byte offset, at or after `position`, at which to cut a large text: after an empty line or a line if
    possible, else before a space."""
    stop = min(position + REACH_BYTES, len(content))
    for pattern in BORDERS[rule]:
        found = pattern.search(content, position - (pattern is not BEFORE_SPACE), stop)
        if found:
            return found.end()
    while stop < len(content) and content[stop] & 0xC0 == 0x80 and stop < position + REACH_BYTES + 3:
        stop += 1  # do not cut a character
    return stop


def text_segments(content: bytes, before: bytes, start: int, at_end: bool, rule: str) -> Iterator[TextSegment]:
    """Yield the documents in a byte range of a text file in order, and large documents in segments.

    content: the file's bytes from offset `start` on. before: the bytes before `start`, at least the last REACH_BYTES.
    at_end: whether `content` reaches the end of the file.
    """
    targets = range(-(start % CELL_BYTES) + CELL_BYTES, len(content), CELL_BYTES)
    # Target position of the border at the end of the content.
    last = (start + len(content)) // CELL_BYTES * CELL_BYTES - start
    inner = [next_border(content, target, rule) for target in targets if at_end or target != last]
    borders = [0, *(border for border in inner if border < len(content)), len(content)]
    for begin, end in pairwise(borders):
        resumes = start + begin > 0 and _is_inside(content, before, begin, rule)
        continues = not (at_end and end == len(content)) and _is_inside(content, before, end, rule)
        if start + begin == 0 and content.startswith(BYTE_ORDER_MARK):
            begin = len(BYTE_ORDER_MARK)
        if rule == "file":
            yield TextSegment(begin, end, not resumes, not continues)
        elif rule == "line":
            while begin < end:
                found = content.find(b"\n", begin, end)
                stop = end if found < 0 else found
                cut = stop - (found >= 0 and content[begin:stop].endswith(b"\r"))
                yield TextSegment(begin, cut, not resumes, found >= 0 or not continues)
                resumes, begin = False, stop + 1
        else:
            at_line_start = start + begin == 0 or _ends_line(content, before, begin) or begin == len(BYTE_ORDER_MARK)
            yield from _blocks(content, begin, end, resumes, continues, at_line_start)


def _ends_line(content: bytes, before: bytes, position: int) -> bool:
    return (content[position - 1 : position] or before[-1:]) == b"\n"


def _is_inside(content: bytes, before: bytes, position: int, rule: str) -> bool:
    """Return whether a document continues across byte `position` of `content`, rather than ending there. before: the
    bytes before `content`."""
    if rule == "file":
        return True
    if rule == "line":
        return not _ends_line(content, before, position)
    context = content[max(0, position - REACH_BYTES) : position]
    if len(context) < REACH_BYTES:
        context = before[-REACH_BYTES:] + context
    return ENDS_WITH_BLANK_LINE.search(context) is None


def _blocks(
    content: bytes, begin: int, end: int, resumes: bool, continues: bool, at_line_start: bool
) -> Iterator[TextSegment]:
    if at_line_start and (blank := LEADING_BLANK_LINES.match(content, begin, end)):
        if resumes:
            yield TextSegment(begin, begin, False, True)
            resumes = False
        begin = blank.end()
    while found := BLANK_LINES.search(content, begin, end):
        cut = found.start() - (content[begin : found.start()].endswith(b"\r"))
        yield TextSegment(begin, cut, not resumes, True)
        resumes, begin = False, found.end()
    if begin < end or resumes:
        if not continues:  # leave out trailing lines of white space, and the last line end
            while (line_end := content.rfind(b"\n", begin, end)) >= 0 and not content[line_end:end].strip():
                end = line_end - content[begin:line_end].endswith(b"\r")
        yield TextSegment(begin, end, not resumes, not continues)
