"""Splitting of texts into sentences, for BERT."""

from __future__ import annotations

import re

SENTENCE_END = re.compile(r"[.!?]['\")\]]*\s+(?=['\"(\[]*[A-Z0-9])|\n[ \t]*\n\s*")
LINE_END = re.compile(r"\n\s*?(?=[ \t]*\S)|\n\s*\Z")
MAX_SENTENCE_CHARACTERS = 400
HEAD_BYTES = 1 << 16  # the bytes of a file that decide whether each line is a sentence
LAST_OF_A_LINE = re.compile(r"[.!?\u3002\uff01\uff1f\u0964\u061f\u2026][ '\")\]\u2019\u201d\u00bb\u300d]*\Z")
INSIDE_A_LINE = re.compile(
    r"[.!?]['\")\]\u2019\u201d]*\s+(?=['\"(\[\u2018\u201c]*[A-Z0-9])|\s[.!?]\s+(?=\S)|[\u3002\uff01\uff1f](?=\w)"
)
LEAST_LINES, LEAST_ENDING, MOST_INSIDE = 3, 0.8, 0.35


def split_sentences(text: str, by_line: bool) -> list[str]:
    """Split a text into sentences, whose concatenation is the text.

    Prose is cut after ., ! or ? before a capital letter, and at empty lines. Code and files with one sentence per line
    (`by_line`) are cut after each line. A sentence longer than MAX_SENTENCE_CHARACTERS is cut at spaces, so that no
    text is lost because it does not fit into a sample.
    """
    ends = [match.end() for match in (LINE_END if by_line else SENTENCE_END).finditer(text)]
    sentences = []
    begin = 0
    for end in [*ends, len(text)]:
        if not text[begin:end].strip():
            continue  # white space is joined to the next sentence
        while end - begin > MAX_SENTENCE_CHARACTERS:
            cut = text.rfind(" ", begin + 1, begin + MAX_SENTENCE_CHARACTERS)
            cut = begin + MAX_SENTENCE_CHARACTERS if cut < 0 else cut
            sentences.append(text[begin:cut])
            begin = cut
        sentences.append(text[begin:end])
        begin = end
    if begin < len(text) and sentences:
        sentences[-1] += text[begin:]
    return sentences


def head_of(path: str) -> str:
    """Return the first HEAD_BYTES of a file as text, up to the end of a line."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    return (head if len(head) < HEAD_BYTES else head[: head.rfind(b"\n") + 1] or head).decode("utf-8", "ignore")


def has_a_sentence_a_line(head: str) -> bool:
    """Return whether a text has one sentence per line, as BERT's tools need: most lines end like a sentence, and few
    contain the end of another sentence."""
    lines = [line for line in map(str.strip, head.split("\n")) if line]
    ending = sum(LAST_OF_A_LINE.search(line) is not None for line in lines)
    inside = sum(len(INSIDE_A_LINE.findall(line)) for line in lines)
    return len(lines) >= LEAST_LINES and ending >= LEAST_ENDING * len(lines) and inside <= MOST_INSIDE * len(lines)
