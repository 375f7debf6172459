"""What is said of a corpus without a document."""

from __future__ import annotations

SHOWN_BAD_LINES = 5
SHOWN_REASONS = 3


def no_documents(name: str, num_bad: int, bad: list[str]) -> str:
    """The message for a corpus without a document: the first reasons, each once, with the file and the line."""
    if not num_bad:
        return f"data.corpus: {name} holds no text"
    by_reason: dict[str, str] = {}
    for line in bad:
        by_reason.setdefault(line.split(": ", 1)[-1], line)
    first = list(by_reason.values())[:SHOWN_REASONS]
    latin = next((line for line in bad if ": not UTF-8" in line or line.endswith("is not UTF-8")), None)
    advice = " Text must be UTF-8: convert it, for example with: iconv -f LATIN1 -t UTF-8 < FILE > NEW" if latin else ""
    which = "its only line is bad" if num_bad == 1 else f"all {num_bad:,} lines are bad, the first"
    return f"data.corpus: {name} holds no documents: {which}: {'; '.join(first)}{'.' if advice else ''}{advice}"
