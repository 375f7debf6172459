"""Where the documents of a text file begin and end (data.documents_in_text), and where a large one is taken in pieces.

* file: the file is a document, as it is.
* blank_line: a document is what lies between lines that are empty or of white space alone.
* line: a line is a document; lines of white space alone are none.

A line ends with LF or CR LF. CR alone, form feeds, U+2028 and the like are characters of a line.

A file is read in cells of about PIECE_BYTES, whose borders depend on its bytes alone. So documents and tokens are the
same however a file is cut into parts of work, and memory is bounded: a document that crosses a border is tokenized in
pieces. A border lies where a tokenizer would cut as well: after an empty line, else after a line, before a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

PIECE_BYTES = 1 << 20
REACH_BYTES = 1 << 16  # from the place wanted to a border, and how far back is looked whether a line is empty
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


class TextPiece(NamedTuple):
    """Bytes [begin, end) of a span's content; whether they begin and end a document."""

    begin: int
    end: int
    begins: bool
    ends: bool


def next_border(content: Any, position: int, rule: str) -> int:
    """The border of cells at or after `position`."""
    stop = min(position + REACH_BYTES, len(content))
    for pattern in BORDERS[rule]:
        found = pattern.search(content, position - (pattern is not BEFORE_SPACE), stop)
        if found:
            return found.end()
    while stop < len(content) and content[stop] & 0xC0 == 0x80 and stop < position + REACH_BYTES + 3:
        stop += 1  # not in the middle of a character
    return stop


def pieces(content: bytes, before: bytes, start: int, at_end: bool, rule: str) -> Iterator[TextPiece]:
    """The documents of a span, or pieces of them, in order.

    content: bytes from `start` of the file, which is a border; before: what lies before them, at least REACH_BYTES of
    it; at_end: whether the file ends with them.
    """
    places = range(-(start % PIECE_BYTES) + PIECE_BYTES, len(content), PIECE_BYTES)
    last = (start + len(content)) // PIECE_BYTES * PIECE_BYTES - start  # of the border that the content ends with
    inner = [next_border(content, place, rule) for place in places if at_end or place != last]
    borders = [0, *(border for border in inner if border < len(content)), len(content)]
    for begin, end in pairwise(borders):
        resumes = start + begin > 0 and _crossed(content, before, begin, rule)
        goes_on = not (at_end and end == len(content)) and _crossed(content, before, end, rule)
        if start + begin == 0 and content.startswith(BYTE_ORDER_MARK):
            begin = len(BYTE_ORDER_MARK)
        if rule == "file":
            yield TextPiece(begin, end, not resumes, not goes_on)
        elif rule == "line":
            yield from _lines(content, begin, end, resumes, goes_on)
        else:
            at_line_start = start + begin == 0 or _ends_line(content, before, begin) or begin == len(BYTE_ORDER_MARK)
            yield from _blocks(content, begin, end, resumes, goes_on, at_line_start)


def _ends_line(content: bytes, before: bytes, position: int) -> bool:
    return (content[position - 1 : position] or before[-1:]) == b"\n"


def _crossed(content: bytes, before: bytes, position: int, rule: str) -> bool:
    """Whether a document goes on over this border."""
    if rule == "file":
        return True
    if rule == "line":
        return not _ends_line(content, before, position)
    context = content[max(0, position - REACH_BYTES) : position]
    if len(context) < REACH_BYTES:
        context = before[-REACH_BYTES:] + context
    return ENDS_WITH_BLANK_LINE.search(context) is None


def _lines(content: bytes, begin: int, end: int, resumes: bool, goes_on: bool) -> Iterator[TextPiece]:
    while begin < end:
        found = content.find(b"\n", begin, end)
        stop = end if found < 0 else found
        cut = stop - (found >= 0 and content[begin:stop].endswith(b"\r"))
        yield TextPiece(begin, cut, not resumes, found >= 0 or not goes_on)
        resumes, begin = False, stop + 1


def _blocks(
    content: bytes, begin: int, end: int, resumes: bool, goes_on: bool, at_line_start: bool
) -> Iterator[TextPiece]:
    if at_line_start and (blank := LEADING_BLANK_LINES.match(content, begin, end)):
        if resumes:
            yield TextPiece(begin, begin, False, True)
            resumes = False
        begin = blank.end()
    while found := BLANK_LINES.search(content, begin, end):
        cut = found.start() - (content[begin : found.start()].endswith(b"\r"))
        yield TextPiece(begin, cut, not resumes, True)
        resumes, begin = False, found.end()
    if begin < end or resumes:
        yield TextPiece(begin, end if goes_on else _text_end(content, begin, end), not resumes, not goes_on)


def _text_end(content: bytes, begin: int, end: int) -> int:
    """The end of the last line that is not of white space alone, without its line end."""
    while (found := content.rfind(b"\n", begin, end)) >= 0 and not content[found:end].strip():
        end = found - content[begin:found].endswith(b"\r")
    return end
