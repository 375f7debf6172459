"""Tables of text, aligned or in markdown, as the benchmarks print them."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """One line per row, under the headings; every row has as many cells."""
    if markdown:
        lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
        return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in [headings, *rows])
