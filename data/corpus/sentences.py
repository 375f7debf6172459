"""Texts cut into sentences, for BERT."""

from __future__ import annotations

import re

SENTENCE_END = re.compile(r"[.!?]['\")\]]*\s+(?=['\"(\[]*[A-Z0-9])|\n[ \t]*\n\s*")
LINE_END = re.compile(r"\n\s*?(?=[ \t]*\S)|\n\s*\Z")
MAX_SENTENCE_CHARACTERS = 400


def split_sentences(text: str, by_line: bool) -> list[str]:
    """Cut a text into sentences; joined they give the text again.

    Prose is cut after ., ! or ? before a capital, and at empty lines; code (`by_line`) after each line. Longer
    sentences than MAX_SENTENCE_CHARACTERS are cut at spaces, so that no text is lost to a sample's length.
    """
    ends = [match.end() for match in (LINE_END if by_line else SENTENCE_END).finditer(text)]
    sentences = []
    begin = 0
    for end in [*ends, len(text)]:
        if not text[begin:end].strip():
            continue  # goes with the next
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
